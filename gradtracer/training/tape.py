"""A training step, recorded so that it can be run again: its batches, its calls of modules, and what is between them.

One step of the user's loop is recorded while it runs, by a torch function mode that only looks on: the outermost calls
of modules that hold tracked parameters (they are called again as modules, so that a fix that changes one is felt), and
every torch function outside of them that depends on a parameter or on such a call: the loss, clipping, clearing of
gradients. Whatever does not depend on the model is the batch, and is kept as it was. `backward` and the optimizers'
updates stand on the tape where they happened.

Values that the program took out of tensors (``.item()``, shapes, control flow) are what they were when it was recorded;
`TapeRecorder` finds out what it cannot follow (functions of `torch.autograd.Function` outside of modules, closures) and
says so, and whoever uses a tape compares its first run with the live step, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

MAX_BATCH_BYTES = 256 << 20
"""What the constants of all recorded steps may take: batches and targets, mostly."""


_RandomState = tuple[Tensor, ...]
"""Of torch on the host and, where CUDA is in use, on its current device."""


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor that is computed on the tape, or is part of the batch."""

    number: int


@dataclass(frozen=True)
class _Call:
    """A call of a module or of a torch function."""

    run: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: tuple[tuple[tuple[Any, ...], int], ...]
    """Where in the result each tensor is, and its slot."""
    writes: tuple[int, ...]
    """Slots that it changes in place."""
    grad_enabled: bool
    autocast: tuple[str, torch.dtype] | None
    random_state: _RandomState | None
    """From which it drew random numbers; None where it drew none."""


@dataclass(frozen=True)
class _Backward:
    loss: int
    unscaled: int


@dataclass(frozen=True)
class _Update:
    optimizer: Optimizer


_Entry = _Call | _Backward | _Update


@dataclass
class Tape:
    """A recorded step.

    Its constants belong to it: they are copied before each run, since the step may have changed them in place.
    """

    entries: list[_Entry] = field(default_factory=list)
    constants: dict[int, Tensor] = field(default_factory=dict)
    num_slots: int = 0
    live_loss: float = 0.0
    """The loss when it was recorded, summed over the step's backward calls."""

    @property
    def num_bytes(self) -> int:
        """Size of the constants."""
        return sum(t.numel() * t.element_size() for t in self.constants.values())

    @property
    def has_update(self) -> bool:
        """Whether an optimizer stepped; a gradient scaler skips steps whose gradient is not finite."""
        return any(isinstance(entry, _Update) for entry in self.entries)

    def step(self) -> float:
        """Run the whole step on the model as it is now: forward, backward, updates.

        Returns:
            The loss before the updates, summed over the step's backward calls.
        """
        slots = self._fresh_slots()
        losses: list[float] = []
        for entry in self.entries:
            if isinstance(entry, _Call):
                _run(entry, slots)
            elif isinstance(entry, _Backward):
                losses.append(float(slots[entry.unscaled].detach()))
                slots[entry.loss].backward()
            else:
                entry.optimizer.step()
        return sum(losses)

    def forward(self) -> None:
        """Only the calls on which the losses depend, without gradient or update."""
        slots = self._fresh_slots()
        with torch.no_grad():
            for entry in self._forward():
                _run(entry, slots)

    def _fresh_slots(self) -> list[Any]:
        slots: list[Any] = [None] * self.num_slots
        for number, tensor in self.constants.items():
            slots[number] = tensor.clone()
        return slots

    def _forward(self) -> list[_Call]:
        """The calls on which the losses depend, in order."""
        wanted = {s for e in self.entries if isinstance(e, _Backward) for s in (e.loss, e.unscaled)}
        chosen: list[_Call] = []
        for entry in reversed(self.entries):
            if isinstance(entry, _Call) and wanted.intersection((*(n for _, n in entry.outputs), *entry.writes)):
                chosen.append(entry)
                wanted.update(s.number for s in _slots_in((entry.args, entry.kwargs)))
        return chosen[::-1]


class TapeRecorder(TorchFunctionMode):
    """Records steps of the training thread, from one step boundary to the next.

    Args:
        model: The model.
        max_bytes: What the constants of one tape may take.
    """

    def __init__(self, model: nn.Module, max_bytes: int = MAX_BATCH_BYTES) -> None:
        super().__init__()
        self._model, self.max_bytes = model, max_bytes
        self._handles: list[Any] = []
        self._recording = False
        self._entered = False
        self._aside = 0
        self.trouble: str | None = None
        """Why the step cannot be run again; None while it can."""
        self.out_of_space = False
        """Whether that is because its batch is too large."""
        self._clear()

    def start(self) -> None:
        """Begin to record; at a step boundary."""
        self._clear()
        self.trouble, self.out_of_space = None, False
        self._ours = {id(p) for p in self._model.parameters()}
        self._theirs = {id(b) for b in self._model.buffers()}
        self._handles = [
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module, with_kwargs=True, always_call=True),
        ]
        self._recording = True
        if not self._entered:
            self.__enter__()
            self._entered = True

    def stop(self) -> Tape | None:
        """End recording; at a step boundary.

        Returns:
            The step's tape; None where it cannot be run again, for the reason in `trouble`.
        """
        self._recording = False
        for handle in self._handles:
            handle.remove()
            # torch forgets the hook, but not that it took keyword arguments.
            getattr(nn.modules.module, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)
        self._handles = []
        if self._entered and torch.overrides._get_current_function_mode() is self:
            self.__exit__(None, None, None)
            self._entered = False
        elif self._entered:
            self._give_up("a torch function mode of the program's own was entered in the step and not left in it")
        tape, self._tape = self._tape, Tape()
        tape.num_slots = self._num_slots
        kinds = [type(entry) for entry in tape.entries]
        if _Backward not in kinds:
            self._give_up("no backward call was seen in the step")
        self._clear()
        return tape if self.trouble is None else None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What happens in this block is not part of the step."""
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1

    def on_backward(self, loss: Tensor, unscaled: Tensor) -> None:
        """`loss.backward()` is about to run."""
        if not self._recording:
            return
        if id(loss) not in self._slot_of:
            self._give_up("the loss does not come from the recorded calls")
            return
        self._tape.live_loss += float(unscaled.detach())
        self._tape.entries.append(
            _Backward(self._slot_of[id(loss)], self._slot_of.get(id(unscaled), self._slot_of[id(loss)]))
        )

    def on_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        """An optimizer is about to step; nothing that happens within is recorded."""
        if not self._recording:
            return
        self._depth += 1
        if has_closure:
            self._give_up(f"{type(optimizer).__name__} computes the loss itself, in a closure")
        self._tape.entries.append(_Update(optimizer))

    def on_updated(self) -> None:
        """The optimizer has stepped."""
        if self._recording:
            self._depth -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, and put it on the tape where it depends on the model."""
        kwargs = kwargs or {}
        if not self._recording or self._depth or self._aside or self.trouble is not None or func in _NEVER:
            return func(*args, **kwargs)
        self._depth += 1  # composite functions call others
        try:
            with torch._C.DisableTorchFunction():
                is_live = any(self._is_live(t) for t in _tensors_in((args, kwargs)))
                # Constants are copied before the function may change them.
                call = (self._taken(args), self._taken(kwargs), _random_state()) if is_live else None
            result = func(*args, **kwargs)
        finally:
            self._depth -= 1
        if call is not None:
            with torch._C.DisableTorchFunction():
                name = getattr(func, "__name__", "")
                changes = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__")
                changes = changes or (name.startswith("__i") and name.endswith("__")) or kwargs.get("out") is not None
                if changes or next(_tensors_in(result), None) is not None:
                    self._add(func, *call, result, changes=(args, kwargs) if changes else None)
        return result

    # ------------------------------------------------------------------ inside

    def _clear(self) -> None:
        self._tape = Tape()
        self._num_slots = 0
        self._depth = 0
        self._slot_of: dict[int, int] = {}
        self._kept_alive: list[Any] = []  # so that no id is given to another tensor within the step
        self._num_bytes = 0
        self._without_grad: set[int] = set()
        self._ours: set[int] = set()
        self._theirs: set[int] = set()
        self._taking: list[tuple[nn.Module, _RandomState]] = []

    def _give_up(self, why: str) -> None:
        self.trouble = self.trouble or why
        self._kept_alive.clear()

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if not self._recording:
            return
        if (
            self._depth == self._aside == 0
            and self.trouble is None
            and any(id(p) in self._ours for p in module.parameters())
        ):
            self._taking.append((module, _random_state()))
        if self._taking:
            self._depth += 1

    def _after_module(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if not self._recording or not self._taking:
            return
        self._depth -= 1
        if self._depth or module is not self._taking[-1][0]:
            return
        _, random_state = self._taking.pop()
        with torch._C.DisableTorchFunction():
            self._add(module, self._taken(args), self._taken(kwargs), random_state, result)

    def _is_live(self, tensor: Tensor) -> bool:
        computed = id(tensor) in self._slot_of and self._slot_of[id(tensor)] not in self._tape.constants
        return computed or tensor.requires_grad or id(tensor) in self._ours

    def _taken(self, value: Any) -> Any:
        """The value with its tensors replaced by slots; parameters and buffers of the model stay what they are."""
        return _mapped(value, self._taken_tensor)

    def _taken_tensor(self, tensor: Tensor) -> Any:
        if id(tensor) in self._slot_of:
            number = self._slot_of[id(tensor)]
            if number in self._without_grad and tensor.grad_fn is not None:
                self._cannot_follow(tensor)
            return _Slot(number)
        if id(tensor) in self._ours or id(tensor) in self._theirs or (tensor.is_leaf and tensor.requires_grad):
            return tensor
        if tensor.grad_fn is not None:
            self._cannot_follow(tensor)
        number = self._new_slot(tensor)
        self._num_bytes += tensor.numel() * tensor.element_size()
        if self._num_bytes > self.max_bytes:
            self.out_of_space = True
            self._give_up(
                f"the batch takes {self._num_bytes / 2**20:.0f} MiB and more; {self.max_bytes / 2**20:.0f} are allowed"
            )
            return _Slot(number)
        self._tape.constants[number] = tensor.detach().clone()
        return _Slot(number)

    def _cannot_follow(self, tensor: Tensor) -> None:
        self._give_up(
            f"a tensor made by {type(tensor.grad_fn).__name__} cannot be followed: it comes from outside the step or "
            "from a torch.autograd.Function outside of modules"
        )

    def _new_slot(self, tensor: Tensor) -> int:
        number = self._num_slots
        self._num_slots += 1
        self._slot_of[id(tensor)] = number
        self._kept_alive.append(tensor)
        return number

    def _add(
        self,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        random_state: _RandomState,
        result: Any,
        changes: Any = None,
    ) -> None:
        if self.trouble is not None:
            return
        drew = not all(torch.equal(a, b) for a, b in zip(random_state, _random_state(), strict=True))
        outputs = tuple(
            (path, self._slot_of[id(t)] if id(t) in self._slot_of and changes else self._new_slot(t))
            for path, t in _tensors_at(result)
            if id(t) not in self._ours
        )
        if not torch.is_grad_enabled():
            self._without_grad.update(number for _, number in outputs)
        writes = tuple(self._slot_of[id(t)] for t in _tensors_in(changes) if id(t) in self._slot_of)
        device = next((t.device.type for t in _tensors_in((result, changes))), "cpu")
        autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        self._tape.entries.append(
            _Call(run, args, kwargs, outputs, writes, torch.is_grad_enabled(), autocast, random_state if drew else None)
        )


def _random_state() -> _RandomState:
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return (torch.get_rng_state(), torch.cuda.get_rng_state()) if on_cuda else (torch.get_rng_state(),)


def _set_random_state(state: _RandomState) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1])


_NEVER = {Tensor.backward, Tensor.requires_grad_, Tensor.retain_grad, Tensor.register_hook}


def _run(call: _Call, slots: list[Any]) -> None:
    def put_back(value: Any) -> Any:
        return _mapped(value, lambda t: t, lambda slot: slots[slot.number])

    precision = torch.autocast(call.autocast[0], dtype=call.autocast[1]) if call.autocast else contextlib.nullcontext()
    if call.random_state is not None:
        _set_random_state(call.random_state)
    with torch.set_grad_enabled(call.grad_enabled and torch.is_grad_enabled()), precision:
        result = call.run(*put_back(call.args), **put_back(call.kwargs))
    for path, number in call.outputs:
        value = result
        for key in path:
            value = getattr(value, key.name) if isinstance(key, _Attribute) else value[key]
        slots[number] = value


@dataclass(frozen=True)
class _Attribute:
    name: str


def _mapped(value: Any, on_tensor: Callable[[Tensor], Any], on_slot: Callable[[_Slot], Any] | None = None) -> Any:
    if isinstance(value, Tensor):
        return on_tensor(value)
    if isinstance(value, _Slot):
        return on_slot(value) if on_slot is not None else value
    if isinstance(value, (list, tuple)):
        items = [_mapped(v, on_tensor, on_slot) for v in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {k: _mapped(v, on_tensor, on_slot) for k, v in value.items()}
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return slice(*(_mapped(v, on_tensor, on_slot) for v in parts))
    return value


def _tensors_in(value: Any) -> Iterator[Tensor]:
    return (tensor for _, tensor in _tensors_at(value))


def _tensors_at(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_at(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _tensors_at(item, (*path, i))
    elif isinstance(value, slice):
        yield from _tensors_at((value.start, value.stop, value.step), path)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            yield from _tensors_at(getattr(value, name), (*path, _Attribute(name)))


def _slots_in(value: Any) -> list[_Slot]:
    found: list[_Slot] = []
    _mapped(value, lambda t: t, lambda slot: found.append(slot) or slot)
    return found
