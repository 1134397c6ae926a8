"""What an audit found that is a fault by itself."""

from __future__ import annotations

from collections.abc import Sequence

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import AuditFinding, Observation, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class AuditDetector(Detector):
    """An audit has found a fault in how the training is put together.

    What:
        Facts that no number shows, such as a softmax that feeds a loss with its own, or a layer cut off the graph.

    Why:
        Such a training runs, and its loss may fall; it learns less than it could, or something else.

    Definition:
        Every audit finding of severity warning or above is an event, named after the finding, at its step.

    Thresholds:
        Those of the audits, in `gradtracer.training.audits`.

    Fixes:
        Most are in the source; the cause that explains the finding says where.

    References:
        The audits' own.
    """

    code = "audit"
    signal = "audit"

    def __init__(self) -> None:
        self._found: list[Finding] = []

    def observe(self, observation: Observation) -> None:
        """Take a finding that is a fault by itself."""
        if isinstance(observation, AuditFinding) and observation.severity is not Severity.INFO:
            self._found.append(
                Finding(
                    state=observation.code,
                    severity=observation.severity,
                    layer=observation.layer,
                    evidence=observation.measures,
                    message=observation.detail,
                    since=observation.step,
                )
            )

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """All findings so far: a wiring fault holds until the program is changed."""
        return self._found or None
