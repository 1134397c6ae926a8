"""Where runs live, and which of them a reader believes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from gradtracer.errors import UntrustedRunDirectory, UsageError
from gradtracer.home import (
    HOME_VARIABLE,
    MANIFEST_NAME,
    home_directory,
    list_run_directories,
    manifest_state,
    new_run_directory,
    process_alive,
    read_manifest,
    run_directory,
    write_manifest,
)
from gradtracer.records import RunManifest, RunState
from tests.deadline import wait_until

posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes")


def manifest(**changes: object) -> RunManifest:
    process = psutil.Process()
    return RunManifest(
        run_id="digits", name="digits", pid=process.pid, pid_created_s=process.create_time(), started_at_s=1.0,
        track_interval=100, token="secret",
    ).model_copy(update=changes)  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    _, made = new_run_directory(tmp_path, "digits")
    write_manifest(made, manifest())
    return made


def test_the_home_is_the_argument_then_the_variable_then_the_users_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "variable"))
    assert home_directory(tmp_path / "argument") == tmp_path / "argument"
    assert home_directory() == tmp_path / "variable"
    monkeypatch.delenv(HOME_VARIABLE)
    assert home_directory().name == "gradtracer"
    assert home_directory("~/runs") == Path.home() / "runs"


@pytest.mark.parametrize(
    "name", ["digits", "a/b\\c", "../..", "", "   ", "модель", "x" * 500, ".hidden", "__main__", "a\x00b\n"]
)
def test_any_name_gives_a_run_id_that_can_be_found_again(tmp_path: Path, name: str) -> None:
    run_id, directory = new_run_directory(tmp_path, name)
    assert run_directory(tmp_path, run_id) == directory
    assert directory.parent == tmp_path / "runs"
    assert directory.is_dir()


def test_a_sweep_of_many_runs_of_one_name_gets_as_many_folders(tmp_path: Path) -> None:
    made: list[str] = []
    threads = [
        threading.Thread(target=lambda: made.extend(new_run_directory(tmp_path, "sweep")[0] for _ in range(250)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == len(set(made)) == 2_000


@pytest.mark.parametrize(
    "run_id", ["..", ".", "", "../digits", "a/b", "a\\b", "/etc", "digits\n", "~", ".digits", "a\x00", "x" * 129, "é"]
)
def test_an_id_that_could_name_another_place_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(UsageError, match=r"is no run id.*list_runs"):
        run_directory(tmp_path, run_id)


def test_a_manifest_is_read_as_it_was_written(directory: Path) -> None:
    assert read_manifest(directory) == manifest()
    write_manifest(directory, manifest(state="finished"))
    assert read_manifest(directory) == manifest(state="finished")
    assert [file.name for file in directory.iterdir()] == [MANIFEST_NAME]


@posix
def test_a_run_is_closed_to_everyone_else_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        _, directory = new_run_directory(tmp_path, "digits")
        write_manifest(directory, manifest())
    finally:
        os.umask(before)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / MANIFEST_NAME).stat().st_mode & 0o777 == 0o600


@posix
@pytest.mark.parametrize("target", [".", MANIFEST_NAME])
def test_what_another_user_owns_is_not_read(directory: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(directory / target, 12345, -1)
    else:  # Only root can give files away: be someone else instead.
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UntrustedRunDirectory, match="belongs to user"):
        read_manifest(directory)


@posix
@pytest.mark.parametrize("target", [".", MANIFEST_NAME])
@pytest.mark.parametrize("bit", [0o040, 0o020, 0o010, 0o004, 0o002, 0o001])
def test_what_others_may_enter_read_or_change_is_not_read(directory: Path, target: str, bit: int) -> None:
    path = directory / target
    path.chmod(path.stat().st_mode | bit)
    with pytest.raises(UntrustedRunDirectory, match=r"open to other users.*chmod go-rwx"):
        read_manifest(directory)


@posix
def test_links_and_other_kinds_are_not_followed(directory: Path, tmp_path: Path) -> None:
    link = tmp_path / "runs" / "link"
    link.symlink_to(directory, target_is_directory=True)
    with pytest.raises(UntrustedRunDirectory, match="is a link"):
        read_manifest(link)
    (directory / MANIFEST_NAME).rename(directory / "other.json")
    (directory / MANIFEST_NAME).symlink_to(directory / "other.json")
    with pytest.raises(UntrustedRunDirectory, match="is a link"):
        read_manifest(directory)
    (directory / MANIFEST_NAME).unlink()
    os.mkfifo(directory / MANIFEST_NAME, 0o600)
    with pytest.raises(UntrustedRunDirectory, match="of the wrong kind"):
        read_manifest(directory)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"run_id": 1}', b"[" * 100_000, b'{"pid": NaN}',
     manifest().model_dump_json().replace('"schema_version":"1"', '"schema_version":"9"').encode(),
     manifest().model_dump_json().replace('"track_interval":100', '"track_interval":0').encode(),
     manifest().model_dump_json()[:-1].encode() + b',"extra":1}'],
)  # fmt: skip
def test_a_manifest_of_garbage_is_not_believed(directory: Path, content: bytes) -> None:
    (directory / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(UntrustedRunDirectory, match=r"is no run manifest \("):
        read_manifest(directory)


def test_a_missing_manifest_or_folder_is_named(directory: Path) -> None:
    (directory / MANIFEST_NAME).unlink()
    with pytest.raises(UntrustedRunDirectory, match=f"{MANIFEST_NAME} cannot be read: No such file"):
        read_manifest(directory)
    with pytest.raises(UntrustedRunDirectory, match="cannot be read: No such file"):
        read_manifest(directory / "none")


def test_only_the_process_that_wrote_the_manifest_counts_as_alive() -> None:
    alive = manifest()
    assert process_alive(alive)
    assert manifest_state(alive) is RunState.RUNNING
    for other in (
        manifest(pid_created_s=alive.pid_created_s - 60),  # The pid is another process now.
        manifest(pid=2**22 + 1),  # Beyond what Linux hands out.
        manifest(pid=2**80),
    ):
        assert not process_alive(other)
        assert manifest_state(other) is RunState.CRASHED


def test_a_run_that_said_how_it_ended_is_believed_over_its_process() -> None:
    assert manifest_state(manifest(state="finished")) is RunState.FINISHED
    assert manifest_state(manifest(state="crashed")) is RunState.CRASHED


@posix
def test_a_process_that_died_is_not_alive_and_neither_is_its_zombie() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    written = manifest(pid=child.pid, pid_created_s=process.create_time())
    assert process_alive(written)
    child.kill()
    wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert not process_alive(written)
    child.communicate()
    assert not process_alive(written)


def test_runs_are_listed_newest_first_and_only_runs(tmp_path: Path) -> None:
    assert list_run_directories(tmp_path) == []
    directories = []
    for age in (3, 1, 2):
        _, directory = new_run_directory(tmp_path, f"age-{age}")
        write_manifest(directory, manifest())
        os.utime(directory / MANIFEST_NAME, (1e9 - age, 1e9 - age))
        directories.append(directory)
    new_run_directory(tmp_path, "without-manifest")
    (tmp_path / "runs" / "a file").touch()
    (tmp_path / "runs" / ".hidden").mkdir()
    assert list_run_directories(tmp_path) == [directories[1], directories[2], directories[0]]


def test_a_home_without_a_runs_folder_lists_nothing(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    assert list_run_directories(tmp_path) == []
