"""Events: the moments at which training changed its state."""

from __future__ import annotations

from enum import Enum

from pydantic import Field

from gradtracer.records.base import Name, Record, Text


class Severity(str, Enum):
    """How much an event asks of its reader.

    `info` is worth knowing and needs nothing; `warning` costs quality or time; `critical` ruins the run.
    """

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """0, 1, 2: for comparing."""
        return ("info", "warning", "critical").index(self.value)


class Measure(Record):
    """One number that an event or a hypothesis rests on."""

    name: Name = Field(description="The measured quantity, e.g. `update_ratio`.")
    value: float | None = Field(description="What was measured; null where it is not finite.")
    baseline: float | None = Field(default=None, description="What the run itself shows when nothing is wrong.")
    threshold: float | None = Field(default=None, description="The bound that the value crossed.")
    unit: Name = Field(default="", description="Unit of all three numbers; empty for a ratio.")
    num_non_finite: int = Field(default=0, ge=0, description="How many values were NaN or infinite.")


class SemanticEvent(Record):
    """One episode: a transition into a state and the last step at which it still held."""

    id: Name = Field(description="Unique within the run, e.g. `e3`.")
    kind: Name = Field(description="Code of the detector that found it.")
    step: int = Field(ge=0, description="First step of the episode.")
    last_step: int = Field(ge=0, description="Last step at which the state was seen.")
    layer: Name | None = Field(description="Module path; null where the whole run is meant.")
    signal: Name = Field(description="The recorded signal that shows it.")
    from_state: Name
    to_state: Name
    severity: Severity
    confidence: float = Field(ge=0, le=1, description="How sure the detector is that this is not chance.")
    evidence: tuple[Measure, ...] = ()
    message: Text = Field(default="", description="One sentence for a person.")
    open: bool = Field(default=True, description="Whether the state still holds.")
