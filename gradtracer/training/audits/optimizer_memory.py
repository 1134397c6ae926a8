"""Optimizers that forget."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, Measure, Severity
from gradtracer.training.audits._sampling import parameters_of
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.stack import calling_line


@dataclass
class _Memory:
    """What the optimizer that has last updated a parameter knew about it."""

    optimizer: weakref.ref[Optimizer]
    type: type
    held: frozenset[int]
    settings: tuple[tuple[str, str], ...]
    count: float
    """Its own step counter, else the updates seen."""
    has_state: bool
    num_updates: int


@AUDITS.register
class OptimizerMemory(Audit):
    """Whether moments and step counters survive from one update to the next.

    What:
        A running optimizer whose state is gone: replaced by a new one over the same parameters, cleared, or loaded from
        a checkpoint without its state.

    Why:
        Adam starts anew with moments that are not settled: its first updates are as large as the rate allows, in every
        direction alike. The loss jumps and may take long to come back.

    Definition:
        Before each update one parameter of the optimizer is looked up in its state. The memory is lost where the
        parameter had a state (moments, a momentum buffer) after at least 10 updates and has none now, or where its step
        counter has fallen. optimizer_state_lost (`warning`): by the same class of optimizer over the same parameters
        with the same settings. optimizer_replaced (`info`): where parameters, class or settings differ.

    Thresholds:
        10 updates: what an optimizer knows after fewer is no loss. Whoever begins a new phase of training on purpose
        changes what is trained or how; a twin of the old optimizer is a resume that forgot `load_state_dict`.

    Fixes:
        warmup. In the source: load the optimizer's state with the model's.

    References:
        PyTorch documentation, "Saving and loading a general checkpoint for inference and/or resuming training".
    """

    code = "optimizer_memory"
    every_step = True

    MIN_UPDATES = 10

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}
        self._probes: dict[int, nn.Parameter] = {}

    def on_intervention(self) -> None:
        """What a rollback or a reset takes away is not lost."""
        self._memories.clear()

    def on_gradients(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Compare what the optimizer knows with what was known."""
        probe = next((p for p in parameters_of(optimizer) if p.grad is not None), None)
        if probe is None:
            return
        memory = self._memories.get(id(probe))
        if memory is None or memory.num_updates < self.MIN_UPDATES or not memory.has_state:
            return
        state = optimizer.state.get(probe, {})
        count = _count(state)
        if _has_state(state) and (count is None or count >= memory.count):
            return
        same_one = memory.optimizer() is optimizer
        alike = memory.type is type(optimizer) and memory.held == _held(optimizer)
        changed = [] if same_one else _changed(memory.settings, _settings(optimizer))
        how = "its state was cleared" if same_one else f"a new {type(optimizer).__name__} has taken its place"
        lost = alike and not changed
        yield finding(
            context,
            "optimizer_state_lost" if lost else "optimizer_replaced",
            f"After {memory.num_updates} updates the optimizer has no memory of them at step {context.step}: {how}"
            + (f", with another {', '.join(changed)}." if changed else "."),
            severity=Severity.WARNING if lost else Severity.INFO,
            measures=[Measure(name="num_updates", value=float(memory.num_updates), threshold=float(self.MIN_UPDATES))],
            source=calling_line("optimizer.step"),
        )

    def on_update(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Note what the optimizer knows now."""
        probe = next((p for p in parameters_of(optimizer) if p.grad is not None), None)
        if probe is None:
            return ()
        before = self._memories.get(id(probe))
        state = optimizer.state.get(probe, {})
        count = _count(state)
        if before is not None and before.optimizer() is optimizer:
            if not _has_state(state) or (count is not None and count < before.count):
                before.num_updates = 0
            before.num_updates += 1
            before.count = before.count if count is None else count
            before.has_state = _has_state(state)
            if context.sampled:
                before.held, before.settings = _held(optimizer), _settings(optimizer)
            return ()
        self._probes[id(probe)] = probe  # so that its id stays its own
        self._memories[id(probe)] = _Memory(
            weakref.ref(optimizer), type(optimizer), _held(optimizer), _settings(optimizer), count or 0.0,
            _has_state(state), 1,
        )  # fmt: skip
        return ()


def _has_state(state: dict[str, object]) -> bool:
    """Moments or a momentum buffer; a bare step counter is none."""
    return any(isinstance(v, Tensor) and v.dim() > 0 for v in state.values()) or (
        "momentum_buffer" in state and state["momentum_buffer"] is not None
    )


def _count(state: dict[str, object]) -> float | None:
    """The step counter, where reading it waits for no device."""
    count = state.get("step")
    if isinstance(count, Tensor):
        return float(count) if count.device.type == "cpu" and count.numel() == 1 else None
    return float(count) if isinstance(count, (int, float)) else None


def _held(optimizer: Optimizer) -> frozenset[int]:
    return frozenset(id(p) for p in parameters_of(optimizer))


def _settings(optimizer: Optimizer) -> tuple[tuple[str, str], ...]:
    """Settings that a resume keeps; the learning rate may follow a schedule."""
    group = optimizer.param_groups[0]
    return tuple((k, str(group[k])) for k in ("betas", "momentum", "weight_decay", "eps", "alpha") if k in group)


def _changed(before: tuple[tuple[str, str], ...], now: tuple[tuple[str, str], ...]) -> list[str]:
    names = dict.fromkeys(name for name, _ in (*before, *now))
    return [name for name in names if dict(before).get(name) != dict(now).get(name)]
