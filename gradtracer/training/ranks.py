"""Agreement among the trackers of a distributed training: what changes it happens on all ranks at one step, or on none.

Many a program makes its tracker on rank 0 alone, so nothing here is a collective: ranks speak through the key-value
store of the process group, and whoever waits there waits for a bounded time for a rank that is known to be alive.

The main rank publishes a plan: what, and at the end of which step. A daemon thread of every other rank looks for plans
and answers while its training has not passed that step. At the step's end the main rank cancels the plan unless all
have answered; else each rank stops there and says so, and on the main rank's word all do it, report how it went, and
learn whether it went well everywhere. Without a plan the training thread of a rank does not touch the store.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradtracer.errors import RunRefused
from gradtracer.training.rank_mail import RankMail

log = logging.getLogger("gradtracer")

_POLL_S = 0.05
_BEAT_S = 0.5
_SILENT_S = 15.0
"""A process whose daemon thread has not got one turn in this time is taken for dead."""
_WAIT_S = 60.0
"""For a rank that is alive to come to the boundary that it has agreed on."""
_ACTION_S = 900.0
"""For an action on another rank; a trial runs for minutes."""
_MARGIN_S = 0.25
"""Between a plan and its step, for the first try; each further one has four times as long."""

_ordinals: dict[str, int] = {}


@dataclass(frozen=True)
class _Plan:
    number: int
    step: int
    body: str


def ranks_of(model: nn.Module) -> Ranks | None:
    """What the ranks that track this model agree with; None where the process is alone.

    Trackers of different ranks find each other by the names and shapes of the model's parameters.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return None
    described = ";".join(
        f"{name.removeprefix('module.')}:{tuple(p.shape)}"  # DistributedDataParallel's own prefix
        for name, p in model.named_parameters()
    )
    digest = hashlib.sha256(described.encode()).hexdigest()[:16]
    _ordinals[digest] = _ordinals.get(digest, 0) + 1
    store = distributed.distributed_c10d._get_default_store()
    own = distributed.distributed_c10d.PrefixStore(f"gradtracer/{digest}/{_ordinals[digest]}/", store)
    return Ranks(own, distributed.get_rank(), distributed.get_world_size())


class Ranks:
    """One rank's part in the agreement. Methods are for the training thread, but `close`.

    Args:
        store: A `torch.distributed.Store` of this agreement's own.
        rank: Of this process.
        size: Number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size, self.is_main = rank, size, rank == 0
        self._store = store
        self._others = [r for r in range(size) if r != rank]
        self._lock = threading.Lock()
        self._step = -1
        self._holding = False
        self._plan: _Plan | None = None
        """Published and not settled yet."""
        self._current: _Plan | None = None
        """Being carried out."""
        self._seen = 0
        self._tries = 0
        self._all_answered = False
        self._overdue_at = 0.0
        """When a rank that has not answered is asked again, although the plan's step is still to come."""
        self._known_silent: set[int] = set()
        """Ranks that had not answered when last asked: they are asked once, until they do."""
        self._num_exchanges = 0
        self._lost = ""
        self._used: list[list[str]] = []
        self.mail = RankMail(store, rank, size)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="gradtracer-ranks", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str:
        """Why the ranks can agree on nothing any more; empty while they can."""
        return self._lost

    def close(self, patience_s: float = 0.0) -> bool:
        """Say goodbye.

        Args:
            patience_s: How long to wait for the other ranks to do so too.

        Returns:
            Whether all have.
        """
        self._stop.set()
        self._thread.join(2.0)
        if self._lost:
            return False
        try:
            if self.is_main and self._plan is not None:
                self._settle(self._plan, "cancel")
            self.mail.carry()
            self._store.set(f"gone/{self.rank}", "")
            gone = [f"gone/{r}" for r in self._others]
            deadline = time.monotonic() + patience_s
            while not (all_gone := self._store.check(gone)) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            return all_gone
        except RuntimeError as error:
            self._lose(str(error))
            return False

    # ------------------------------------------------------------------ the main rank

    def agree(self, step: int, body: str, step_s: float, *, at_once: bool = False) -> bool:
        """Main rank, at each boundary from the first on at which `body` is wanted: whether to do it now.

        True means that every rank stands at the end of this step and does it too; `finish` must follow.

        Args:
            step: The step that has ended.
            body: What to do, as the other ranks are told.
            step_s: How long a step takes.
            at_once: All ranks are held at this boundary, so it is done here.

        Raises:
            RunRefused: If not all ranks take part; then none does it.
        """
        try:
            return self._agree(step, body, step_s, at_once)
        except RuntimeError as error:
            self._lose(str(error))
            raise RunRefused(f"the ranks can no longer be reached, so nothing was changed: {self._lost}") from error

    def _agree(self, step: int, body: str, step_s: float, at_once: bool) -> bool:
        if self._lost:
            raise RunRefused(f"the ranks can no longer be reached, so nothing was changed: {self._lost}")
        plan = self._plan
        if plan is None or plan.body != body:
            if plan is not None:
                self._settle(plan, "cancel")
            margin_s = _MARGIN_S * 4**self._tries
            # Another rank may be one step ahead.
            plan = self._publish(step if at_once else step + max(2, math.ceil(margin_s / max(step_s, 1e-4))), body)
            self._overdue_at = time.monotonic() + margin_s
        if step < plan.step and (self._all_answered or time.monotonic() < self._overdue_at):
            return False
        acks = {r: f"ack/{plan.number}/{r}" for r in self._others}
        if at_once:
            self._await(plan, acks, _WAIT_S)
        missing = [r for r, key in acks.items() if not self._store.check([key])]
        if step < plan.step and not missing:
            self._all_answered = True
            return False
        if missing or step > plan.step:
            self._settle(plan, "cancel")
            self._tries += 1
            absent = [r for r in missing if not self._store.check([f"here/{r}"])]
            silent = [r for r in missing if not self._store.check([f"late/{plan.number}/{r}"])]
            known = bool(silent) and self._known_silent.issuperset(silent)
            if self._tries < (1 if known else 2 if absent else 3 if silent else 4) and not at_once:
                return False
            self._tries, self._known_silent = 0, set(silent)
            raise RunRefused(_unanswered(absent, missing))
        self._tries, self._known_silent = 0, set()
        reason = self._await(plan, {r: f"ready/{plan.number}/{r}" for r in self._others}, _WAIT_S)
        if reason:
            self._settle(plan, "cancel")
            raise RunRefused(f"{reason}; nothing was changed on any rank")
        self._store.set(f"word/{plan.number}", "go")
        self._current, self._num_exchanges = plan, 0
        return True

    def hold(self, holding: bool) -> None:
        """Main rank: the others are held at this boundary, and are to know that this process lives."""
        self._holding = holding

    def _publish(self, step: int, body: str) -> _Plan:
        self._seen += 1
        plan = _Plan(self._seen, step, body)
        self._all_answered = False
        self._used.append([f"failed/{plan.number}"])
        for r in range(self.size):
            self._used[-1] += [f"{key}/{plan.number}/{r}" for key in ("ack", "late", "ready", "done")]
        with self._lock:
            self._plan = plan
        self._store.set(f"plan/{plan.number}", json.dumps([step, body]))
        return plan

    def _settle(self, plan: _Plan, word: str) -> None:
        """The main rank is through with a plan: its keys go once the next plan is settled too."""
        self._store.set(f"word/{plan.number}", word)
        with self._lock:
            self._plan = None
        for key in self._used.pop(0) if len(self._used) > 1 else ():
            self._store.delete_key(key)

    # ------------------------------------------------------------------ the other ranks

    def due(self, step: int, *, hold: bool = False) -> str | None:
        """Other ranks, at each boundary: what to do now, together with all; `finish` must follow. None for nothing.

        Args:
            step: The step that has ended.
            hold: Wait at this boundary for the next thing to do.
        """
        with self._lock:
            self._step, self._holding = step, hold
            plan = self._plan
        if not hold and (plan is None or step < plan.step):
            return None
        try:
            while (plan := plan or self._next_plan()) is not None:
                body = self._join(plan, step)
                if body is not None or not hold:
                    return body
                plan = None
            return None
        except RuntimeError as error:
            self._lose(str(error))
            return None

    def _next_plan(self) -> _Plan | None:
        alive = _Alive(self._store, [0])
        while not self._lost:
            with self._lock:
                if self._plan is not None:
                    return self._plan
            if self._reason_to_end([0], alive):
                return None
            time.sleep(_POLL_S / 5)
        return None

    def _join(self, plan: _Plan, step: int) -> str | None:
        if step > plan.step:  # a boundary was left out here: the others must not wait for it
            self._store.set(f"failed/{plan.number}", "")
            self._drop(plan)
            return None
        self._store.set(f"ready/{plan.number}/{self.rank}", "")
        word = f"word/{plan.number}"
        reason = self._await(plan, {0: word}, 2 * _WAIT_S)
        if reason:
            self._lose(reason)
        if reason or self._store.get(word) != b"go":
            self._drop(plan)
            return None
        self._current, self._num_exchanges = plan, 0
        return plan.body

    def _drop(self, plan: _Plan) -> None:
        with self._lock:
            if self._plan is plan:
                self._plan = None

    # ------------------------------------------------------------------ all ranks, inside an agreed action

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """The values that every rank gives, in the order of ranks; only inside an agreed action.

        Raises:
            RunRefused: If another rank does not give any.
        """
        plan = self._current
        assert plan is not None, "exchange is for agreed actions"
        self._num_exchanges += 1
        keys = {r: f"values/{plan.number}/{self._num_exchanges}/{r}" for r in range(self.size)}
        if self.is_main:
            self._used[-1] += keys.values()
        try:
            self._store.set(keys[self.rank], json.dumps(list(values)))
            reason = self._await(plan, keys, _ACTION_S)
            if reason:
                raise RunRefused(reason)
            return [json.loads(self._store.get(keys[r])) for r in range(self.size)]
        except RuntimeError as error:
            self._lose(str(error))
            raise RunRefused(f"the other ranks can no longer be reached: {error}") from error

    def mean(self, values: Sequence[float]) -> list[float]:
        """Each value, averaged over the ranks; only inside an agreed action."""
        return [sum(column) / self.size for column in zip(*self.exchange(values), strict=True)]

    def all(self, flag: bool) -> bool:
        """Whether it holds on every rank, inside an agreed action; outside of one, on this rank."""
        return flag if self._current is None else all(value for row in self.exchange([float(flag)]) for value in row)

    def finish(self, problem: str) -> dict[int, str]:
        """The agreed action is over here: report how it went, and learn how it went everywhere.

        Args:
            problem: Why it was not done on this rank; empty where it was.

        Returns:
            Problems by rank. Where there is any, what was done is to be taken back.
        """
        plan, self._current = self._current, None
        assert plan is not None, "finish follows an agreed action"
        verdict = f"verdict/{plan.number}"
        try:
            if problem:
                self._store.set(f"failed/{plan.number}", "")
            self._store.set(f"done/{plan.number}/{self.rank}", problem)
            if not self.is_main:
                reason = self._await(plan, {0: verdict}, _ACTION_S, heed_failure=False)
                if reason:
                    self._lose(reason)
                    return {0: reason}
                self._drop(plan)
                return {int(r): text for r, text in json.loads(self._store.get(verdict)).items()}
            problems = {0: problem} if problem else {}
            for r in self._others:
                done = f"done/{plan.number}/{r}"
                reason = self._await(plan, {r: done}, _ACTION_S, heed_failure=False)
                text = reason or self._store.get(done).decode()
                if text:
                    problems[r] = text
            self._store.set(verdict, json.dumps(problems))
            self._settle(plan, "go")
            return problems
        except RuntimeError as error:
            self._lose(str(error))
            return {self.rank: problem or str(error)}

    # ------------------------------------------------------------------ waiting

    def _await(self, plan: _Plan, keys: dict[int, str], timeout_s: float, *, heed_failure: bool = True) -> str:
        """Wait for a key of each rank; why it was in vain, empty where all are there."""
        alive = _Alive(self._store, list(keys), plan.number)
        deadline = time.monotonic() + timeout_s
        pause = 2e-4
        while not self._store.check(list(keys.values())):
            missing = [r for r, key in keys.items() if not self._store.check([key])]
            if heed_failure and self._store.check([f"failed/{plan.number}"]):
                return f"it failed on another rank than {self.rank}"
            reason = self._reason_to_end(missing, alive)
            if reason:
                return reason
            if time.monotonic() > deadline:
                return f"{_named(missing)} did not come to step {plan.step} within {timeout_s:g} s"
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return ""

    def _reason_to_end(self, missing: list[int], alive: _Alive) -> str:
        gone = [r for r in missing if self._store.check([f"gone/{r}"])]
        if gone:
            return f"{_named(gone)} closed its tracker"
        silent = alive.silent(missing)
        return f"{_named(silent)} gave no sign of life for {_SILENT_S:g} s" if silent else ""

    def _lose(self, reason: str) -> None:
        with self._lock:
            self._plan, self._holding = None, False
            if self._lost or self._stop.is_set():
                return
            self._lost = reason.splitlines()[0][:300] if reason else "the store is gone"
        log.warning("gradtracer: the ranks of this run can no longer act together, training goes on: %s", self._lost)

    # ------------------------------------------------------------------ the daemon thread

    def _listen(self) -> None:
        try:
            self._store.set(f"here/{self.rank}", "")
            last_beat = 0.0
            while not self._stop.wait(_POLL_S) and not self._lost:
                if not self.is_main:
                    self._look_for_plan()
                now = time.monotonic()
                if (self._plan is not None or self._holding) and now - last_beat >= _BEAT_S:
                    self._store.add(f"beat/{self.rank}", 1)
                    last_beat = now
                self.mail.carry()
        except RuntimeError as error:
            # The store ends with the process that holds it, often a moment before this one.
            self._lose(str(error))

    def _look_for_plan(self) -> None:
        known = self._seen
        while self._store.check([f"plan/{self._seen + 1}"]):
            self._seen += 1
        if (number := self._seen) == known:
            return
        step, body = json.loads(self._store.get(f"plan/{number}"))
        with self._lock:
            # A plan that is held still has been cancelled: the next one is not published before.
            in_time = self._step < step or (self._holding and self._step == step)
            self._plan = _Plan(number, step, body) if in_time else None
        self._store.add(f"beat/{self.rank}", 1)
        self._store.set(f"{'ack' if in_time else 'late'}/{number}/{self.rank}", "")


class _Alive:
    """Watches the beats of some ranks during one wait."""

    def __init__(self, store: Any, ranks: list[int], number: int = 0) -> None:
        now = time.monotonic()
        self._store, self._next_look = store, now + _BEAT_S
        self._beats = dict.fromkeys(ranks, (-1, now))

    def silent(self, ranks: Sequence[int]) -> list[int]:
        now = time.monotonic()
        if now < self._next_look:
            return []
        self._next_look = now + _BEAT_S
        found: list[int] = []
        for r in ranks:
            count, since = self._beats[r]
            beats = self._store.add(f"beat/{r}", 0)
            if beats != count:
                self._beats[r] = beats, now
            elif now - since > _SILENT_S:
                found.append(r)
        return found


def any_rank(flag: bool) -> bool:
    """Whether a flag is set on any rank: a collective, for what all ranks do at every update."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return flag
    device = torch.device("cuda") if "nccl" in distributed.get_backend() else torch.device("cpu")
    shared = torch.tensor([float(flag)], device=device)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return bool(shared.item())


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _unanswered(absent: list[int], missing: list[int]) -> str:
    if absent:
        return (
            f"{_named(absent)} {'have' if len(absent) > 1 else 'has'} no tracker of this model, and a change on some "
            "ranks alone would drive the replicas apart, so nothing was changed. Make the FlowTracker on every rank, "
            "after init_process_group and at the same step; only rank 0 records"
        )
    if missing:
        return f"{_named(missing)} did not answer in time, also when asked again; nothing was changed on any rank"
    return "the training passed the step that was agreed on without a boundary; nothing was changed on any rank"
