"""Runs a copy of the model again, for audits that ask what would happen: nothing of the user's is touched.

The copy is deep, its inputs are cloned, no gradient is kept, and every random state that the process has is put back.
Code of the user's that would reach outside of the copy (a generator of its own, a tensor that is no part of the model)
ends the probe before it does.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

MAX_PARAMETERS = 50_000_000
"""Larger models are not copied: 50 million parameters are 200 MB and some 0.1 s."""

MAX_ROWS = 8


class NotReplayable(Exception):
    """The call cannot be run again without touching something of the user's."""


@dataclass(frozen=True)
class Call:
    """One call of the model."""

    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure of tuples, lists and dicts, with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: map_tensors(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        changed = [map_tensors(v, change) for v in value]
        if hasattr(value, "_fields"):
            return type(value)(*changed)
        return type(value)(changed)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a structure of tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from tensors_in(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors_in(v)


def may_probe(model: nn.Module) -> bool:
    """Whether a copy is affordable and does not talk to other processes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    return sum(p.numel() for p in model.parameters()) <= MAX_PARAMETERS


def copied(call: Call, num_rows: int | None = None) -> Call:
    """The call with tensors of its own, of the first rows only where all of the batch's size can be cut."""

    def cut(tensor: Tensor) -> Tensor:
        short = tensor.detach()
        if num_rows is not None and tensor.dim() > 0 and tensor.shape[0] == num_rows:
            short = short[:MAX_ROWS]
        return short.clone()

    return Call(map_tensors(call.inputs, cut), map_tensors(dict(call.kwargs), cut))


@contextmanager
def copy_of(model: nn.Module) -> Iterator[nn.Module]:
    """A deep copy in evaluation mode, without the user's hooks' effects on random states."""
    with _random_states_kept(), torch.no_grad():
        # Gradients are not copied; a tensor with history that a module keeps cannot be, but for its value.
        memo: dict[int, Any] = {id(p.grad): None for p in model.parameters() if p.grad is not None}
        for module in model.modules():
            memo |= {id(t): t.detach().clone() for t in tensors_in(vars(module)) if t.grad_fn is not None}
        clone = copy.deepcopy(model, memo)
        for module in clone.modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for key in [k for k, hook in hooks.items() if not _is_of_torch(hook)]:
                    del hooks[key]  # the user's: they would tell of a pass that is none
        clone.eval()
        yield clone


def run_copy(clone: nn.Module, call: Call, *, seed: int, watch: TorchFunctionMode | None = None) -> Any:
    """Call the copy with its random states at a seed.

    Raises:
        NotReplayable: If the call would have reached outside of the copy.
        Exception: Whatever the user's code raises.
    """
    # Not torch.manual_seed: it would also leave a seed for devices that are not in use yet.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    known = [*clone.parameters(), *clone.buffers(), *tensors_in(call.inputs), *tensors_in(dict(call.kwargs))]
    with _Inside(known):
        if watch is None:
            return clone(*call.inputs, **call.kwargs)
        with watch:
            return clone(*call.inputs, **call.kwargs)


def _is_of_torch(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.")


class _Inside(TorchDispatchMode):
    """Refuses to draw from a generator of the user's, and to write to a tensor that is not the probe's own."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self._own: dict[int, Any] = {}
        for tensor in known:
            self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, or a subclass without one
            return
        self._own[storage._cdata] = storage  # kept, so that its address stays its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None or any(isinstance(a, torch.Generator) for a in args):
            raise NotReplayable("a generator of the program's own")
        schema = func._schema
        if schema.is_mutable:
            for argument, value in zip(schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._check(value)
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
                    self._check(kwargs[argument.name])
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._add(tensor)
        return result

    def _check(self, value: Any) -> None:
        for tensor in tensors_in(value):
            if tensor.untyped_storage()._cdata not in self._own:
                raise NotReplayable("a tensor that is no part of the model")


@contextmanager
def _random_states_kept() -> Iterator[None]:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    cache = torch.is_autocast_cache_enabled()
    with torch.random.fork_rng(devices=devices):
        try:
            torch.set_autocast_cache_enabled(False)
            yield
        finally:
            torch.set_autocast_cache_enabled(cache)
            random.setstate(python)
            np.random.set_state(numpy)
