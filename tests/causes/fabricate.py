"""Fabricated runs for causes: only what the test is about is in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gradtracer.journal import RUN_COLUMNS, StepColumns
from gradtracer.records import (
    CausalHypothesis,
    Measure,
    Observation,
    OptimizerDescription,
    ParameterScalar,
    SemanticEvent,
    Severity,
)
from gradtracer.samples import Sample
from gradtracer.series import Series
from tests.detectors.streams import Layers, sample

NAN = float("nan")
INF = float("inf")


def series(samples: Iterable[Sample], *events: SemanticEvent, observations: Sequence[Observation] = ()) -> Series:
    """A run as its journal would hold it."""
    steps = list(samples)
    numbers = [[getattr(s, c) for c in RUN_COLUMNS] for s in steps]
    columns = StepColumns(
        np.asarray([s.step for s in steps], dtype=np.int64),
        np.asarray([s.time_s for s in steps]),
        np.asarray(numbers, dtype=np.float32).reshape(-1, len(RUN_COLUMNS)),
    )
    tables = tuple((s.step, s.layers) for s in steps if s.layers is not None)
    return Series(columns, tables, tuple(events), tuple(observations))


def calm(
    num: int,
    *,
    rate: float = 0.1,
    loss: float = 2.0,
    falling: bool = True,
    layers: Layers | None = None,
    first: int = 0,
) -> list[Sample]:
    """Steps at which nothing happens; every tenth has the layers."""
    return [
        sample(
            i,
            layers if i % 10 == 0 else None,
            loss=loss * 0.99**i if falling else loss,
            grad_norm=1.0 + 0.01 * (i % 7),
            learning_rate=rate,
        )
        for i in range(first, first + num)
    ]


def event(
    kind: str,
    step: int,
    *,
    layer: str | None = None,
    state: str = "bad",
    severity: Severity = Severity.WARNING,
    last_step: int | None = None,
    number: int | None = None,
    **measures: float,
) -> SemanticEvent:
    """An event of a rule."""
    return SemanticEvent(
        id=f"e{step if number is None else number}-{kind}",
        kind=kind,
        step=step,
        last_step=step if last_step is None else last_step,
        layer=layer,
        signal="loss",
        from_state="healthy",
        to_state=state,
        severity=severity,
        confidence=0.9,
        evidence=tuple(Measure(name=n, value=v) for n, v in measures.items()),
        message=f"{kind} at step {step}.",
    )


def optimizer(*missing: str, num_foreign: int = 0) -> OptimizerDescription:
    """An optimizer that lacks some parameters."""
    return OptimizerDescription(step=0, type="Adam", groups=(), missing=missing, num_foreign=num_foreign)


def fixes(hypothesis: CausalHypothesis) -> list[tuple[str, dict[str, ParameterScalar]]]:
    """The fixes with their parameters, best first."""
    return [(f.fix, {p.name: p.value for p in f.parameters}) for f in hypothesis.fixes]
