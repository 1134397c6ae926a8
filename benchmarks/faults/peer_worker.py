"""Runs in the peers' environment: one peer on the same runs, by its public interface.

``python -m benchmarks.faults.peer_worker PEER OPTIONS``: options is the JSON of `load_runs`' arguments; an answer a
line on stdout. Codes of theirs are mapped to ours in their favour: what they cannot name counts as no guess.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.faults.corpus import Program, load_runs

_GRADTRACER_CODES = {
    "DEAD_NEURON_COLLAPSE": "dead_relu",
    "DEAD_EMBEDDINGS": "dead_embeddings",
    "ZOMBIE_EMBEDDINGS": "zombie_embeddings",
    "GRADIENT_STARVATION_SHORTCUT": "gradient_starvation",
    "HARMFUL_STAGNATION": "learning_rate_too_low",
}
_HARMLESS = {"BENIGN_NOISE", "SAFE_STAGNATION"}
_NEURALDBG_WORDS = {
    "vanish": "vanishing_gradient",
    "explod": "exploding_gradient",
    "learning rate": "learning_rate_too_high",
    "dead": "dead_relu",
    "nan": "nan_in_data",
}


def gradtracer(program: Program) -> dict[str, Any]:
    """Events and guesses of gradtracer: the entries of its report for agents, and layers that it calls critical."""
    from gradtracer.tracker import FlowTracker  # the peer's package of this name, not ours

    tracker: Any = FlowTracker(program.model, optimizer=program.optimizer)
    for i in range(program.steps):
        tracker.step(loss=program.run_step(i))
    report = json.loads(tracker.export_for_agent(include_history=False, save=False))["gradtracer_agent_report"]
    found = report["diagnostics"] if isinstance(report["diagnostics"], list) else []
    found = [d for d in found if d["type"] not in _HARMLESS]
    alarms = [d["type"] for d in found]
    alarms += [f"layer {x['layer']}" for x in report.get("layer_health_summary", []) if x["status"] == "CRITICAL"]
    guesses = [
        {
            "code": _GRADTRACER_CODES.get(d["type"], d["type"]),
            "layer": next(iter(d.get("layers_affected", [])), None),
            "probability": float(d.get("confidence", 0.5)),
            "onset": None,
        }
        for d in found
    ]
    return {"alarms": alarms, "guesses": sorted(guesses, key=lambda g: -g["probability"])}


def neuraldbg(program: Program) -> dict[str, Any]:
    """Events and guesses of neuraldbg: its transitions away from healthy, and what its explain_failure returns."""
    from neuraldbg import NeuralDbg  # type: ignore[import-not-found]

    with NeuralDbg(program.model) as debugger:
        for i in range(program.steps):
            debugger.record_loss(program.run_step(i))
            debugger.step_iteration()
    events = [e for e in debugger.get_events() if "healthy" not in str(e.to_state).lower()]
    guesses = []
    for hypothesis in debugger.explain_failure():
        text = hypothesis.description.lower()
        code = next((c for word, c in _NEURALDBG_WORDS.items() if word in text), text[:40])
        guesses.append({"code": code, "layer": None, "probability": float(hypothesis.confidence), "onset": None})
    return {"alarms": [f"{e.event_type.value}@{e.step}/{e.layer_name}" for e in events], "guesses": guesses}


def main() -> None:
    """Answer for every run."""
    peer = {"gradtracer": gradtracer, "neuraldbg": neuraldbg}[sys.argv[1]]
    options = {
        k: Path(v) if k in ("cases", "healthy", "scenarios") and v else v for k, v in json.loads(sys.argv[2]).items()
    }
    warnings.filterwarnings("ignore")
    runs = load_runs(**options)
    os.chdir(tempfile.mkdtemp())  # they write files where they run
    for run in runs:
        started = time.perf_counter()
        answer: dict[str, Any] = {"alarms": [], "guesses": []}
        error = ""
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                answer = peer(run.build())
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"[:300]
        print(
            json.dumps({"id": run.id, **answer, "error": error, "seconds": time.perf_counter() - started}), flush=True
        )


if __name__ == "__main__":
    main()
