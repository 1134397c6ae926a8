"""How a repair is scored: a faulty run against its healthy twin, a healthy run against itself without a tracker.

The gap that a repair has to close is that between the faulty and the healthy metric. Where the faulty run ended with
numbers that are not finite, it begins at the untrained model, and where that cannot be measured or is itself far off
(ten times the healthy metric away), the gap is as large as the healthy metric. A run that diverged can have any
metric, so that closing most of such a gap would mean nothing: one that ends far below the untrained model counts as if
it were not finite.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults import corpus
from benchmarks.repair.runs import Outcome

TAXONOMY = corpus.HERE / "TAXONOMY.md"
CLOSED = 0.8
"""Share of the gap that a repaired run has to close."""
DIVERGED = 10.0
"""A run has diverged that ends ten times as far below the untrained model as its twin ends above it."""
NO_GAP = 0.01
"""A fault that costs less than this share of the healthy metric leaves nothing to be recovered."""


def repairable_codes(taxonomy: Path = TAXONOMY) -> set[str]:
    """Codes whose repair column says more than `code` alone.

    Args:
        taxonomy: The table of codes: code, what is wrong, evidence, repair.
    """
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in taxonomy.read_text().splitlines()]
    return {row[0] for row in rows if len(row) == 4 and row[3] not in ("", "code", "repair") and "---" not in row[3]}


def case_result(run: corpus.Run, faulty: Outcome, repaired: Outcome, twin: Outcome) -> dict[str, Any]:
    """What became of a faulty run.

    Args:
        run: The run.
        faulty: Trained without a tracker.
        repaired: Trained with one that may mend it.
        twin: Its twin, trained without a tracker.
    """
    assert run.truth is not None
    repairable = not repairable_codes().isdisjoint(run.truth.codes)
    floor = _floor(faulty, twin)
    gap = twin.metric - floor if twin.metric is not None and floor is not None else 0.0
    has_gap = gap > NO_GAP * abs(twin.metric or 0.0)
    closed = (repaired.metric - (floor or 0.0)) / gap if has_gap and repaired.metric is not None else None
    recovered = closed is not None and closed >= CLOSED and repaired.ends_finite
    first = repaired.top[0] if repaired.top else ("", 0.0, "")
    return {
        "id": run.id,
        "code": "|".join(run.truth.codes),
        "repairable": repairable,
        "metric": {"faulty": faulty.metric, "repaired": repaired.metric, "twin": twin.metric},
        "untrained": faulty.untrained,
        "floor": floor,
        "has_gap": has_gap,
        "gap_closed": closed,
        "ends_finite": {"faulty": faulty.ends_finite, "repaired": repaired.ends_finite},
        "applied": list(repaired.applied),
        "considered": list(repaired.considered),
        "recovered": recovered if repairable and has_gap else None,
        "top": [{"code": c, "probability": round(p, 4)} for c, p, _ in repaired.top],
        "advice_first": None if repairable else first[0] in run.truth.codes and bool(first[2]),
        **_errors(faulty=faulty, repaired=repaired, twin=twin),
    }


def _floor(faulty: Outcome, twin: Outcome) -> float | None:
    """Where the gap begins; at or above the twin's metric where the fault costs nothing."""
    if twin.metric is None or (faulty.metric is not None and faulty.metric >= twin.metric):
        return faulty.metric
    start = twin.metric - abs(twin.metric)
    if faulty.untrained is not None and abs(twin.metric - faulty.untrained) <= DIVERGED * abs(twin.metric):
        start = min(faulty.untrained, twin.metric)
    if faulty.metric is None:
        return start
    if faulty.ends_finite and faulty.metric >= start - DIVERGED * (twin.metric - start):
        return faulty.metric
    return max(faulty.metric, start)


def healthy_result(run: corpus.Run, untracked: Outcome, tracked: Outcome, seeds: Sequence[Outcome]) -> dict[str, Any]:
    """What a policy did to a healthy run.

    Args:
        run: The run.
        untracked: Trained without a tracker.
        tracked: Trained with one that may mend it.
        seeds: The same without a tracker from other seeds; empty where nothing was changed.
    """
    metrics = [o.metric for o in (untracked, *seeds) if o.metric is not None]
    spread = statistics.stdev(metrics) if seeds and len(metrics) > 1 else 0.0
    identical = bool(untracked.fingerprint) and untracked.fingerprint == tracked.fingerprint
    if untracked.metric is not None:
        is_worse = tracked.metric is None or tracked.metric < untracked.metric - spread
    else:
        is_worse = untracked.ends_finite and not tracked.ends_finite
    has_failed = bool(tracked.error) and not untracked.error
    return {
        "id": run.id,
        "metric": {"untracked": untracked.metric, "tracked": tracked.metric},
        "identical": identical,
        "applied": list(tracked.applied),
        "considered": list(tracked.considered),
        "spread": spread if seeds else None,
        "seeds": [o.metric for o in seeds],
        "harmed": not identical and (is_worse or has_failed),
        **_errors(untracked=untracked, tracked=tracked),
    }


def _errors(**outcomes: Outcome) -> dict[str, Any]:
    found = {name: o.error for name, o in outcomes.items() if o.error}
    return {"errors": found} if found else {}


def summary(cases: Sequence[Mapping[str, Any]], healthy: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The totals.

    `repairable` counts the faulty runs that can be repaired and have a gap; `recovered` is the share of them that
    closed it; `advice` the share of the others, faults of the source, whose first hypothesis is right and says what to
    change.
    """
    counted = [c for c in cases if c["recovered"] is not None]
    advised = [c["advice_first"] for c in cases if c["advice_first"] is not None]
    return {
        "repairable": len(counted),
        "recovered": _share([c["recovered"] for c in counted]),
        "without_gap": [c["id"] for c in cases if c["repairable"] and not c["has_gap"]],
        "code_only": len(advised),
        "advice": _share(advised),
        "healthy": len(healthy),
        "changed": sum(not h["identical"] for h in healthy),
        "harmed": sum(h["harmed"] for h in healthy),
    }


def _share(values: Sequence[bool]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
