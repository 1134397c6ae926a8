"""Draws the weights of a layer anew, by what follows the layer, from a generator of its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

SCHEMES = ("auto", "kaiming", "xavier", "orthogonal")

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_GAINS = {"tanh": 5 / 3, "tanh_": 5 / 3, "sigmoid": 4.0, "sigmoid_": 4.0}
"""With Glorot's law. Sigmoid: its slope is a quarter of that of tanh at 0."""
_LINEAR = ("none", "softmax", "log_softmax", "logsigmoid")


def can_initialise(module: nn.Module) -> bool:
    """Whether `initialise` knows the module, and one of its parameters is trained."""
    known = (nn.Linear, nn.Bilinear, nn.Embedding, nn.MultiheadAttention, *_CONVOLUTIONS, *_NORMS, *_RECURRENT)
    return isinstance(module, known) and any(p.requires_grad for p in module.parameters(recurse=False))


def initialise(module: nn.Module, activation: str, scheme: str, generator: torch.Generator) -> None:
    """Draw weights of one module; biases become 0, scales of normalisations 1 and their running statistics as new.

    Args:
        module: One that `can_initialise`.
        activation: The function that takes its output, as torch calls it; ``"none"`` where there is none.
        scheme: One of `SCHEMES`.
        generator: Where the random numbers come from, on the CPU.
    """
    with torch.no_grad():
        if isinstance(module, _NORMS):
            module.reset_parameters()  # draws no random number
            return
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            if isinstance(module, _RECURRENT):
                value = _recurrent(module, name, parameter, generator)
            elif parameter.dim() < 2 or "bias" in name:
                value = torch.zeros(parameter.shape)
            elif isinstance(module, nn.Embedding):
                value = torch.randn(parameter.shape, generator=generator)
                if module.padding_idx is not None:
                    value[module.padding_idx] = 0
            else:
                transposed = bool(getattr(module, "transposed", False))
                value = _matrix(parameter.shape, activation, scheme, transposed, generator)
            parameter.copy_(value)


def _matrix(shape: torch.Size, activation: str, scheme: str, transposed: bool, generator: torch.Generator) -> Tensor:
    kernel = math.prod(shape[2:])
    fan_out, fan_in = shape[0] * kernel, shape[1] * kernel
    if transposed:
        fan_out, fan_in = fan_in, fan_out
    if scheme == "orthogonal":
        gain = 1.0 if activation in _LINEAR else _GAINS.get(activation, math.sqrt(2.0))
        return gain * orthogonal(shape[0], math.prod(shape[1:]), generator).reshape(shape)
    if scheme == "xavier" or (scheme == "auto" and activation in _GAINS):
        deviation = _GAINS.get(activation, 1.0) * math.sqrt(2.0 / (fan_in + fan_out))
    else:
        gain = 1.0 if activation in _LINEAR else math.sqrt(2.0)
        deviation = gain / math.sqrt(fan_in)
    return deviation * torch.randn(shape, generator=generator)


def orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A matrix with orthonormal rows or columns, whichever are fewer, ``[rows, columns]``."""
    drawn = torch.randn(max(rows, columns), min(rows, columns), generator=generator)
    q, r = torch.linalg.qr(drawn)
    q = q * r.diagonal().sign()
    return q if rows >= columns else q.T


def _recurrent(module: nn.Module, name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    size = int(module.hidden_size)  # type: ignore[arg-type]
    num_gates = parameter.shape[0] // size
    if parameter.dim() < 2:
        value = torch.zeros(parameter.shape)
        if num_gates == 4 and "bias_ih" in name:
            value[size : 2 * size] = 1.0  # the forget gate begins open
        return value
    if "weight_hh" in name and parameter.shape[1] == size:
        if num_gates == 1 and getattr(module, "nonlinearity", "tanh") == "relu":
            return torch.eye(size)
        return torch.cat([orthogonal(size, size, generator) for _ in range(num_gates)])
    deviation = math.sqrt(2.0 / (size + parameter.shape[1]))
    return deviation * torch.randn(parameter.shape, generator=generator)
