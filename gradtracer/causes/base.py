"""What a cause is: the evidence it would make us see, weighed.

A cause's log-odds are its prior's plus the log-likelihood ratios of its evidence, present and absent (naive Bayes on
the odds scale; Pearl 1988, section 2.1). `gradtracer.diagnosis` lets all causes and `healthy` compete for the
probability.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradtracer.records import Evidence, FixSuggestion, SourceLocation
from gradtracer.registry import Registry
from gradtracer.series import Series

CAUSES: Registry[type[Cause]]


@dataclass(frozen=True)
class Case:
    """What a cause says about a run: the evidence for and against it, and where and when it began."""

    evidence: Sequence[Evidence]
    layer: str | None = None
    onset_step: int | None = None
    explanation: str = ""
    affected_layers: tuple[str, ...] = ()
    event_ids: tuple[str, ...] = ()
    """Events that it explains, in causal order."""
    source: SourceLocation | None = None
    advice: str = ""
    fixes: tuple[FixSuggestion, ...] = ()


class Cause(ABC):
    """A cause of the taxonomy; stateless.

    The docstring of a subclass is its page: a summary line and the sections What, Why, Definition, Thresholds, Fixes
    and References.
    """

    code: ClassVar[str]
    """Code of the taxonomy, and the name of the file."""
    title: ClassVar[str]
    """The cause in a few words."""
    prior: ClassVar[float]
    """How often it is the cause, against the others, before anything was seen; only ratios of priors count."""

    @abstractmethod
    def consider(self, series: Series) -> Case | None:
        """Weigh the cause for a run; None where nothing speaks for it."""


CAUSES = Registry("cause")
