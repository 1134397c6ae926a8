from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gradtracer.errors import (
    AmbiguousRun,
    CorruptJournal,
    RunNotLive,
    UnknownRun,
    UntrustedRunDirectory,
    UsageError,
)
from gradtracer.records import RunState
from gradtracer.workspace import Workspace
from tests.recorded_run import RecordedRun

posix_only = pytest.mark.skipif(os.name != "posix", reason="owner and mode are POSIX notions")


def test_a_home_without_runs_says_how_to_start_one(tmp_path: Path) -> None:
    found = Workspace(tmp_path).list_runs()
    assert (found.runs, found.total, found.home) == ((), 0, str(tmp_path))
    assert "FlowTracker" in found.next_steps[0]
    with pytest.raises(UnknownRun, match=r"FlowTracker.*list_runs"):
        Workspace(tmp_path).get_run_status()


def test_the_only_run_is_meant_where_none_is_named(tmp_path: Path) -> None:
    run_id, _ = RecordedRun(tmp_path).write()
    assert Workspace(tmp_path).get_run_status().run_id == run_id


def test_the_only_live_run_is_meant_among_finished_ones(tmp_path: Path) -> None:
    RecordedRun(tmp_path).write()
    live, _ = RecordedRun(tmp_path, state="running").write()
    RecordedRun(tmp_path).write()
    assert Workspace(tmp_path).get_run_status().run_id == live


@pytest.mark.parametrize("state", ["finished", "running"])
def test_several_runs_are_an_error_that_lists_them(tmp_path: Path, state: str) -> None:
    ids = [RecordedRun(tmp_path, state=state).write()[0] for _ in range(2)]
    with pytest.raises(AmbiguousRun, match="Pass run_id; list_runs") as caught:
        Workspace(tmp_path).get_run_status()
    assert all(run_id in str(caught.value) for run_id in ids)


def test_an_unknown_run_is_an_error_that_names_the_close_ones(tmp_path: Path) -> None:
    run_id, _ = RecordedRun(tmp_path).write()
    with pytest.raises(UnknownRun, match=f"list_runs shows {run_id}"):
        Workspace(tmp_path).get_run_status(run_id[:-1])


@pytest.mark.parametrize("run_id", ["../outside", "/etc", "", "a/b", ".", "a" * 200, "a\n"])
def test_a_run_id_that_could_leave_the_home_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(UsageError, match="list_runs"):
        Workspace(tmp_path).get_run_status(run_id)


@posix_only
def test_a_directory_open_to_others_is_named_and_not_read(tmp_path: Path) -> None:
    good, _ = RecordedRun(tmp_path).write()
    run_id, directory = RecordedRun(tmp_path).write()
    directory.chmod(0o755)
    found = Workspace(tmp_path).list_runs()
    assert [run.run_id for run in found.runs] == [good]
    assert [notice.run_id for notice in found.notices] == [run_id]
    assert "mode 0755" in found.notices[0].reason
    with pytest.raises(UntrustedRunDirectory, match="open to other users"):
        Workspace(tmp_path).get_run_status(run_id)
    assert Workspace(tmp_path).get_run_status().run_id == good


@posix_only
def test_a_manifest_open_to_others_is_not_read(tmp_path: Path) -> None:
    run_id, directory = RecordedRun(tmp_path).write()
    (directory / "run.json").chmod(0o644)
    with pytest.raises(UntrustedRunDirectory, match="open to other users"):
        Workspace(tmp_path).get_run_status(run_id)


@posix_only
def test_a_directory_of_someone_else_is_not_read(tmp_path: Path) -> None:
    run_id, directory = RecordedRun(tmp_path).write()
    try:
        os.chown(directory, 12345, -1)
    except PermissionError:
        pytest.skip("only root can give a directory away")
    with pytest.raises(UntrustedRunDirectory, match="belongs to user 12345"):
        Workspace(tmp_path).get_run_status(run_id)


@posix_only
def test_a_link_to_a_run_elsewhere_is_not_followed(tmp_path: Path) -> None:
    run_id, directory = RecordedRun(tmp_path / "elsewhere").write()
    runs = tmp_path / "home" / "runs"
    runs.mkdir(parents=True)
    (runs / run_id).symlink_to(directory)
    with pytest.raises(UntrustedRunDirectory, match="link"):
        Workspace(tmp_path / "home").get_run_status(run_id)


def test_a_renamed_copy_does_not_pass_for_another_run(tmp_path: Path) -> None:
    _, directory = RecordedRun(tmp_path).write()
    directory.rename(directory.with_name("another"))
    with pytest.raises(UntrustedRunDirectory, match="renamed"):
        Workspace(tmp_path).get_run_status("another")


def test_a_manifest_that_is_none_is_named(tmp_path: Path) -> None:
    _, directory = RecordedRun(tmp_path).write()
    (directory / "run.json").write_text('{"run_id": 3}')
    assert "no run manifest" in Workspace(tmp_path).list_runs().notices[0].reason


def test_a_corrupt_journal_is_named_and_the_other_runs_are_listed(tmp_path: Path) -> None:
    good, _ = RecordedRun(tmp_path).write()
    run_id, directory = RecordedRun(tmp_path).write()
    (directory / "journal.sqlite").write_bytes(b"this is no database" * 1000)
    found = Workspace(tmp_path).list_runs()
    assert [run.run_id for run in found.runs] == [good]
    assert "cannot be read" in found.notices[0].reason
    for question in ("get_run_status", "get_health_events", "get_metrics", "get_layer_stats", "explain_failure"):
        with pytest.raises(CorruptJournal, match="cannot be read"):
            getattr(Workspace(tmp_path), question)(run_id)


def test_a_run_whose_process_is_gone_has_crashed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    created_s = psutil.Process(process.pid).create_time()
    process.kill()
    process.communicate()
    run_id, _ = RecordedRun(tmp_path, state="running", pid=process.pid, pid_created_s=created_s).write()
    status = Workspace(tmp_path).get_run_status(run_id)
    assert (status.state, status.live, status.step) == (RunState.CRASHED, False, 99)
    assert status.error is not None
    assert f"process {process.pid} is gone" in status.error


def test_a_run_whose_pid_is_another_process_now_has_crashed(tmp_path: Path) -> None:
    run_id, _ = RecordedRun(tmp_path, state="running", pid_created_s=psutil.Process().create_time() - 1000).write()
    assert Workspace(tmp_path).get_run_status(run_id).state is RunState.CRASHED
    with pytest.raises(RunNotLive, match=r"is gone.*Nothing was changed"):
        Workspace(tmp_path).control_training(run_id, action="pause")


def test_a_finished_run_cannot_be_changed(tmp_path: Path) -> None:
    run_id, _ = RecordedRun(tmp_path).write()
    with pytest.raises(RunNotLive, match=f"{run_id} is finished. Nothing was changed"):
        Workspace(tmp_path).control_training(action="stop")
    RecordedRun(tmp_path).write()
    with pytest.raises(RunNotLive, match="none of the 2 runs is live"):
        Workspace(tmp_path).control_training(action="stop")


def test_an_error_that_ended_a_run_is_told(tmp_path: Path) -> None:
    RecordedRun(tmp_path, state="crashed", error="RuntimeError: out of memory (train.py:31)").write()
    assert Workspace(tmp_path).list_runs().runs[0].error == "RuntimeError: out of memory (train.py:31)"
    assert "out of memory" in Workspace(tmp_path).explain_failure().summary


def test_a_run_that_has_recorded_nothing_yet_has_a_status(tmp_path: Path) -> None:
    _, directory = RecordedRun(tmp_path, state="running").write()
    (directory / "journal.sqlite").unlink()
    status = Workspace(tmp_path).get_run_status()
    assert (status.state, status.step, status.loss) == (RunState.RUNNING, None, None)
    assert Workspace(tmp_path).list_runs().runs[0].step is None
    assert Workspace(tmp_path).events_after(status.run_id, 0).events == ()
