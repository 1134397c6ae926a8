"""Trains one run of the corpus, with or without a tracker that may mend it."""

from __future__ import annotations

import hashlib
import math
import random
import statistics
import struct
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.faults import corpus


@dataclass(frozen=True)
class Corpus:
    """Which runs there are; as in `benchmarks.faults.corpus.load_runs`."""

    cases: Path | None
    healthy: Path | None
    scenarios: Path | None
    seeds: tuple[int, ...]

    def runs(self, ids: Sequence[str] = ()) -> list[corpus.Run]:
        """The runs whose id begins with one of `ids`; all where it is empty."""
        return corpus.load_runs(self.cases, self.healthy, self.scenarios, self.seeds, ids)


@dataclass(frozen=True)
class Task:
    """One training."""

    corpus: Corpus
    id: str
    autofix: Literal["off", "safe", "guarded"] | None
    """Policy of the tracker; None trains without one."""
    seed_offset: int = 0
    """Added to every seed given to `torch.manual_seed`: other initial weights and dropout, the same data."""


@dataclass(frozen=True)
class Outcome:
    """What came of a training."""

    metric: float | None = None
    """Held-out quality, larger is better; minus the mean of the finite losses of the last tenth where the run has no
    metric. None where it is not finite."""
    untrained: float | None = None
    """The metric before the first step, where that can be had."""
    ends_finite: bool = False
    """Whether all parameters and the metric are finite at the end."""
    fingerprint: str = ""
    """Of all losses and final parameters, to the bit."""
    applied: tuple[dict[str, Any], ...] = ()
    """Fixes that took effect: `fix`, `step`, `parameters`, `state`, `outcome`, `reason`."""
    considered: tuple[dict[str, Any], ...] = ()
    """Trials, and fixes that did not take effect: `fix`, `mode`, `state`, `outcome`, `reason`."""
    top: tuple[tuple[str, float, str], ...] = ()
    """Code, probability and advice of the first three hypotheses."""
    error: str = ""


def train(task: Task) -> Outcome:
    """Build the run, train it to its end or its own error, and measure it.

    Args:
        task: What to train, and how.
    """
    import torch

    warnings.filterwarnings("ignore")  # the cases' own
    torch.set_num_threads(1)
    try:
        run = next(r for r in task.corpus.runs([task.id]) if r.id == task.id)
        with _seeds_moved_by(task.seed_offset):
            program = run.build()
            if task.autofix is None:
                outcome = _trained(program, lambda i: program.run_step(i))
            else:
                outcome = _tracked(program, run.id, task.autofix)
        untrained = _measured(run.build().metric) if run.truth is not None and task.autofix is None else None
    except Exception:
        return Outcome(error=traceback.format_exc(limit=4))
    return Outcome(**{**vars(outcome), "untrained": untrained})


def _tracked(program: corpus.Program, name: str, autofix: Literal["off", "safe", "guarded"]) -> Outcome:
    from gradtracer import FlowTracker
    from gradtracer.journal import Journal

    with tempfile.TemporaryDirectory() as home:
        tracker = FlowTracker(
            program.model, program.optimizer, run_name=name.replace("/", "-"), home=home, autofix=autofix
        )

        def step(i: int) -> float:
            loss = program.run_step(i)
            tracker.step(loss=loss)
            return loss

        # Before `close`, which takes back what is in force only while the run is tracked.
        outcome = _trained(program, step, lambda: tracker.explain_failure())
        tracker.close()
        with Journal(tracker.directory) as journal:
            done = journal.interventions()
    effective = [i for i in done if i.mode == "apply" and i.applied_step is not None]
    applied = tuple(
        {"fix": i.fix, "step": i.applied_step, "parameters": {p.name: p.value for p in i.parameters}, **_told(i)}
        for i in effective
    )
    considered = tuple({"fix": i.fix, "mode": i.mode, **_told(i)} for i in done if i not in effective)
    error = outcome.error or tracker.broken_reason
    return Outcome(**{**vars(outcome), "applied": applied, "considered": considered, "error": error})


def _told(intervention: Any) -> dict[str, str]:
    state, outcome, reason = intervention.state.value, intervention.outcome, intervention.reason
    return {"state": state, "outcome": outcome, "reason": reason}


def _trained(
    program: corpus.Program, step: Callable[[int], float], explain: Callable[[], Sequence[Any]] = tuple
) -> Outcome:
    losses: list[float] = []
    error = ""
    try:
        for i in range(program.steps):
            losses.append(step(i))
    except Exception:
        error = traceback.format_exc(limit=3)
    top = tuple((h.code, h.probability, h.advice) for h in explain()[:3])
    fingerprint = _fingerprint(program.model, losses)
    finite = all(bool(p.isfinite().all()) for p in program.model.parameters())
    if program.metric is not None:
        metric = _measured(program.metric)
    else:
        last = losses[-max(1, program.steps // 10) :]
        finite_losses = [x for x in last if math.isfinite(x)]
        # A batch that has no loss whatever the weights (CTC without an alignment) says nothing of the training.
        is_told = not error and 2 * len(finite_losses) >= len(last) > 0
        metric = -statistics.fmean(finite_losses) if is_told else None
    return Outcome(metric, None, finite and metric is not None, fingerprint, top=top, error=error)


def _measured(metric: Callable[[], float] | None) -> float | None:
    if metric is None:
        return None
    try:
        return _finite(float(metric()))
    except Exception:
        return None  # what a broken or an untrained model gives may be nothing that can be measured


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _fingerprint(model: Any, losses: Sequence[float]) -> str:
    digest = hashlib.sha256(struct.pack(f"{len(losses)}d", *losses))
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().double().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _seeds_moved_by(offset: int) -> Iterator[None]:
    """Every random state begins at the same place, and each `torch.manual_seed` is moved by the offset."""
    import numpy as np
    import torch

    original = torch.manual_seed
    random.seed(offset)
    np.random.seed(offset)
    original(offset)

    def moved(seed: int) -> torch.Generator:
        return original(int(seed) + 1_000_003 * offset)

    torch.manual_seed = moved
    try:
        yield
    finally:
        torch.manual_seed = original
