"""Runs a program with the tracker attached as a user would, and asks it."""

from __future__ import annotations

import time
import traceback
from pathlib import Path

from benchmarks.faults.corpus import Run
from benchmarks.faults.score import Answer, Guess


def ask(run: Run, home: Path, *, track_interval: int = 100) -> Answer:
    """Build the run, train it to its end (or its own error), and take events and hypotheses.

    Args:
        run: What to build; its truth is not looked at.
        home: Where the record goes.
        track_interval: As in `FlowTracker`.
    """
    from gradtracer import FlowTracker
    from gradtracer.records import Severity

    started = time.perf_counter()
    try:
        program = run.build()
    except Exception:
        return Answer((), (), 0.0, f"it could not be built: {traceback.format_exc(limit=3)}")
    error = ""
    tracker = FlowTracker(
        program.model, program.optimizer, run_name=run.id.replace("/", "-"), home=home, track_interval=track_interval
    )
    try:
        for i in range(program.steps):
            tracker.step(loss=program.run_step(i))
    except Exception:
        error = traceback.format_exc(limit=3)
    tracker.close()
    hypotheses = tracker.explain_failure()
    return Answer(
        alarms=tuple(
            f"{e.kind}:{e.to_state}@{e.step}{'/' + e.layer if e.layer else ''}"
            for e in tracker.events
            if e.severity is not Severity.INFO
        ),
        guesses=tuple(Guess(h.code, h.layer, h.probability, h.onset_step) for h in hypotheses),
        seconds=time.perf_counter() - started,
        error=error or tracker.broken_reason,
    )
