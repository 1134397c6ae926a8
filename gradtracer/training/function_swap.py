"""Answers calls of certain torch functions by others while a module's forward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

Replacement = Callable[..., Any]
"""Called with the function and its arguments, in place of it."""


class FunctionSwap:
    """Hooks on a module, in place from construction until `remove`; they are copied and saved with the module.

    Args:
        module: While its forward pass runs, modules inside it included, calls are looked at.
        replacements: By the names of torch's functions.
    """

    def __init__(self, module: nn.Module, replacements: Mapping[str, Replacement]) -> None:
        self._before, self._after = _Before(dict(replacements)), _After()
        self._after.before = self._before
        self._handles = [
            module.register_forward_pre_hook(self._before, prepend=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class _Before:
    def __init__(self, replacements: dict[str, Replacement]) -> None:
        self.replacements = replacements
        self.open: list[_Mode] = []

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        self.open.append(_Mode(self.replacements))
        self.open[-1].__enter__()


class _After:
    before: _Before

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.before.open:
            self.before.open.pop().__exit__(None, None, None)


class _Mode(TorchFunctionMode):
    def __init__(self, replacements: dict[str, Replacement]) -> None:
        super().__init__()
        self._replacements = replacements

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = self._replacements.get(getattr(func, "__name__", ""))
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(func, *args, **(kwargs or {}))


@dataclass(frozen=True)
class _LeakyRelu:
    slope: float

    def __call__(self, func: Any, input: Any, inplace: bool = False) -> Any:
        return F.leaky_relu(input, self.slope, inplace=inplace or func.__name__.endswith("_"))


def leaky_relu(slope: float) -> Replacement:
    """`leaky_relu` in place of a rectifier."""
    return _LeakyRelu(slope)


@dataclass(frozen=True)
class _Tempered:
    factor: float

    def __call__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if func.__name__ == "scaled_dot_product_attention":
            query = args[0] if args else kwargs["query"]
            own = kwargs.get("scale")
            scale = query.shape[-1] ** -0.5 if own is None else own
            return func(*args, **{**kwargs, "scale": scale * self.factor})
        if args:
            return func(args[0] * self.factor, *args[1:], **kwargs)
        return func(**{**kwargs, "input": kwargs["input"] * self.factor})


def tempered(factor: float) -> Replacement:
    """A softmax, or an attention, whose logits are multiplied by a factor."""
    return _Tempered(factor)
