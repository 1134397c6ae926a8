"""Saved states of a training: parameters, buffers, optimizers and random states, restored bit for bit.

A snapshot is copied in the training thread (a memory copy) and written by a thread of its own, so the training does
not wait for the disk. Files are read with ``weights_only=True``: they hold tensors and plain values, no code.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradtracer.errors import BadParameter
from gradtracer.fixes import SnapshotInfo

_MAX_PERIODIC, _MAX_ASKED_FOR = 3, 5
_SHARE_OF_TIME = 1 / 200
_MIN_INTERVAL_S = 1.0
PERIODIC_BYTES = 1 << 30
"""A larger state is saved on request and before interventions only: three of them would fill a disk unasked."""


@dataclass
class _Snapshot:
    info: SnapshotInfo
    periodic: bool
    path: Path
    writing: Future[None]


class SnapshotStore:
    """Takes, keeps and restores snapshots of one run.

    Args:
        directory: Where the files go; made when the first is written.
        model: The model.
        optimizers: A live list; optimizers that are found later are saved too.
        notify: Told once where the state is too large for periodic snapshots.
        periodic_bytes: The largest state that is saved periodically.
    """

    def __init__(
        self,
        directory: Path,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        notify: Callable[[str], None] = lambda message: None,
        periodic_bytes: int = PERIODIC_BYTES,
    ) -> None:
        self._directory, self._model, self._optimizers = directory, model, optimizers
        self._notify, self._periodic_bytes = notify, periodic_bytes
        self._periodic = True
        self._kept: list[_Snapshot] = []
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradtracer-snapshots")
        self._last_periodic = -float("inf")
        self._cost_s = 0.0

    def list(self) -> list[SnapshotInfo]:
        """All that can be restored, oldest first."""
        return [s.info for s in self._kept]

    def take_if_due(self, step: int, *, healthy: bool) -> None:
        """Take a periodic snapshot, at most every second and for at most 0.5 % of the time; only of a healthy run."""
        now = time.monotonic()
        if (
            self._periodic
            and healthy
            and now - self._last_periodic >= max(_MIN_INTERVAL_S, self._cost_s / _SHARE_OF_TIME)
        ):
            size = self._num_bytes()
            if size > self._periodic_bytes:
                self._periodic = False
                self._notify(
                    f"No periodic snapshots: model and optimizer take {size / 2**30:.2f} GiB, more than the "
                    f"{self._periodic_bytes / 2**30:.2f} GiB allowed. A checkpoint can be asked for, and every "
                    "intervention saves one first."
                )
                return
            self.take(step, healthy=True, periodic=True)
            self._last_periodic = time.monotonic()
            self._cost_s = self._last_periodic - now

    def take(self, step: int, *, healthy: bool, periodic: bool = False) -> SnapshotInfo | None:
        """Take a snapshot of the state after `step`.

        Args:
            step: The last finished step.
            healthy: Whether nothing was wrong then, as far as is known.
            periodic: Whether it may be thrown away for the next one.

        Returns:
            None where the state holds a non-finite number: such a state is never saved.
        """
        if not self._is_finite():
            return None
        existing = next((s for s in self._kept if s.info.step == step), None)
        if existing is not None:
            existing.periodic &= periodic
            return existing.info
        name = f"step-{step}"
        state = {"step": step, **self._state()}
        path = self._directory / f"{name}.pt"
        snapshot = _Snapshot(
            SnapshotInfo(name, step, healthy), periodic, path, self._writer.submit(_write, path, state)
        )
        self._kept.append(snapshot)
        self._drop_oldest(periodic, _MAX_PERIODIC if periodic else _MAX_ASKED_FOR)
        return snapshot.info

    def path(self, name: str) -> Path:
        """The file of a snapshot, once it is written.

        Raises:
            BadParameter: If there is none of this name.
            OSError: If writing it failed.
        """
        snapshot = next((s for s in self._kept if s.info.name == name), None)
        if snapshot is None:
            kept = ", ".join(s.info.name for s in self._kept) or "none yet"
            raise BadParameter(f"no snapshot {name[:80]!r}; there are: {kept}")
        snapshot.writing.result()
        return snapshot.path

    def restore(self, name: str) -> int:
        """Put everything back to a snapshot, in place.

        Returns:
            The step of the snapshot.

        Raises:
            BadParameter: If there is no such snapshot.
            OSError: If it cannot be read; then nothing was changed.
        """
        state = torch.load(self.path(name), map_location="cpu", weights_only=True)
        with torch.no_grad():
            for own, saved in zip(_tensors(self._model), state["tensors"], strict=True):
                own.copy_(saved)
            for parameter in self._model.parameters():
                parameter.grad = None  # of the state that is gone
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=False):
            optimizer.load_state_dict(saved)
        for optimizer in self._optimizers[len(state["optimizers"]) :]:
            optimizer.state.clear()  # it had not stepped yet
        _set_random_state(state["random"])
        return int(state["step"])

    def close(self) -> None:
        """Finish writing."""
        self._writer.shutdown(wait=True)

    def _state(self) -> dict[str, Any]:
        return {
            "tensors": [t.detach().to("cpu", copy=True) for t in _tensors(self._model)],
            "names": [n for n, _ in (*self._model.named_parameters(), *self._model.named_buffers())],
            "optimizers": [_to_cpu(copy.deepcopy(o.state_dict())) for o in self._optimizers],
            "random": _random_state(),
        }

    def _num_bytes(self) -> int:
        state = (v for o in self._optimizers for s in o.state.values() for v in s.values())
        tensors = [*_tensors(self._model), *(v for v in state if isinstance(v, torch.Tensor))]
        return sum(t.numel() * t.element_size() for t in tensors)

    def _is_finite(self) -> bool:
        with torch.no_grad():
            floating = [t.detach() for t in _tensors(self._model) if t.is_floating_point()]
            # A sum is finite only where every element is (an overflow errs on the careful side).
            return all(bool(torch.isfinite(t.sum(dtype=torch.float64))) for t in floating)

    def _drop_oldest(self, periodic: bool, keep: int) -> None:
        same = [s for s in self._kept if s.periodic == periodic]
        for old in same[: max(0, len(same) - keep)]:
            self._kept.remove(old)
            self._writer.submit(_remove, old.path)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _write(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        torch.save(state, file)
    os.replace(temporary, path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {k: _to_cpu(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_to_cpu(v) for v in value]
    return value


def _random_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        import numpy as np  # the user may not use it; its global state matters only where somebody imported it

        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state["numpy"] = [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached]
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        import numpy as np

        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
