"""Which run is meant, and how it stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradtracer.candidates import closest, few
from gradtracer.control import ControlClient, Done, FlushRequest, LiveStatus, Request, StatusRequest
from gradtracer.errors import (
    AmbiguousRun,
    RunDidNotAnswer,
    RunNotLive,
    RunUnavailable,
    UnknownRun,
    Untrusted,
    UntrustedRunDirectory,
)
from gradtracer.home import list_run_directories, manifest_state, read_manifest, run_directory
from gradtracer.journal import JOURNAL_NAME
from gradtracer.records import RunManifest, RunState

# A live process answers from a thread of its own within milliseconds; a second tells a busy machine from a stopped one.
_ANSWER_S = 1.0


@dataclass(frozen=True)
class Run:
    """A trusted run directory, as it stood when it was opened."""

    directory: Path
    manifest: RunManifest

    @property
    def run_id(self) -> str:
        """Its id, which is the name of its directory too."""
        return self.manifest.run_id

    @property
    def state(self) -> RunState:
        """By manifest and process alone: running, finished or crashed."""
        return manifest_state(self.manifest)

    @property
    def has_journal(self) -> bool:
        """False for a moment after the start of a run."""
        return (self.directory / JOURNAL_NAME).is_file()

    def ending(self) -> str:
        """How it ended, for a sentence that begins with the run."""
        if self.manifest.state == "running":
            return (
                f"ended without closing: its process {self.manifest.pid} is gone (killed, out of memory, or a reboot)"
            )
        if self.manifest.state == "crashed":
            return f"ended with an error: {self.manifest.error or 'unknown'}"
        return "is finished"

    def error(self) -> str | None:
        """What ended it, where it did not end well."""
        return self.ending() if self.state is RunState.CRASHED and not self.manifest.error else self.manifest.error


def find_run(home: Path, run_id: str | None, *, to_act: bool = False) -> Run:
    """The run meant.

    Args:
        home: The home of all runs.
        run_id: Its id; None where there is only one to choose.
        to_act: Whether only live runs come into question, should there be any.
    """
    if run_id is not None:
        directory = run_directory(home, run_id)
        if not directory.exists():
            raise UnknownRun(
                f"no run {run_id[:128]!r} under {home}; list_runs shows "
                f"{few(closest(run_id, [d.name for d in list_run_directories(home)])) or 'none'}"
            )
        return open_run(directory)
    runs: list[Run] = []
    for directory in list_run_directories(home):
        try:
            runs.append(open_run(directory))
        except Untrusted:
            continue  # not a candidate; list_runs says why
    live = [run for run in runs if run.state is RunState.RUNNING]
    candidates = live or runs
    if not candidates:
        raise UnknownRun(
            f"there is no run under {home} yet: start a training with FlowTracker(model, optimizer), then "
            "call list_runs"
        )
    if len(candidates) > 1:
        if to_act and not live:
            raise RunNotLive(f"none of the {len(runs)} runs is live, so none can be changed; list_runs shows them")
        raise AmbiguousRun(
            f"{len(candidates)} runs {'are live' if live else 'are recorded, none is live'}: "
            f"{few([f'{r.run_id} ({r.state.value})' for r in candidates])}. Pass run_id; list_runs shows them"
        )
    return candidates[0]


def open_run(directory: Path) -> Run:
    """The run of a directory.

    Raises:
        UntrustedRunDirectory: If it cannot be believed.
    """
    manifest = read_manifest(directory)
    if manifest.run_id != directory.name:
        raise UntrustedRunDirectory(
            f"{directory} holds the manifest of run {manifest.run_id}: a copied or renamed folder is read only under "
            "its own name"
        )
    return Run(directory, manifest)


def _ask(run: Run, request: Request) -> object:
    return ControlClient(run.manifest).ask(request, timeout_s=_ANSWER_S)


def standing(run: Run) -> tuple[RunState, LiveStatus | None]:
    """The run's state, and what its process says where it answers."""
    if run.state is not RunState.RUNNING or run.manifest.address is None:
        return run.state, None
    try:
        reply = _ask(run, StatusRequest())
    except RunDidNotAnswer:
        # The process exists and even its thread for this is silent: it is stopped or swapped out.
        return RunState.HUNG, None
    except RunUnavailable:
        return open_run(run.directory).state, None  # it may just have ended
    if not isinstance(reply, LiveStatus):
        return RunState.RUNNING, None
    if reply.paused:
        return RunState.PAUSED, reply
    return (RunState.HUNG if reply.stall else RunState.RUNNING), reply


def flush(run: Run) -> int | None:
    """Bring the journal of a live run up to now; one that does not answer is read as it is.

    Returns:
        How many interventions had changed the run by then; None where it does not answer.
    """
    if run.state is not RunState.RUNNING or run.manifest.address is None:
        return None
    try:
        reply = _ask(run, FlushRequest())
    except RunUnavailable:
        return None
    return reply.num_changes if isinstance(reply, Done) else None
