"""What a health rule is, and how what it finds becomes events.

A detector looks at samples in order and names the layers that are in a bad state at each. It keeps no episodes:
`Episodes` opens an event once a state has been seen `enter_after` times in a row, moves its last step while it holds,
raises its severity where the detector does, and closes it after `leave_after` clean samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from gradtracer.records import Measure, ModelDescription, Observation, SemanticEvent, Severity
from gradtracer.registry import Registry
from gradtracer.samples import Sample

DETECTORS: Registry[type[Detector]]


@dataclass(frozen=True)
class Finding:
    """A bad state of one layer (or of the run, where `layer` is None) at one sample."""

    state: str
    severity: Severity
    layer: str | None = None
    confidence: float = 1.0
    evidence: tuple[Measure, ...] = ()
    message: str = ""
    from_state: str = "healthy"
    since: int | None = None
    """Step at which the state began, where it could be told only later; the step of the sample by default."""


class Detector(ABC):
    """A health rule. Subclasses are stateful: one instance watches one run, samples come in order.

    The docstring of a subclass is its page: a summary line and the sections What, Why, Definition, Thresholds, Fixes
    and References.
    """

    code: ClassVar[str]
    """Name of the rule and of its file."""
    signal: ClassVar[str]
    """The recorded signal that shows the state."""
    enter_after: ClassVar[int] = 1
    """Findings in a row before an event is opened."""
    leave_after: ClassVar[int] = 3
    """Assessed samples without the finding before the event is closed."""

    def observe(self, observation: Observation) -> None:  # noqa: B027
        """Take note of a fact about the run, e.g. the description of the model."""

    @abstractmethod
    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The bad states at this sample; None where the sample says nothing about this rule."""


@dataclass
class _Episode:
    first_step: int
    streak: int = 0
    clean: int = 0
    event: SemanticEvent | None = None


@dataclass(frozen=True)
class EventChange:
    """An event that was opened, escalated, closed, or whose last step moved."""

    event: SemanticEvent
    announce: bool
    """Whether a reader waiting for news wants to know: true for opened and escalated events."""


@dataclass
class Episodes:
    """Turns findings into events, for a set of detectors over one run."""

    detectors: Sequence[Detector]
    _open: dict[tuple[str, str | None, str], _Episode] = field(default_factory=dict)
    _num_events: int = 0

    def observe(self, observation: Observation) -> None:
        """Hand a fact to every detector."""
        for detector in self.detectors:
            detector.observe(observation)

    def assess(self, sample: Sample) -> list[EventChange]:
        """Run every detector on the next sample."""
        return [change for detector in self.detectors for change in self.assess_with(detector, sample)]

    def assess_with(self, detector: Detector, sample: Sample) -> list[EventChange]:
        """Run one of the detectors on the next sample."""
        findings = detector.assess(sample)
        return [] if findings is None else list(self._update(detector, sample.step, findings))

    def retire(self, detector: Detector) -> list[EventChange]:
        """Close the events of a detector that is asked no more."""
        keys = [key for key in self._open if key[0] == detector.code]
        events = [episode.event for key in keys if (episode := self._open.pop(key)).event is not None]
        return [EventChange(e.model_copy(update={"open": False}), announce=False) for e in events if e is not None]

    def _update(self, detector: Detector, step: int, findings: Sequence[Finding]) -> Iterable[EventChange]:
        found = {(detector.code, f.layer, f.state): f for f in findings}
        for key, finding in found.items():
            first_step = step if finding.since is None else finding.since
            episode = self._open.setdefault(key, _Episode(first_step=first_step))
            episode.streak += 1
            episode.clean = 0
            if episode.event is None:
                if episode.streak >= detector.enter_after:
                    episode.event = self._new_event(detector, episode.first_step, step, finding)
                    yield EventChange(episode.event, announce=True)
                continue
            escalated = finding.severity.rank > episode.event.severity.rank
            episode.event = episode.event.model_copy(update={"last_step": step})
            if escalated:
                # Validated anew, unlike by model_copy: what a detector says must be readable from the journal.
                episode.event = SemanticEvent.model_validate(
                    dict(episode.event)
                    | {
                        "severity": finding.severity,
                        "evidence": finding.evidence,
                        "message": finding.message,
                        "confidence": max(finding.confidence, episode.event.confidence),
                    }
                )
            yield EventChange(episode.event, announce=escalated)
        for key, episode in list(self._open.items()):
            if key[0] != detector.code or key in found:
                continue
            episode.clean += 1
            episode.streak = 0
            if episode.event is None or episode.clean >= detector.leave_after:
                del self._open[key]
                if episode.event is not None:
                    yield EventChange(episode.event.model_copy(update={"open": False}), announce=False)

    def _new_event(self, detector: Detector, first_step: int, step: int, finding: Finding) -> SemanticEvent:
        self._num_events += 1
        return SemanticEvent(
            id=f"e{self._num_events}",
            kind=detector.code,
            step=first_step,
            last_step=step,
            layer=finding.layer,
            signal=detector.signal,
            from_state=finding.from_state,
            to_state=finding.state,
            severity=finding.severity,
            confidence=finding.confidence,
            evidence=finding.evidence,
            message=finding.message,
        )


def forward_order(model: ModelDescription | None, layers: Iterable[str]) -> list[str]:
    """The layers in forward order where the model's description tells it, else as they came."""
    known = {layer.name: i for i, layer in enumerate(model.layers)} if model else {}
    return sorted(layers, key=lambda name: known.get(name, len(known)))


DETECTORS = Registry("detector")
