"""Causes, one a file: evidence in, hypotheses out. Importing the package registers them all."""

from gradtracer.causes.base import CAUSES, Case, Cause

CAUSES.load(__name__)

__all__ = ["CAUSES", "Case", "Cause", "all_causes"]


def all_causes() -> list[Cause]:
    """An instance of every cause."""
    return [cls() for cls in CAUSES]
