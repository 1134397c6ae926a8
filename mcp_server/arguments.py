"""Arguments that several tools take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

RunId = Annotated[
    str | None,
    Field(
        max_length=128,
        description="A run_id from list_runs. Leave it out where one run is live, or only one is recorded.",
        examples=["digits-20260728-101500-3f2a"],
    ),
]
LayerName = Annotated[str, Field(min_length=1, max_length=256)]
Cursor = Annotated[
    int, Field(ge=0, description="`cursor` of an earlier answer: only what came after it. 0 starts at the beginning.")
]
FirstStep = Annotated[int, Field(ge=0, description="First training step of the range.")]
LastStep = Annotated[int | None, Field(ge=0, description="Last training step of the range; the newest if left out.")]
MinSeverity = Annotated[
    Literal["info", "warning", "critical"],
    Field(description="info is worth knowing, warning costs quality or time, critical ruins the run."),
]
Limit = Annotated[int, Field(ge=1, le=100, description="At most so many; fewer come where they are long.")]
Reason = Annotated[
    str, Field(max_length=1000, description="Why, in one sentence; it is kept in the run's record of interventions.")
]
InterventionId = Annotated[
    str,
    Field(min_length=1, max_length=256, description="`id` of an earlier answer of apply_autofix or control_training."),
]
