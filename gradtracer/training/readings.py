"""What is read during one step, and its way from the device to the host.

Numbers stay where they were computed until the step is over; then those of all waiting steps are copied in one piece,
so that a GPU is not waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtracer.signals import MISSING, NON_FINITE
from gradtracer.training.activations import ForwardPass
from gradtracer.training.audits import AuditContext


@dataclass
class OpenStep:
    """What is known of the step under way; tensors are on the model's device."""

    step: int
    sampled: bool
    losses: list[Tensor] = field(default_factory=list)
    updated: list[int] = field(default_factory=list)
    learning_rate: float = MISSING
    index: list[int] = field(default_factory=list)
    """Parameter numbers, in the order of the tensors below."""
    grad_norms: list[Tensor] = field(default_factory=list)
    grad_means: list[Tensor] = field(default_factory=list)
    weight_norms: list[Tensor] = field(default_factory=list)
    updates: list[tuple[list[int], Tensor, Tensor]] = field(default_factory=list)
    """Parameter numbers, sampled ||update||^2 and ||weights||^2 scaled up to the whole tensors."""
    cosines: list[tuple[list[int], Tensor, Tensor]] = field(default_factory=list)
    """Parameter numbers, dot products with the last gradient, products of norms."""
    zero_rows: list[tuple[int, Tensor]] = field(default_factory=list)
    forward: ForwardPass | None = None
    recorded: dict[tuple[str, str], Tensor | float] = field(default_factory=dict)
    """What audits recorded, by (layer, signal)."""
    context: AuditContext | None = None
    time_s: float = 0.0
    step_time_s: float = MISSING
    loss: float | Tensor = MISSING

    def take(self, forward: ForwardPass | None) -> None:
        """Add what a forward pass showed."""
        if forward is not None:
            self.forward = forward if self.forward is None else self.forward.joined_with(forward)

    def join(self, later: OpenStep) -> None:
        """What was taken for the start of the next step belongs to this one."""
        self.losses += later.losses
        self.recorded |= later.recorded
        self.take(later.forward)

    def forget_update(self) -> None:
        """Drop what was read of gradients and updates."""
        for readings in (
            self.updated, self.grad_norms, self.grad_means, self.weight_norms, self.updates, self.cosines,
            self.zero_rows,
        ):  # fmt: skip
            readings.clear()
        self.index = []


@dataclass
class Numbers:
    """The numbers of a step, on the host."""

    loss: float
    grad_norms: np.ndarray
    grad_means: np.ndarray
    weight_norms: np.ndarray
    updates: list[tuple[list[int], np.ndarray, np.ndarray]]
    cosines: list[tuple[list[int], np.ndarray, np.ndarray]]
    zero_rows: list[tuple[int, float]]
    activation_columns: list[tuple[str, str]]
    activations: np.ndarray


class HostCopy:
    """All numbers of some steps, on their way to the host in one piece."""

    def __init__(self, steps: Sequence[OpenStep]) -> None:
        self.steps = list(steps)
        self._tensors: list[Tensor] = [t for step in self.steps for t in _tensors(step)]
        devices = {t.device for t in self._tensors}
        self._event: Any = None
        if not devices or devices == {torch.device("cpu")}:
            self._flat = None
            return
        device = next(d for d in devices if d.type != "cpu")
        with torch.no_grad():
            flat = torch.cat([t.detach().reshape(-1).to(device, torch.float64) for t in self._tensors])
            if device.type == "cuda":
                self._flat = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
                self._flat.copy_(flat, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
            else:
                self._flat = flat.cpu()

    @property
    def arrived(self) -> bool:
        """Whether reading it would wait for nothing."""
        return self._event is None or self._event.query()

    def numbers(self) -> list[Numbers]:
        """The numbers of each step; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        if self._flat is None:
            arrays = [t.detach().reshape(-1).double().numpy() for t in self._tensors]
        else:
            arrays = np.split(self._flat.numpy(), np.cumsum([t.numel() for t in self._tensors])[:-1])
        source = iter(arrays)
        return [_numbers(step, source) for step in self.steps]


def _tensors(step: OpenStep) -> list[Tensor]:
    found: list[Tensor] = [*step.grad_norms, *step.grad_means, *step.weight_norms]
    if isinstance(step.loss, Tensor):
        found.insert(0, step.loss)
    for _, a, b in (*step.updates, *step.cosines):
        found += (a, b)
    found += [value for _, value in step.zero_rows]
    found += [value for value in step.recorded.values() if isinstance(value, Tensor)]
    if step.forward is not None:
        found += [value for row in step.forward.scalars.values() for value in row.values()]
    return found


def _numbers(step: OpenStep, source: Any) -> Numbers:
    def take(parts: Sequence[Tensor]) -> np.ndarray:
        found = [next(source) for _ in parts]
        return np.concatenate(found) if found else np.empty(0)

    loss = float(next(source)[0]) if isinstance(step.loss, Tensor) else step.loss
    if isinstance(step.loss, Tensor) and not math.isfinite(loss):
        loss = NON_FINITE
    norms, means, weights = take(step.grad_norms), take(step.grad_means), take(step.weight_norms)
    updates = [(index, next(source), next(source)) for index, _, _ in step.updates]
    cosines = [(index, next(source), next(source)) for index, _, _ in step.cosines]
    zero_rows = [(number, float(next(source)[0])) for number, _ in step.zero_rows]
    columns: list[tuple[str, str]] = list(step.recorded)
    values = [float(next(source)[0]) if isinstance(v, Tensor) else v for v in step.recorded.values()]
    values = [v if not math.isinf(v) and not math.isnan(v) else NON_FINITE for v in values]
    for layer, row in (step.forward.scalars if step.forward else {}).items():
        for signal in row:
            value = float(next(source)[0])
            columns.append((layer, signal))
            values.append(value if math.isfinite(value) else NON_FINITE)
        columns.append((layer, "num_non_finite_activation"))
        values.append(0.0 if values[-len(row)] != NON_FINITE else 1.0)
    return Numbers(loss, norms, means, weights, updates, cosines, zero_rows, columns, np.asarray(values))
