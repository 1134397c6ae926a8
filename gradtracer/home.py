"""Where runs live, and which of them a reader may believe.

The home of all runs is ``GRADTRACER_HOME``, else the user's state folder. A run is ``runs/<run_id>/`` with mode 0700;
its ``run.json`` is replaced atomically, so a reader sees a whole manifest or none.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

import platformdirs
import psutil
from pydantic import ValidationError

from gradtracer.errors import UntrustedRunDirectory, UsageError
from gradtracer.records import RunManifest, RunState

HOME_VARIABLE = "GRADTRACER_HOME"
MANIFEST_NAME = "run.json"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def home_directory(home: str | Path | None = None) -> Path:
    """The folder that holds all runs: the argument, else ``GRADTRACER_HOME``, else the user's state folder."""
    if home is not None:
        return Path(home).expanduser().absolute()
    if chosen := os.environ.get(HOME_VARIABLE):
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_state_path("gradtracer", appauthor=False)


def run_directory(home: Path, run_id: str) -> Path:
    """The folder of a run.

    Raises:
        UsageError: If the id could name anything outside the home.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise UsageError(
            f"{run_id[:80]!r} is no run id: letters, digits, '.', '_' and '-' only. list_runs shows the ids"
        )
    return home / "runs" / run_id


def new_run_directory(home: Path, name: str) -> tuple[str, Path]:
    """Make the folder of a new run.

    Args:
        home: The home of all runs; made where it is missing.
        name: What the user calls the run; it becomes the readable part of the id.

    Returns:
        The run id and its folder, mode 0700.
    """
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:40] or "run"
    runs = home / "runs"
    runs.mkdir(parents=True, exist_ok=True, mode=0o700)
    while True:
        run_id = f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        with suppress(FileExistsError):  # A sweep starts many runs of one name in the same second.
            (runs / run_id).mkdir(mode=0o700)
            return run_id, runs / run_id


def write_manifest(directory: Path, manifest: RunManifest) -> None:
    """Replace ``run.json`` atomically, mode 0600."""
    temporary = directory / f".{MANIFEST_NAME}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(manifest.model_dump_json(indent=1))
    os.replace(temporary, directory / MANIFEST_NAME)


def read_manifest(directory: Path) -> RunManifest:
    """Read ``run.json`` after checking that only this user could have written it.

    Raises:
        UntrustedRunDirectory: If folder or file belongs to someone else, is open to others, is a link, or holds no
            valid manifest.
    """
    path = directory / MANIFEST_NAME
    for checked, kind in ((directory, stat.S_ISDIR), (path, stat.S_ISREG)):
        try:
            status = checked.lstat()
        except OSError as error:
            raise UntrustedRunDirectory(f"{checked} cannot be read: {error.strerror}") from error
        if not kind(status.st_mode):
            raise UntrustedRunDirectory(f"{checked} is a link or of the wrong kind: it is not read")
        if os.name == "posix":
            if status.st_uid != os.getuid():
                raise UntrustedRunDirectory(
                    f"{checked} belongs to user {status.st_uid}, not to you ({os.getuid()}): it is not read"
                )
            if status.st_mode & 0o077:
                raise UntrustedRunDirectory(
                    f"{checked} is open to other users (mode {stat.S_IMODE(status.st_mode):04o}): it is not read. "
                    f"If you trust what is in it: chmod go-rwx {checked}"
                )
    try:
        return RunManifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UntrustedRunDirectory(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise UntrustedRunDirectory(
            f"{path} is no run manifest ({'.'.join(map(str, problem['loc']))}: {problem['msg']})"
        ) from error


def process_alive(manifest: RunManifest) -> bool:
    """Whether the very process that wrote the manifest still runs; a reused pid does not count."""
    try:
        # psutil computes the start from boot time and clock ticks; 1 s is well above their jitter and well below the
        # time in which a system reuses a pid.
        process = psutil.Process(manifest.pid)
        return abs(process.create_time() - manifest.pid_created_s) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OverflowError):
        return False


def manifest_state(manifest: RunManifest) -> RunState:
    """How the run stands by its manifest and process alone: running, finished or crashed."""
    if manifest.state == "running":
        return RunState.RUNNING if process_alive(manifest) else RunState.CRASHED
    return RunState(manifest.state)


def list_run_directories(home: Path) -> list[Path]:
    """Folders of all runs, trusted or not, newest first by their manifest's time of change."""
    found: list[tuple[float, str, Path]] = []
    try:
        entries = list((home / "runs").iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    for directory in entries:
        if _RUN_ID.fullmatch(directory.name):
            try:
                changed_s = (directory / MANIFEST_NAME).lstat().st_mtime
            except PermissionError:
                changed_s = 0.0  # closed to us: last, for `read_manifest` to say why it is not read
            except OSError:
                continue  # no manifest yet, or removed in this moment
            found.append((changed_s, directory.name, directory))
    return [directory for _, _, directory in sorted(found, reverse=True)]
