"""The state of a training: taken as plain values, and put back in place, bit for bit.

Of what is sharded over ranks each keeps its own part, so that taking and restoring wait for no other rank.

What belongs to it: parameters, buffers, optimizers (of parameters outside the model too), modules' modes, learning rate
schedulers, gradient scalers, whatever else of the user's has a state, and the random states of torch, Python and numpy.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradtracer.training.sharding import like, local

State = dict[str, Any]


class TrainingState:
    """Takes and restores the state of one training.

    Args:
        model: The model.
        optimizers: A live list; optimizers that are found later belong to the state too.
        others: Further objects with ``state_dict`` and ``load_state_dict``, a live list: gradient scalers, loaders.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], others: Sequence[Any] = ()) -> None:
        self._model, self._optimizers, self._others = model, optimizers, others
        self._schedulers: list[LRScheduler] = []
        self._strays: dict[str, Tensor] = {}

    def include(self, strays: Mapping[str, Tensor]) -> None:
        """Let parameters that the model uses without having registered them belong to the state from now on."""
        self._strays.update(strays)

    def find_schedulers(self) -> None:
        """Look for learning rate schedulers of the optimizers: a walk over all objects, some 10 ms."""
        ours = {id(o) for o in self._optimizers}
        self._schedulers = [
            thing
            for thing in gc.get_objects()
            # isinstance would ask objects for their __class__, which may do things
            if issubclass(type(thing), LRScheduler) and id(getattr(thing, "optimizer", None)) in ours
        ]

    def take(self, *, gradients: bool = False, device: torch.device | str | None = None) -> State:
        """Copy everything.

        Args:
            gradients: Also the gradients that stand in ``.grad``.
            device: Where the copies of tensors go; by default each stays where it is.

        Returns:
            Tensors and plain values, and under ``"others"`` what schedulers, scalers and loaders said of themselves.
        """
        with torch.no_grad():
            tensors = self._tensors()
            keys = {id(t): key for key, t in tensors.items()}
            state: State = {
                "tensors": {key: _copied(t.detach(), device) for key, t in tensors.items()},
                "training": [module.training for module in self._model.modules()],
                "optimizers": [_optimizer_state(o, keys, device) for o in self._optimizers],
                "others": [copy.deepcopy(x.state_dict()) for x in self._stateful()],
                "random": random_states(),
            }
            if gradients:
                state["gradients"] = {
                    key: None if t.grad is None else _copied(t.grad, device)
                    for key, t in tensors.items()
                    if t.requires_grad
                }
        return state

    def restore(self, state: State) -> None:
        """Put everything back, in place: tensors keep their identity.

        What is not in the state (a parameter group added since, the moments of an optimizer that had not stepped yet)
        is as new afterwards. Gradients that were not taken are cleared: they belong to a state that is gone.
        """
        tensors = self._tensors()
        gradients = state.get("gradients", {})
        with torch.no_grad():
            for key, saved in state["tensors"].items():
                if key in tensors:
                    local(tensors[key]).copy_(saved)
            for key, tensor in tensors.items():
                if tensor.is_leaf and tensor.requires_grad:
                    saved = gradients.get(key)
                    tensor.grad = None if saved is None else like(_copied(saved, tensor.device), tensor)
            for module, training in zip(self._model.modules(), state["training"], strict=False):
                module.training = training
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=False):
                _restore_optimizer(optimizer, saved, tensors)
            for optimizer in self._optimizers[len(state["optimizers"]) :]:
                optimizer.state.clear()
        for thing, saved in zip(self._stateful(), state["others"], strict=False):
            thing.load_state_dict(copy.deepcopy(saved))
        set_random_states(state["random"])

    @property
    def device(self) -> torch.device:
        """Where the first parameter is."""
        return next(iter(self._tensors().values())).device

    def num_bytes(self) -> int:
        """Size of the tensors of a state, without gradients."""
        held = (v for o in self._optimizers for s in o.state.values() for v in s.values())
        tensors = [*self._tensors().values(), *(v for v in held if isinstance(v, Tensor))]
        return sum(local(t.detach()).numel() * t.element_size() for t in tensors)

    def is_finite(self) -> bool:
        """Whether all parameters and moments are finite, and no buffer holds a NaN (a mask may hold infinities).

        A sum is finite only where every element is; one that overflows errs on the careful side.
        """
        with torch.no_grad():
            buffers = [local(b) for b in self._model.buffers() if b.is_floating_point()]
            if any(bool(torch.isnan(b).any()) for b in buffers):
                return False
            known = {id(b) for b in self._model.buffers()}
            tensors = [local(t.detach()) for t in self._tensors().values() if id(t) not in known]
            moments = (v for o in self._optimizers for s in o.state.values() for v in s.values())
            tensors += [local(v) for v in moments if isinstance(v, Tensor)]
            return all(bool(torch.isfinite(t.sum(dtype=torch.float64))) for t in tensors if t.is_floating_point())

    def _stateful(self) -> list[Any]:
        return [*self._schedulers, *self._others]

    def _tensors(self) -> dict[str, Tensor]:
        """Everything that holds numbers, by a key that stays the same: the model's, then what only optimizers hold."""
        found: dict[str, Tensor] = dict(self._model.named_parameters())
        found.update(self._model.named_buffers())
        known = {id(t) for t in found.values()}
        for key, parameter in (*self._strays.items(), *_held(self._optimizers)):
            if id(parameter) not in known:
                known.add(id(parameter))
                found[key] = parameter
        return found


def _held(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                yield f"optimizers[{o}].param_groups[{g}].params[{i}]", parameter


def _optimizer_state(optimizer: Optimizer, keys: dict[int, str], device: torch.device | str | None) -> State:
    return {
        "groups": [
            {name: _copied(value, device) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ],
        "state": {keys[id(p)]: _copied(s, device) for p, s in optimizer.state.items() if id(p) in keys},
    }


def _restore_optimizer(optimizer: Optimizer, saved: State, tensors: dict[str, Tensor]) -> None:
    for group, old in zip(optimizer.param_groups, saved["groups"], strict=False):
        for name, value in old.items():
            if isinstance(group.get(name), Tensor) and isinstance(value, Tensor):
                group[name].copy_(value)
            else:
                group[name] = _copied(value, None)
    ours = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    wanted = {key: s for key, s in saved["state"].items() if key in tensors and id(tensors[key]) in ours}
    for parameter in [p for p in optimizer.state if id(p) not in {id(tensors[key]) for key in wanted}]:
        del optimizer.state[parameter]
    for key, values in wanted.items():
        parameter = tensors[key]
        held = optimizer.state[parameter]
        for name in [n for n in held if n not in values]:
            del held[name]
        for name, value in values.items():
            current = held.get(name)
            if isinstance(current, Tensor) and isinstance(value, Tensor) and local(current).shape == value.shape:
                local(current).copy_(value)
            else:
                # A step counter stays on the host unless the optimizer asked for it elsewhere; moments go along.
                scalar = isinstance(value, Tensor) and value.dim() == 0
                copied = _copied(value, None if scalar else parameter.device)
                held[name] = like(copied, parameter) if isinstance(copied, Tensor) and not scalar else copied


def _copied(value: Any, device: torch.device | str | None) -> Any:
    if isinstance(value, Tensor):
        value = local(value.detach())
        return value.clone() if device is None else value.to(device, copy=True)
    if isinstance(value, dict):
        return {k: _copied(v, device) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(v, device) for v in value)
    return copy.deepcopy(value)


def random_states() -> State:
    """The random states of torch, CUDA where it is in use, Python, and numpy where it was imported."""
    version, internal, gauss = random.getstate()
    state: State = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        import numpy as np  # the user may not use it; its global state matters only where somebody imported it

        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state["numpy"] = [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached]
    return state


def set_random_states(state: State) -> None:
    """Put back what `random_states` gave."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        import numpy as np

        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
