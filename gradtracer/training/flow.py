"""Follows what layers put out through a forward pass: which activation takes it, and which layers come next.

It sees calls of torch's functions, so an activation counts whether it is a module or a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from gradtracer.records import clean_name
from gradtracer.training.layers import ROOT

RECTIFIERS = frozenset({"relu", "relu_", "relu6"})
_ACTIVATIONS = RECTIFIERS | {
    "leaky_relu", "leaky_relu_", "prelu", "elu", "celu", "selu", "gelu", "silu", "mish", "softplus", "hardswish",
    "hardtanh", "hardsigmoid", "tanh", "tanh_", "sigmoid", "sigmoid_", "softsign", "softmax", "log_softmax",
    "logsigmoid", "glu",
}  # fmt: skip
_LAYERS = frozenset({"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"})
_PRODUCTS = frozenset({"matmul", "__matmul__", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention"})
_HANDING_ON = frozenset(
    {
        "batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "dropout", "dropout_", "dropout1d",
        "dropout2d", "dropout3d", "alpha_dropout", "flatten", "reshape", "view", "contiguous", "to", "float", "clone",
        "squeeze", "unsqueeze", "transpose", "permute", "swapaxes", "mT",
    }
)  # fmt: skip

OnActivation = Callable[[str, str, Tensor, str], None]
"""Told of a layer, the function that takes its output, what that function receives, and the innermost module."""


@dataclass
class Flow:
    """What was seen, by names of layers."""

    activation: dict[str, str] = field(default_factory=dict)
    """The first activation function that takes a layer's output; layers without one are left out."""
    next_layers: dict[str, list[str]] = field(default_factory=dict)
    """Layers that receive the output, through its activation, normalisation and reshaping."""
    order: list[str] = field(default_factory=list)
    """Layers in the order in which they ran."""
    products: list[tuple[str, str]] = field(default_factory=list)
    """Layers whose outputs were multiplied with each other as matrices, without an activation: queries and keys."""
    callers: dict[str, set[str]] = field(default_factory=dict)
    """By activation function, the innermost modules in whose forward pass it was called."""


@contextmanager
def reading_flow(model: nn.Module, on_activation: OnActivation | None = None) -> Iterator[Flow]:
    """Read every forward pass inside the block."""
    running: list[str] = []
    names = {id(module): clean_name(path) or ROOT for path, module in model.named_modules()}
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda m, _: running.append(names[id(m)])))
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None, always_call=True))
    flow = Flow()
    try:
        with _Reader(model, flow, running, on_activation):
            yield flow
    finally:
        for handle in handles:
            handle.remove()


class _Reader(TorchFunctionMode):
    def __init__(self, model: nn.Module, flow: Flow, running: list[str], on_activation: OnActivation | None) -> None:
        super().__init__()
        self._flow, self._running, self._on_activation = flow, running, on_activation
        self._layer_of = {
            id(p): clean_name(path) or ROOT
            for path, module in model.named_modules()
            for p in module.parameters(recurse=False)
            if p.dim() > 1
        }
        self._made: Any = WeakIdKeyDictionary()
        """For a tensor: the layer whose output it is, and whether an activation has taken it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        given = args[0] if args and isinstance(args[0], Tensor) else (kwargs or {}).get("input")
        source = self._made.get(given) if isinstance(given, Tensor) else None
        if name in _ACTIVATIONS and given is not None:
            caller = self._running[-1] if self._running else ""
            self._flow.callers.setdefault(name, set()).add(caller)
            if source is not None and not source[1]:
                self._flow.activation.setdefault(source[0], name)
                if self._on_activation is not None:
                    with torch._C.DisableTorchFunction():
                        self._on_activation(source[0], name, given, caller)
        if name in _PRODUCTS:
            self._note_product(args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        if name in _LAYERS:
            weight = args[1] if len(args) > 1 else (kwargs or {}).get("weight")
            layer = self._layer_of.get(id(weight))
            if layer is not None:
                if source is not None and layer not in self._flow.next_layers.setdefault(source[0], []):
                    self._flow.next_layers[source[0]].append(layer)
                if layer not in self._flow.order:
                    self._flow.order.append(layer)
                self._made[result] = (layer, False)
        elif source is not None and (name in _ACTIVATIONS or name in _HANDING_ON or "pool" in name):
            self._made[result] = (source[0], source[1] or name in _ACTIVATIONS)
        return result

    def _note_product(self, args: Any, kwargs: dict[str, Any]) -> None:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)][:2]
        sources = [self._made.get(t) for t in tensors]
        if len(sources) == 2 and all(s is not None and not s[1] for s in sources):
            self._flow.products.append((sources[0][0], sources[1][0]))


def by_unit(values: Tensor) -> Tensor:
    """``[n, units]`` of what a layer puts out: units are the second axis of images and signals, else the last."""
    values = values.detach().float()
    if values.dim() > 3:
        return values.movedim(1, -1).flatten(0, -2)
    return values.flatten(0, -2) if values.dim() > 1 else values[:, None]
