"""Statistics of tensors: small functions that leave their inputs and the random state alone.

All run under ``torch.no_grad`` and return tensors on the input's device, so that a GPU is not waited for.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_SAMPLE = 4_096
MAX_SAMPLE = 65_536
_SHARE = 32
"""A strided sample takes 1/32 of a tensor, within the two bounds: about 3 % of the model's memory, and a relative
standard error of a norm of about sqrt(1/2n), 1 % at 4,096 elements."""

MAX_ACTIVATIONS = 65_536
_RANK_ROWS, _RANK_FEATURES = 64, 256


def strided_sample(tensor: Tensor) -> Tensor:
    """Evenly spaced elements of a dense tensor as a 1-d view, all of them up to `MIN_SAMPLE`.

    Elements come in memory order, so that two tensors of one layout are sampled at the same places.
    """
    numel = tensor.numel()
    count = min(max(numel // _SHARE, MIN_SAMPLE), MAX_SAMPLE)
    stride = max(1, numel // count)
    flat = tensor.detach()
    if flat.is_contiguous():
        flat = flat.view(-1)
    elif _is_dense(flat):
        flat = flat.as_strided((numel,), (1,))
    else:
        flat = flat.reshape(-1)
    return flat[::stride] if stride > 1 else flat


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor fills one block of memory, in any order of axes (channels_last, transposed)."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda x: x[1]):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def gradient_values(gradient: Tensor) -> Tensor:
    """The gradient as a dense tensor: for a sparse one the values of its coalesced rows, whose norm is the same."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def norms(tensors: list[Tensor]) -> Tensor:
    """Euclidean norms, float32 or float64, `[len(tensors)]`, on the first tensor's device.

    Half-precision tensors are summed in float32: the norm of a half tensor overflows at 65,504.
    """
    half = any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors)
    foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
    found = foreach_norm(tensors, 2, torch.float32) if half else foreach_norm(tensors)
    first = found[0]
    if any(n.device != first.device or n.dtype != first.dtype for n in found):
        found = [n.to(first.device, torch.float64) for n in found]
    return torch.stack(found)


def mean(tensor: Tensor) -> Tensor:
    """Mean, summed in float32 at least; 0 of no elements (a rank's part of a small tensor may be empty)."""
    if tensor.numel() == 0:
        return tensor.sum(dtype=torch.float32)
    return tensor.mean(dtype=torch.float32) if tensor.element_size() < 4 else tensor.mean()


def exact_norm(tensor: Tensor) -> float:
    """Norm in float64: finite wherever all elements are, unlike a float32 sum of squares above 1e19."""
    return float(torch.linalg.vector_norm(tensor.detach().double()))


def zero_row_fraction(gradient: Tensor) -> Tensor:
    """Share of rows (output units) that are exactly zero, scalar; `gradient` is `[units, ...]`."""
    return (gradient.flatten(1).abs().amax(dim=1) == 0).float().mean()


def activation_sample(output: Tensor) -> Tensor:
    """The first rows of a layer's output, about `MAX_ACTIVATIONS` elements, detached; `[rows, ...]`."""
    rows = output.detach()
    if rows.dim() > 1 and rows.numel() > MAX_ACTIVATIONS:
        per_row = rows.numel() // rows.shape[0]
        rows = rows[: max(1, MAX_ACTIVATIONS // max(per_row, 1))]
    return rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows


def participation_ratio(rows: Tensor) -> Tensor:
    """Effective rank (tr C)^2 / tr(C^2) of the covariance C of `rows`, scalar in [1, min(rows - 1, features)].

    It is the number of directions that carry the variance, if they carried it evenly (Gao et al. 2017, "A theory of
    multineuronal dimensionality", eq. 1). Computed on the Gram matrix of at most 64 rows and 256 evenly spaced
    features, with which C shares its non-zero eigenvalues; so the value is bounded by those sizes.

    Args:
        rows: `[rows, features]`.
    """
    x = rows[:_RANK_ROWS]
    if x.shape[1] > _RANK_FEATURES:
        x = x[:, :: x.shape[1] // _RANK_FEATURES]
    x = x - x.mean(dim=0)
    gram = x @ x.T
    return gram.diagonal().sum().square() / gram.square().sum()


def feature_rows(output: Tensor, feature_dim: int) -> Tensor:
    """A layer's output as `[rows, features]`: every position of every example is a row."""
    return output.movedim(feature_dim, -1).flatten(0, -2) if output.dim() > 1 else output[None]
