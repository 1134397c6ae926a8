"""How a diagnosis is scored against the truth; the only place that reads the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from benchmarks.faults.corpus import Run, Truth


@dataclass(frozen=True)
class Guess:
    """One hypothesis."""

    code: str
    layer: str | None
    probability: float
    onset: int | None


@dataclass(frozen=True)
class Answer:
    """What a tool said about a run."""

    alarms: tuple[str, ...]
    """Its events of severity warning and above."""
    guesses: tuple[Guess, ...]
    """Hypotheses, most probable first."""
    seconds: float
    error: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


def score(runs: Sequence[Run], answers: Sequence[Answer]) -> dict[str, Any]:
    """The result document: `cases`, `healthy` and `summary`."""
    cases = [_case(r, r.truth, a) for r, a in zip(runs, answers, strict=True) if r.truth is not None]
    healthy = [
        {
            "id": r.id,
            "alarms": list(a.alarms),
            "top": a.guesses[0].code if a.guesses else None,
            "posterior": {g.code: g.probability for g in a.guesses},
            **({"error": a.error} if a.error else {}),
        }
        for r, a in zip(runs, answers, strict=True)
        if r.truth is None
    ]
    return {"cases": cases, "healthy": healthy, "summary": _summary(cases, healthy, answers, runs)}


def _case(run: Run, truth: Truth, answer: Answer) -> dict[str, Any]:
    top = answer.guesses[:3]
    right = next((g for g in answer.guesses if g.code in truth.codes), None)
    blamed = right or next((g for g in top if g.code not in ("healthy", "unknown")), None)
    onset = blamed.onset if blamed else None
    counts_onset = truth.step is not None and truth.step > 0
    return {
        "id": run.id,
        "truth": {"category": "|".join(truth.codes), "layer": "|".join(truth.layers) or None, "step": truth.step},
        "detected": bool(answer.alarms),
        "alarms": list(answer.alarms),
        "onset": onset,
        "top": [{"code": g.code, "layer": g.layer, "probability": round(g.probability, 4)} for g in top],
        "cause_at_1": bool(top) and top[0].code in truth.codes,
        "cause_at_3": any(g.code in truth.codes for g in top),
        "layer_ok": _layer_ok(right.layer if right else None, truth.layers) if truth.layers else None,
        "onset_ok": (
            (onset is not None and truth.step is not None and abs(onset - truth.step) <= truth.step_tol + 1)
            if counts_onset
            else None
        ),
        "seconds": round(answer.seconds, 2),
        "posterior": {g.code: g.probability for g in answer.guesses},
        **({"error": answer.error} if answer.error else {}),
    }


def _layer_ok(named: str | None, layers: Sequence[str]) -> bool:
    """The truth's layer, a parameter or child of it, or its direct parent."""
    if named is None:
        return False
    return any(named == x or named.startswith(f"{x}.") or (x.rpartition(".")[0] or "(root)") == named for x in layers)


def _share(values: Sequence[bool | None]) -> float | None:
    counted = [v for v in values if v is not None]
    return round(mean(counted), 4) if counted else None


def _summary(
    cases: Sequence[dict[str, Any]], healthy: Sequence[dict[str, Any]], answers: Sequence[Answer], runs: Sequence[Run]
) -> dict[str, Any]:
    def brier(pairs: Sequence[tuple[Run, Answer]]) -> float | None:
        errors = []
        for run, answer in pairs:
            if run.truth is None and not answer.guesses:
                continue  # it could not be built, so nothing was said about it
            top = answer.guesses[0] if answer.guesses else Guess("", None, 1.0, None)
            codes = run.truth.codes if run.truth else ("healthy",)
            errors.append((top.probability - (top.code in codes)) ** 2)
        return round(mean(errors), 4) if errors else None

    pairs = list(zip(runs, answers, strict=True))
    return {
        "num_cases": len(cases),
        "num_healthy": len(healthy),
        "detected": _share([c["detected"] for c in cases]),
        "cause_at_1": _share([c["cause_at_1"] for c in cases]),
        "cause_at_3": _share([c["cause_at_3"] for c in cases]),
        "layer": _share([c["layer_ok"] for c in cases]),
        "onset": _share([c["onset_ok"] for c in cases]),
        "false_alarm_rate": _share([bool(h["alarms"]) for h in healthy]),
        "brier": brier([p for p in pairs if p[0].truth is not None]),
        "brier_with_healthy": brier(pairs),
    }
