"""What layers put out during one forward pass, read by a hook that exists only while a sampled step is awaited."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from gradtracer.training import statistics
from gradtracer.training.sharding import is_sharded

_HOOKS_TAKE_KWARGS: dict[str, bool] = (
    {"with_kwargs": True} if "with_kwargs" in inspect.signature(register_module_forward_hook).parameters else {}
)

RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.Threshold)
_BOUNDED = (nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid)
_CHANNELS_FIRST = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
)

DEAD_AFTER_ROWS = 256
"""Rows in a row without output before a unit counts as dead: a unit that answers to a share p of rows passes 256 of
them unseen with probability (1 - p)^256, so a unit called dead answers to less than 1.2 % at 95 % confidence."""

MAX_CALLS = 4
"""Calls of one module within a forward pass that are read; a module used more often (an unrolled cell) is sampled."""


@dataclass
class ForwardPass:
    """What was read: per layer a row of scalars on the device, in forward order."""

    scalars: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    fed_by: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    producers: dict[int, tuple[str, Tensor, int]] = field(default_factory=dict)
    """For each output of a watched module: its name, the tensor (kept so that its id stays its own), feature axis."""
    num_calls: dict[str, int] = field(default_factory=dict)

    def joined_with(self, later: ForwardPass) -> ForwardPass:
        """Both passes as one; where a layer ran in both, the first counts."""
        return ForwardPass(
            {**self.scalars, **later.scalars, **self.scalars},
            {**later.fed_by, **self.fed_by},
            {**later.types, **self.types},
        )


class ActivationCapture:
    """Reads activations of the next forward pass with gradients in the thread that armed it.

    Args:
        names: Names of the modules to read, by id.
        model: The model itself, whose calls are reported too, under the empty name if it is not among `names`.
        report: Told of every such call: name, module, inputs, output.
    """

    def __init__(
        self, names: dict[int, str], model: nn.Module, report: Callable[[str, nn.Module, Any, Any], None]
    ) -> None:
        self._names = names
        self._model, self._report = model, report
        self._handle: Any = None
        self._thread = 0
        self._pass = ForwardPass()
        self._rows_since_active: dict[str, Tensor] = {}
        self.kwargs: dict[str, Any] | None = None
        """Keyword arguments of the call that is being reported; None where this torch does not tell them."""
        self._armed_s = 0.0
        self.first_call_s: float | None = None
        """When the first layer of any model ran since reading began, with or without gradients."""
        self.silent: dict[int, tuple[str, Tensor]] = {}
        """By storage address: outputs of modules in training mode that ran while gradients were off."""
        self.in_backward = False
        """Set while backward runs: a checkpointed forward is run again there, and is not a new pass."""

    @property
    def armed(self) -> bool:
        """Whether the hook is in place."""
        return self._handle is not None

    @property
    def waited_s(self) -> float | None:
        """Time from the beginning of reading to the first layer that ran; None before that."""
        return None if self.first_call_s is None else self.first_call_s - self._armed_s

    @property
    def computed_s(self) -> float | None:
        """Time since then."""
        return None if self.first_call_s is None else time.perf_counter() - self.first_call_s

    def arm(self) -> None:
        """Read from now until `disarm`."""
        if self._handle is None and self._names:
            self._thread = threading.get_ident()
            self.silent = {}
            self._armed_s, self.first_call_s = time.perf_counter(), None
            hook = self._after_call if _HOOKS_TAKE_KWARGS else self._after_forward
            self._handle = register_module_forward_hook(hook, **_HOOKS_TAKE_KWARGS)

    def disarm(self) -> ForwardPass:
        """Stop reading and hand over what was read."""
        if self._handle is not None:
            self._handle.remove()
            # torch forgets the hook, but not that it took keyword arguments.
            getattr(nn.modules.module, "_global_forward_hooks_with_kwargs", {}).pop(self._handle.id, None)
            self._handle = None
        self.kwargs = None
        done, self._pass = self._pass, ForwardPass()
        done.producers.clear()
        return done

    def _after_call(self, module: nn.Module, inputs: Any, kwargs: dict[str, Any], output: Any) -> None:
        self.kwargs = kwargs
        self._after_forward(module, inputs, output)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if self.first_call_s is None and threading.get_ident() == self._thread:
            self.first_call_s = time.perf_counter()
        if not torch.is_grad_enabled() and name is not None and module.training and self._is_ours():
            tensor = first_tensor(output)
            if tensor is not None:
                self.silent[tensor.untyped_storage().data_ptr()] = (name, tensor)
            return
        if (name is None and module is not self._model) or not torch.is_grad_enabled() or not self._is_ours():
            return
        with torch.no_grad():
            self._report(name or "", module, inputs, output)
        tensor = first_tensor(output) if name is not None else None
        if tensor is None or not tensor.is_floating_point() or tensor.numel() == 0 or tensor.dim() == 0:
            return
        assert name is not None
        calls = self._pass.num_calls.get(name, 0) + 1
        self._pass.num_calls[name] = calls
        if calls > MAX_CALLS:
            return
        key = name if calls == 1 else f"{name}#{calls}"
        with torch.no_grad():
            self._read(key, module, first_tensor(inputs), tensor)

    def _is_ours(self) -> bool:
        """Whether this is a forward pass of the training thread, and no other kind of run."""
        return not (
            self.in_backward
            or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
            or torch.compiler.is_compiling()
            or threading.get_ident() != self._thread
        )

    def _read(self, key: str, module: nn.Module, fed: Tensor | None, output: Tensor) -> None:
        feeder = self._producer(fed)
        feature_dim = -1
        if isinstance(module, _CHANNELS_FIRST) or output.dim() == 4:
            feature_dim = 1
        elif feeder is not None and next(module.parameters(recurse=False), None) is None:
            feature_dim = feeder[2]
        if output.dim() <= abs(feature_dim):
            feature_dim = -1
        done = self._pass
        done.producers[id(output)] = (key, output, feature_dim)
        done.types[key] = type(module).__name__
        if feeder is not None and feeder[0] != key:
            done.fed_by[key] = feeder[0]
        sample = statistics.activation_sample(output)
        scalars: dict[str, Tensor] = {
            # Over the whole output, so that one non-finite element anywhere shows in it.
            "activation_mean": output.detach().mean(dtype=torch.float32 if output.element_size() < 4 else None),
            "activation_std": sample.std(unbiased=False),
        }
        rows = statistics.feature_rows(sample, feature_dim)
        if isinstance(module, RECTIFIERS):
            scalars["activation_zero_fraction"] = (sample == 0).float().mean()
            scalars["dead_unit_fraction"] = self._dead_fraction(key, rows)
        elif isinstance(module, _BOUNDED):
            # Both bounds of tanh are 1 in magnitude; of sigmoid they are 0 and 1.
            low = -1.0 if isinstance(module, (nn.Tanh, nn.Hardtanh)) else 0.0
            width = 0.01 * (1.0 - low)
            scalars["saturated_fraction"] = ((sample < low + width) | (sample > 1.0 - width)).float().mean()
        if next(module.parameters(recurse=False), None) is not None and min(rows.shape) > 1:
            scalars["effective_rank"] = statistics.participation_ratio(rows)
        done.scalars[key] = scalars

    def _producer(self, tensor: Tensor | None) -> tuple[str, Tensor, int] | None:
        if tensor is None:
            return None
        found = self._pass.producers.get(id(tensor))
        if found is None and tensor._base is not None:
            found = self._pass.producers.get(id(tensor._base))
        return found

    def _dead_fraction(self, key: str, rows: Tensor) -> Tensor:
        """Share of units that put out nothing in the last `DEAD_AFTER_ROWS` rows read, scalar."""
        active = (rows != 0).any(dim=0)
        since = self._rows_since_active.get(key)
        if since is None or since.shape != active.shape or since.device != active.device:
            since = torch.zeros_like(active, dtype=torch.int64)
        since = torch.where(active, 0, since + rows.shape[0])
        self._rows_since_active[key] = since
        return (since >= DEAD_AFTER_ROWS).float().mean()


def first_tensor(values: Any) -> Tensor | None:
    """The tensor, or the first one of a collection; None where there is none. One that is sharded is left alone."""
    if isinstance(values, Tensor):
        return None if is_sharded(values) else values
    if isinstance(values, dict):
        values = values.values()
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes)):
        return next((v for v in values if isinstance(v, Tensor) and not is_sharded(v)), None)
    return None
