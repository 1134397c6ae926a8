"""A loss divided until nothing moves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtracer.detectors._running import LossHistory
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import AuditFinding, Measure, Observation, OptimizerDescription, Severity
from gradtracer.samples import Sample

_SCALE_FREE = ("Adam", "RMSprop", "Adagrad", "Adadelta", "Lion", "Rprop", "LAMB", "LARS", "Adafactor")


def ignores_scale(optimizer: str) -> bool:
    """Whether updates of this class of optimizer do not depend on the scale of the gradient."""
    return any(word in optimizer for word in _SCALE_FREE)


@DETECTORS.register
class LossOffScale(Detector):
    """The whole loss is divided by a large constant, the optimizer feels it, and the loss stands still.

    What:
        Runs whose gradients are all too small by one common factor that stands in the loss expression.

    Why:
        The rate that suits the loss is then too small by this factor; nothing fails, and nothing is learned.

    Definition:
        The audit loss_factor found the loss divided by at least 16 (no unit), the optimizer is none of those that
        normalise by moments, gradients are not accumulated over as many calls, and after 50 steps the loss has gained
        less than a tenth of its first value.

    Thresholds:
        50 steps and a tenth: a loss that has moved by less has not begun to fall. The division is a fact, so only its
        harm has to be shown.

    Fixes:
        set_learning_rate times the constant. In the source: reduce the loss once.

    References:
        PyTorch documentation, torch.nn.CrossEntropyLoss, `reduction`.
    """

    code = "loss_off_scale"
    signal = "loss"

    MIN_STEPS = 50
    STALLED = 0.1

    def __init__(self) -> None:
        self._divided: AuditFinding | None = None
        self._averaged = False
        self._optimizer = ""
        self._loss = LossHistory()

    def observe(self, observation: Observation) -> None:
        """Learn how the loss is built, and who steps."""
        if isinstance(observation, OptimizerDescription):
            self._optimizer = observation.type
        elif isinstance(observation, AuditFinding) and observation.code == "loss_divided":
            self._divided = observation
        elif isinstance(observation, AuditFinding) and observation.code == "accumulation_averaged":
            self._averaged = True

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The way of the loss since the start."""
        if not math.isfinite(sample.loss):
            return None
        loss = self._loss
        loss.update(sample.loss)
        if self._divided is None or self._averaged or loss.count < self.MIN_STEPS or ignores_scale(self._optimizer):
            return None
        if loss.first - loss.level >= self.STALLED * abs(loss.first):
            return ()
        return [
            Finding(
                state="divided",
                severity=Severity.WARNING,
                confidence=0.9,
                evidence=(*self._divided.measures, Measure(name="loss", value=loss.level, baseline=loss.first)),
                message=f"{self._divided.detail} The loss has hardly moved in {loss.count} steps.",
                since=self._divided.step,
            )
        ]
