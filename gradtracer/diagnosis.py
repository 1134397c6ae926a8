"""Asks every cause, and ranks what they answer."""

from __future__ import annotations

from gradtracer.records import CausalHypothesis
from gradtracer.series import Series


def diagnose(series: Series) -> tuple[CausalHypothesis, ...]:
    """Possible causes of what a run shows, most probable first; `healthy` competes with them.

    Args:
        series: The run, loaded from its journal.

    Returns:
        Hypotheses whose probabilities sum to 1 over all causes and `healthy`.
    """
    raise NotImplementedError
