"""NaN and infinity: in the loss, in gradients, weights or activations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gradtracer.detectors.base import DETECTORS, Detector, Finding, forward_order
from gradtracer.records import Measure, ModelDescription, NonFiniteOrigin, Observation, Severity
from gradtracer.samples import LayerTable, Sample

_WORDS = {
    "data": "in the batch, before the first layer",
    "weight": "in a weight, before the forward pass",
    "forward": "in the forward pass",
    "loss": "in the loss, while the model's output was finite",
    "backward": "in the backward pass, while the loss was finite",
    "": "at a step whose layers were not sampled",
}


@DETECTORS.register
class NonFinite(Detector):
    """A number of the training is NaN or infinite, with the layer and the pass in which it first was.

    What:
        The first non-finite value of an episode, in the batch, a weight, an activation, the loss or a gradient; one
        event an episode, however many layers it then floods.

    Why:
        After one update with it every weight is lost and nothing that follows is training.

    Definition:
        Counts of elements that are not finite. Where the capture saw the origin, that is reported. Else, from the
        layers of the sampled step: weight, if the first layer in forward order with a non-finite activation already
        held non-finite weights; forward, that first layer; loss, if the loss is not finite and every activation is;
        backward, the last layer in forward order whose gradient is not finite while the loss is.

    Thresholds:
        One element. There is no healthy NaN; gradients that a loss scaler drops are not counted, because they never
        reach an optimizer step.

    Fixes:
        skip_nonfinite_step while the weights are still finite, rollback once they are not; then the cause: the data,
        the learning rate, or the operation that is named.

    References:
        IEEE 754-2019, section 6.2 (NaN propagates). Micikevicius et al. 2018, arXiv:1710.03740, section 3.2 (loss
        scaling and skipped steps).
    """

    code = "non_finite"
    signal = "loss"

    FORGET_AFTER = 3

    def __init__(self) -> None:
        self._model: ModelDescription | None = None
        self._origin: NonFiniteOrigin | None = None
        self._finding: Finding | None = None
        self._clean = 0

    def observe(self, observation: Observation) -> None:
        """Learn the forward order, and where a non-finite value began."""
        if isinstance(observation, ModelDescription):
            self._model = observation
        elif isinstance(observation, NonFiniteOrigin) and self._finding is None:
            self._origin = observation

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The episode, if this step shows anything that is not finite."""
        bad_loss = math.isinf(sample.loss)
        bad_gradient = math.isinf(sample.grad_norm) or sample.num_non_finite_grads > 0
        table = sample.layers
        weights = _non_finite(table, "num_non_finite_weight")
        activations = _non_finite(table, "num_non_finite_activation")
        if not (bad_loss or bad_gradient or weights or activations):
            self._clean += 1
            if self._clean >= self.FORGET_AFTER:
                self._finding = self._origin = None
            return ()
        self._clean = 0
        if self._finding is None:
            # The finding of the first step stands for the episode: what floods later is no news.
            self._finding = self._first_finding(sample, bad_loss, weights, activations)
        return [self._finding]

    def _first_finding(
        self, sample: Sample, bad_loss: bool, weights: Mapping[str, float], activations: Mapping[str, float]
    ) -> Finding:
        origin = self._origin
        if origin is not None and abs(origin.step - sample.step) <= 1:
            where, layer, count = origin.where, origin.layer, origin.num_non_finite
            operation = f" by {origin.operation}" if origin.operation else ""
        else:
            where, layer, count = self._locate(sample.layers, bad_loss, weights, activations)
            operation = ""
        counts = (
            ("loss", int(bad_loss)),
            ("gradient", int(sample.num_non_finite_grads)),
            ("weight", len(weights)),
            ("activation", len(activations)),
            ("elements", count),
        )
        return Finding(
            state=f"non_finite_{where}" if where else "non_finite",
            severity=Severity.CRITICAL,
            layer=layer,
            evidence=tuple(Measure(name=n, value=None, num_non_finite=c) for n, c in counts if c),
            message=f"A value that is not finite first appeared {_WORDS[where]}"
            f"{f', at {layer}' if layer else ''}{operation}.",
        )

    def _locate(
        self,
        table: LayerTable | None,
        bad_loss: bool,
        weights: Mapping[str, float],
        activations: Mapping[str, float],
    ) -> tuple[str, str | None, int]:
        if table is None:
            return "", None, 0
        if activations:
            first = forward_order(self._model, activations)[0]
            where = "weight" if first in weights else "forward"
            return where, first, _count(activations[first])
        if weights:
            first = forward_order(self._model, weights)[0]
            return "weight", first, _count(weights[first])
        if bad_loss:
            # Without any recorded activation nothing is known about the forward pass.
            return ("loss", None, 1) if table.signal("num_non_finite_activation") else ("", None, 1)
        gradients = {n: g for n, g in table.signal("grad_norm").items() if math.isinf(g)}
        gradients.update(_non_finite(table, "num_non_finite_grad"))
        if not gradients:
            return "backward", None, 0
        return "backward", forward_order(self._model, gradients)[-1], 0


def _non_finite(table: LayerTable | None, signal: str) -> dict[str, float]:
    return {n: c for n, c in table.signal(signal).items() if c > 0} if table is not None else {}


def _count(elements: float) -> int:
    return int(elements) if math.isfinite(elements) else 1
