"""A training process that records as fast as a small model steps, and says so on its standard output.

``python -m tests.training.recording_child DIRECTORY COMMIT_INTERVAL_S``: prints ``added STEP MONOTONIC_S`` after each
step, and ``flushed STEP`` where everything up to that step has been reported durable, until it is killed.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from pathlib import Path

from gradtracer.records import CaptureNotice, Intervention, InterventionState
from gradtracer.training.recorder import Recorder
from tests import runs

COLUMNS = runs.layout(8)


def intervention(step: int, state: InterventionState) -> Intervention:
    """Asked for and applied at the same step."""
    return Intervention(
        id=f"i{step}", run_id="r", fix="rollback", mode="apply", requester="child", state=state, requested_at_s=0.0
    )


def main() -> None:
    directory, commit_interval_s = Path(sys.argv[1]), float(sys.argv[2])
    recorder = Recorder(directory, [], commit_interval_s=commit_interval_s)
    pace = threading.Event()
    for step in itertools.count():
        recorder.add_sample(runs.sample(step, COLUMNS))
        print("added", step, time.monotonic(), flush=True)
        if step % 100 == 0:
            recorder.add_observation(CaptureNotice(step=step, message="still here"))
        for state in (InterventionState.PENDING, InterventionState.APPLIED) if step % 5 == 0 else ():
            recorder.put_intervention(intervention(step, state))
        if step % 250 == 249 and recorder.flush():
            print("flushed", step, flush=True)
        pace.wait(0.001)


if __name__ == "__main__":
    main()
