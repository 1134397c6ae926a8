"""Parameters that receive a gradient and never change."""

from __future__ import annotations

from collections.abc import Sequence

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, ModelDescription, Observation, OptimizerDescription, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class UntrainedParameters(Detector):
    """Parameters receive a gradient at every step and no optimizer holds them.

    What:
        Layers with trainable parameters that are missing from every optimizer.

    Why:
        They keep the values they were made with. A head that was added later, or a layer replaced after the optimizer
        was built, trains nowhere, and the loss still falls a little on account of the others.

    Definition:
        Names of parameters that have a gradient while no optimizer that has made a step holds them (a count), as the
        newest description of the optimizers tells it, once 20 steps have been made.

    Thresholds:
        One parameter: a gradient is computed for it, so nobody froze it on purpose (freezing is requires_grad=False,
        which is not reported). 20 steps, so that each of several optimizers that take turns has had its first.

    Fixes:
        None that is live yet. Change the source: pass these parameters to the optimizer, or set requires_grad=False.

    References:
        PyTorch documentation, torch.optim, "Constructing it".
    """

    code = "untrained_parameters"
    signal = "update_ratio"
    leave_after = 1

    MIN_STEPS = 20

    def __init__(self) -> None:
        self._missing: dict[str, int] = {}
        self._order: dict[str, int] = {}
        self._num_steps = 0
        self._told: list[Finding] = []

    def observe(self, observation: Observation) -> None:
        """Learn what the optimizers hold, and the layers' order."""
        if isinstance(observation, ModelDescription):
            self._order = {layer.name: i for i, layer in enumerate(observation.layers)}
        elif isinstance(observation, OptimizerDescription):
            self._missing = {}
            for parameter in observation.missing:
                layer = parameter.rpartition(".")[0] or "(root)"
                self._missing[layer] = self._missing.get(layer, 0) + 1
        self._told = []

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The layers that no optimizer holds."""
        self._num_steps += 1
        if self._num_steps < self.MIN_STEPS:
            return None
        if self._missing and not self._told:
            self._told = [
                self._finding(layer, count)
                for layer, count in sorted(self._missing.items(), key=lambda item: self._order.get(item[0], 0))
            ]
        return self._told

    def _finding(self, layer: str, count: int) -> Finding:
        return Finding(
            state="untrained",
            severity=Severity.WARNING,
            layer=layer,
            evidence=(Measure(name="num_missing_parameters", value=float(count), threshold=0.0, unit="tensors"),),
            message=f"{count} parameter tensors of {layer} receive a gradient, and no optimizer holds them.",
        )
