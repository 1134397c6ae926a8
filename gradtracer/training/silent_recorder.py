"""Takes what a recorder takes and keeps none of it: for ranks above 0, which act but leave the record to rank 0."""

from __future__ import annotations

from collections.abc import Sequence

from gradtracer.records import Intervention, Observation, SemanticEvent
from gradtracer.samples import LayerTable, Sample


class SilentRecorder:
    """See `gradtracer.training.recorder.Recorder`."""

    events: Sequence[SemanticEvent] = ()
    num_open_warnings = 0
    disabled_reason: str | None = None
    audit_head = None

    def add_sample(self, sample: Sample) -> None:
        """Nothing."""

    def add_table(self, step: int, table: LayerTable) -> None:
        """Nothing."""

    def add_observation(self, observation: Observation) -> None:
        """Nothing."""

    def put_intervention(self, intervention: Intervention) -> None:
        """Nothing."""

    def flush(self, timeout_s: float = 0.0) -> bool:
        """Nothing waits."""
        return True

    def close(self) -> None:
        """Nothing."""
