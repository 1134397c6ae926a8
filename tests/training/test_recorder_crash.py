"""A recording process is killed, or ends without a word: what it recorded can be read."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gradtracer.journal import JOURNAL_NAME, Journal
from gradtracer.series import Series
from tests import runs
from tests.deadline import wait_until
from tests.training.recording_child import COLUMNS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LOST_AT_MOST_S = 2.0


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


class Child:
    """A recording process, and what it said before it died."""

    def __init__(self, directory: Path, commit_interval_s: float) -> None:
        directory.mkdir()
        self.directory = directory
        self.added: list[float] = []
        self.flushed = -1
        self.started = threading.Event()
        command = [sys.executable, "-m", "tests.training.recording_child", directory, str(commit_interval_s)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                match line.split():
                    case ["added", step, at_s] if line.endswith("\n"):
                        assert int(step) == len(self.added)
                        self.added.append(float(at_s))
                        self.started.set()
                    case ["flushed", step] if line.endswith("\n"):
                        self.flushed = int(step)

    def kill(self) -> float:
        """``kill -9``; returns when."""
        killed_s = time.monotonic()
        self._process.kill()
        self._process.wait()
        self._listener.join()
        return killed_s


def check(child: Child, killed_s: float) -> None:
    with Journal(child.directory) as journal:
        series = Series.from_journal(journal)
        entries, broken = journal.audit(None)
    assert broken is None
    assert len(entries) >= 2 * (child.flushed // 5)
    num_recorded = len(series.steps)
    num_due = sum(at_s < killed_s - LOST_AT_MOST_S for at_s in child.added)
    assert num_recorded >= max(num_due, child.flushed + 1)
    expected = [runs.numbers(runs.sample(step, COLUMNS)) for step in range(num_recorded)]
    assert [runs.numbers(s) for s in series.samples()] == expected


def test_a_recording_killed_at_any_moment_is_read_back_but_for_its_last_two_seconds(tmp_path: Path) -> None:
    rng = random.Random(0)
    for batch in range(5):
        # The first commits come in quick succession, so that kills hit them, the WAL's recovery and checkpoints too.
        children = [Child(tmp_path / f"{batch}-{i}", interval) for i, interval in enumerate((0.01, 0.05, 0.5, 0.5))]
        for child in children:
            assert child.started.wait(30)
        for child in children:
            time.sleep(rng.uniform(0.0, 1.0))  # The moment of death, not a wait for something.
            check(child, child.kill())


def test_the_wal_of_a_killed_writer_is_recovered_by_readers(tmp_path: Path) -> None:
    child = Child(tmp_path / "run", 0.05)
    wait_until(lambda: child.flushed >= 0)
    child.kill()
    wal = child.directory / f"{JOURNAL_NAME}-wal"
    assert wal.stat().st_size > 0
    (child.directory / f"{JOURNAL_NAME}-shm").unlink()
    with Journal(child.directory) as one, Journal(child.directory) as other:
        assert len(one.steps().steps) == len(other.steps().steps) >= child.flushed + 1


BEGIN = """
import sys
from pathlib import Path
from gradtracer.training.recorder import Recorder
from tests import runs
recorder = Recorder(Path(sys.argv[1]), [], commit_interval_s=60)
for step in range(1000):
    recorder.add_sample(runs.sample(step))
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", None), ("1 / 0", 1), ("recorder.close()", 0),
     ("import threading; threading.Thread(target=lambda: recorder.add_sample(runs.sample(1000))).start()", 0)],
)  # fmt: skip
def test_nothing_is_lost_however_the_interpreter_ends(tmp_path: Path, end: str, code: int | None) -> None:
    done = run_python(BEGIN + end, tmp_path)
    assert code is None or done.returncode == code, done.stderr
    with Journal(tmp_path) as journal:
        assert journal.steps().steps.tolist() == list(range(1000 + end.startswith("import threading")))
    assert [file.name for file in tmp_path.iterdir()] == [JOURNAL_NAME]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_forked_child_leaves_the_recording_to_its_parent(tmp_path: Path) -> None:
    fork = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)
recorder.flush()
child = os.fork()
if child == 0:
    recorder.add_sample(runs.sample(7777))
    recorder.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
recorder.add_sample(runs.sample(1000))
assert recorder.flush()
"""
    done = run_python(BEGIN + fork, tmp_path)
    assert done.returncode == 0, done.stderr
    with Journal(tmp_path) as journal:
        assert journal.steps().steps.tolist() == list(range(1001))


FILL = """
import sys
from pathlib import Path
from gradtracer.training.recorder import Recorder
from tests import runs
LIMIT
columns = runs.layout(20)
recorder = Recorder(Path(sys.argv[1]), [], commit_interval_s=0.01)
for step in range(3000):
    recorder.add_sample(runs.sample(step, columns))
    if step % 20 == 0:
        recorder.flush()
print("trained on")
recorder.close()
print(recorder.disabled_reason)
"""


def check_full_disk(done: subprocess.CompletedProcess[str], directory: Path, reason: str) -> None:
    assert done.returncode == 0, done.stderr
    trained, disabled = done.stdout.splitlines()
    assert (trained, reason in disabled) == ("trained on", True)
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("recording is off for the rest of this run, training goes on (OperationalError: ")
    with Journal(directory) as journal:
        steps = journal.steps().steps.tolist()
    assert 0 < len(steps) < 3000
    assert steps == list(range(len(steps)))


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_FSIZE")
def test_a_disk_that_takes_no_more_turns_recording_off_with_one_warning(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"
    check_full_disk(run_python(FILL.replace("LIMIT", limit), tmp_path), tmp_path, "disk I/O error")


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a file system")
def test_a_full_file_system_turns_recording_off_with_one_warning(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        done = run_python(FILL.replace("LIMIT", ""), tmp_path)
        check_full_disk(done, tmp_path, "database or disk is full")
    finally:
        subprocess.run(["umount", tmp_path], check=True)
