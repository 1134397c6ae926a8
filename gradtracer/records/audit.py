"""The audit trail: everything that was asked of a run and done to it, each entry chained to the one before."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gradtracer.records.base import Document, Name, Record, Text
from gradtracer.records.fix import Intervention

NO_HASH = "0" * 64
"""Hash before the first entry."""


class AuditHead(Record):
    """Where a chain ends."""

    num_entries: int = Field(default=0, ge=0)
    hash: Name = Field(default=NO_HASH, description="Hash of the last entry; zeros before the first.")


class AuditEntry(Record):
    """An intervention as it stood at one moment: asked for, refused, previewed, tried, applied, kept, reverted."""

    seq: int = Field(ge=1, description="Number of the entry, from 1 without a gap.")
    time_s: float = Field(description="Unix time, seconds.")
    intervention: Intervention
    previous_hash: Name = Field(description="Hash of the entry before; zeros in the first.")
    hash: Name = Field(description="SHA-256 over the canonical JSON of all other fields, previous_hash included.")


class AuditTrail(Document):
    """The entries of a run, oldest first, and whether the chain holds."""

    kind: Literal["audit_trail"] = "audit_trail"
    run_id: Name
    entries: tuple[AuditEntry, ...] = Field(description="Those that can be read.")
    intact: bool = Field(description="Whether every entry is as it was written, and none is missing.")
    broken_at: int | None = Field(default=None, ge=1, description="Number of the first entry that does not hold.")
    problem: Text = Field(default="", description="What is wrong with it.")
