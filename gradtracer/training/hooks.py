"""The process-wide seams of torch: optimizer steps, backward calls, and the scaling of losses.

Nothing is attached to the user's model or optimizer, so copies and pickles of them carry nothing of ours. The hooks
exist while at least one listener does; the last one to leave puts torch back as it was.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_NUM_REMEMBERED_LOSSES = 64


class TrainingListener(Protocol):
    """Who wants to know. All methods are called in the thread that trains."""

    def on_backward(self, loss: torch.Tensor, unscaled: torch.Tensor) -> None:
        """`loss.backward()` is about to run; `unscaled` is the loss before a GradScaler scaled it."""
        ...

    def on_backward_done(self) -> None:
        """It has returned, or raised."""
        ...

    def on_update(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """The optimizer is about to step; gradients are final unless a closure will compute them."""
        ...

    def on_updated(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """The optimizer has stepped."""
        ...


class _Hooks:
    def __init__(self) -> None:
        self._listeners: tuple[TrainingListener, ...] = ()
        self._lock = threading.Lock()
        self._handles: list[Any] = []
        self._unscaled: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.scalers: list[torch.amp.GradScaler] = []
        """Gradient scalers that have scaled a loss since the first listener came."""

    def add(self, listener: TrainingListener) -> None:
        with self._lock:
            self._listeners = (*self._listeners, listener)
            if len(self._listeners) == 1:
                self._install()

    def remove(self, listener: TrainingListener) -> None:
        with self._lock:
            if listener not in self._listeners:
                return
            self._listeners = tuple(x for x in self._listeners if x is not listener)
            if not self._listeners:
                self._uninstall()

    def _install(self) -> None:
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._backward = torch.autograd.backward
        self._scale = torch.amp.GradScaler.scale
        hooks = self

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            return hooks._run_backward(tensors, *args, **kwargs)

        def scale(scaler: Any, outputs: Any) -> Any:
            return hooks._run_scale(scaler, outputs)

        self._our_backward, self._our_scale = backward, scale
        torch.autograd.backward = backward
        torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]

    def _uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        # Only what is still ours is put back: somebody may have patched it after us.
        if torch.autograd.backward is self._our_backward:
            torch.autograd.backward = self._backward
        if torch.amp.GradScaler.scale is self._our_scale:
            torch.amp.GradScaler.scale = self._scale  # type: ignore[method-assign]
        self._unscaled.clear()
        self.scalers.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        has_closure = _has_closure(args, kwargs)
        for listener in self._listeners:
            listener.on_update(optimizer, has_closure)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        has_closure = _has_closure(args, kwargs)
        for listener in self._listeners:
            listener.on_updated(optimizer, has_closure)

    def _run_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        loss = tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return self._backward(tensors, *args, **kwargs)
        scaled, unscaled = self._unscaled.pop(id(loss), (loss, loss))
        assert scaled is loss
        listeners = self._listeners
        for listener in listeners:
            listener.on_backward(loss, unscaled)
        try:
            return self._backward(tensors, *args, **kwargs)
        finally:
            for listener in listeners:
                listener.on_backward_done()

    def _run_scale(self, scaler: Any, outputs: Any) -> Any:
        scaled = self._scale(scaler, outputs)
        if not any(scaler is known for known in self.scalers):
            self.scalers.append(scaler)
        if isinstance(outputs, torch.Tensor):
            # The scaled tensor is kept so that its id stays its own; a loss that never runs backward is dropped later.
            self._unscaled[id(scaled)] = (scaled, outputs.detach())
            if len(self._unscaled) > _NUM_REMEMBERED_LOSSES:
                self._unscaled.pop(next(iter(self._unscaled)))
        return scaled


def _has_closure(args: Any, kwargs: Any) -> bool:
    # args[0] is the optimizer itself in the wrapped call of Optimizer.step.
    given = [a for a in args if not isinstance(a, torch.optim.Optimizer)]
    return any(a is not None for a in given) or kwargs.get("closure") is not None


HOOKS = _Hooks()
"""The one instance: the seams are the process's, not a tracker's."""
