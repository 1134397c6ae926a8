"""What the main rank tells the others to do: a request, or what it has decided by itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gradtracer.control import Request
from gradtracer.records import Intervention, Record


class JointAction(Record):
    """What all ranks do at one step boundary."""

    kind: Literal["request", "take_back", "save", "record"]
    request: Request | None = None
    intervention: Intervention | None = None
    """What is asked for, or, for `take_back`, what is in force."""
    verdict: str = ""
    """For `take_back`: why."""
    num_batches: int = Field(default=0, ge=0)
    """For `record`: how many of the next steps to record. It is over at the end of the first of them, where all ranks
    run that step again."""
    first_open_problem_step: int | None = None
    """As the main rank knows it, which alone keeps the events."""
