"""Where an operation makes a number that is not finite out of finite ones, in its result or in its gradient.

Autograd nodes keep what their gradient needs, so the operation's input or result can be read before backward frees it.
Each rule names the fault, and counts the elements at which it struck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtracer.training.graph import operation_of, producer_of, saved, shape_of

LOG, DIVISION, EMPTY, SUM_OVER_ZERO = "log_of_zero", "division_by_zero", "empty_mean", "sum_over_zero"
SQRT, POW, WHERE = "nan_gradient_sqrt", "nan_gradient_pow", "nan_gradient_where"
CTC, ATTENTION, VARIANCE = "ctc_infinite", "attention_fully_masked", "unbounded_variance"
OVERFLOW, DOMAIN = "overflow", "outside_domain"


@dataclass(frozen=True)
class Singularity:
    """A node at a point where it is not finite."""

    fault: str
    node: Any
    count: int
    total: int
    in_result: bool
    """Whether the result is not finite; else only the gradient."""
    detail: str
    where: Tensor | None = None
    """Which elements, where that is known."""


Read = Callable[[str], Any]
"""Reads what the node keeps under a name."""


def _tensor(value: Any) -> Tensor | None:
    return value.detach() if isinstance(value, Tensor) else None


def _any(node: Any, fault: str, mask: Tensor | None, in_result: bool, what: str) -> Singularity | None:
    if mask is None:
        return None
    count = int(mask.sum())
    if not count:
        return None
    detail = f"{node.name()} received {count} of {mask.numel()} values {what}."
    return Singularity(fault, node, count, mask.numel(), in_result, detail, mask)


def _log(node: Any, read: Read) -> Singularity | None:
    x = _tensor(read("self"))
    bound = -1.0 if operation_of(node) == "Log1P" else 0.0
    mask = None if x is None else x <= bound
    return _any(node, LOG, mask, True, f"at or below {bound:g}, where the logarithm is not finite")


def _logit(node: Any, read: Read) -> Singularity | None:
    x = _tensor(read("self"))
    return _any(node, LOG, None if x is None else (x <= 0) | (x >= 1), True, "at 0 or 1, where the logit is infinite")


def _div(node: Any, read: Read) -> Singularity | None:
    kept = read("other")
    other = _tensor(kept)
    if other is None:
        return None
    mask = other == 0
    fault, what = DIVISION, "equal to 0 to divide by"
    numerator = node.next_functions[0][0] if node.next_functions else None
    numerator = producer_of(numerator) if numerator is not None else None
    is_constant = len(node.next_functions) < 2 or node.next_functions[1][0] is None
    if numerator is not None and operation_of(numerator) in ("Sum", "Nansum") and is_constant:
        fault, what = SUM_OVER_ZERO, "equal to 0 to divide a sum by: a mean over nothing"
    elif not is_constant and is_predicted_scale(node.next_functions[1][0]):
        fault, what = VARIANCE, "equal to 0 to divide by: a predicted scale that has collapsed"
    return _any(node, fault, mask, True, what)


def _reciprocal(node: Any, read: Read) -> Singularity | None:
    result = _tensor(read("result"))
    return _any(node, DIVISION, None if result is None else torch.isinf(result), True, "equal to 0 to divide by")


def _sqrt(node: Any, read: Read) -> Singularity | None:
    result = _tensor(read("result"))
    if result is None:
        return None
    if found := _any(node, SQRT, torch.isnan(result), True, "below 0, which have no root"):
        return found
    return _any(node, SQRT, result == 0, False, "equal to 0, where the slope of the root is infinite")


def _pow(node: Any, read: Read) -> Singularity | None:
    base, exponent = read("self"), read("exponent")
    if not isinstance(base, Tensor):
        return None
    base = base.detach()
    if isinstance(exponent, Tensor):
        exponent = exponent.detach()
        below_one, negative = (exponent < 1) & (exponent > 0), exponent < 0
        fraction = exponent != exponent.round()
    else:
        try:
            value = float(exponent)
        except (TypeError, ValueError):
            return None
        below_one, negative, fraction = 0 < value < 1, value < 0, value != round(value)
    if found := _any(node, DIVISION, (base == 0) & negative, True, "equal to 0 as the base of a negative power"):
        return found
    if found := _any(node, POW, (base < 0) & fraction, True, "below 0 as the base of a fractional power"):
        return found
    return _any(node, POW, (base == 0) & below_one, False, "equal to 0 as the base of a power below 1")


def _arc(node: Any, read: Read) -> Singularity | None:
    x = _tensor(read("self"))
    return _any(node, DOMAIN, None if x is None else x.abs() >= 1, False, "at or beyond 1, where the slope is infinite")


def _atan2(node: Any, read: Read) -> Singularity | None:
    y, x = _tensor(read("self")), _tensor(read("other"))
    mask = None if y is None or x is None else (y == 0) & (x == 0)
    return _any(node, DOMAIN, mask, False, "at the origin, where the angle has no slope")


def _exp(node: Any, read: Read) -> Singularity | None:
    result = _tensor(read("result"))
    mask = None if result is None else torch.isinf(result)
    return _any(node, OVERFLOW, mask, True, "whose exponential overflows")


def _nll(node: Any, read: Read) -> Singularity | None:
    total, target = _tensor(read("total_weight")), _tensor(read("target"))
    if read("reduction") != 1 or total is None or target is None or float(total) != 0.0:
        return None
    detail = f"All {target.numel()} targets are ignored (or weigh 0), so the loss is a mean over nothing."
    return Singularity(EMPTY, node, target.numel(), target.numel(), True, detail)


def _mean(node: Any, read: Read) -> Singularity | None:
    sizes = read("self_sym_sizes")
    dim = read("dim")
    if sizes is None:
        return None
    shape = tuple(int(s) for s in sizes)
    axes = range(len(shape)) if dim is None else [_axis(d, len(shape)) for d in dim]
    empty = any(shape[a] == 0 for a in axes if a < len(shape))
    # A mean over no element of an empty batch has no result either; it is not finite only if it has one.
    if not empty or 0 in (shape_of(node) or ()):
        return None
    return Singularity(EMPTY, node, 1, 1, True, f"{node.name()} took the mean of no elements (shape {list(shape)}).")


def _spread(node: Any, read: Read) -> Singularity | None:
    x, correction, dim = _tensor(read("self")), read("correction"), read("dim")
    if x is None:
        return None
    axes = range(x.dim()) if not dim else [_axis(d, x.dim()) for d in dim]
    count = 1
    for a in axes:
        count *= x.shape[a]
    if count - (1 if correction is None else float(correction)) > 0:
        return None
    detail = f"{node.name()} took the spread of {count} element, which has none (n - 1 = 0)."
    return Singularity(EMPTY, node, 1, 1, True, detail)


def _loss_of_nothing(node: Any, read: Read) -> Singularity | None:
    x = _tensor(read("self"))
    if x is None or x.numel() or read("reduction") != 1:
        return None
    return Singularity(EMPTY, node, 1, 1, True, f"{node.name()} took the mean over no elements.")


def _ctc(node: Any, read: Read) -> Singularity | None:
    result = _tensor(read("result0"))
    if result is None or read("zero_infinity"):
        return None
    count = int(torch.isinf(result).sum())
    if not count:
        return None
    detail = f"{count} of {result.numel()} samples have no alignment: their input is shorter than their target needs."
    return Singularity(CTC, node, count, result.numel(), True, detail)


def _softmax(node: Any, read: Read) -> Singularity | None:
    result, dim = _tensor(read("result")), read("dim")
    if result is None or result.dim() == 0 or not isinstance(dim, int):
        return None
    rows = torch.isnan(result).all(dim=_axis(dim, result.dim()))
    count = int(rows.sum())
    if not count or (count == rows.numel() and result.shape[0] > 1 and not is_masked(node)):
        return None
    if not is_masked(node):
        detail = f"{count} of {rows.numel()} rows of {node.name()} are NaN: an infinite score came in."
        return Singularity(OVERFLOW, node, count, rows.numel(), True, detail)
    detail = f"{count} of {rows.numel()} rows of the attention have every key masked: a softmax of only -inf is NaN."
    return Singularity(ATTENTION, node, count, rows.numel(), True, detail)


def _fused_attention(node: Any, read: Read) -> Singularity | None:
    mask, output = _tensor(read("attn_mask")), _tensor(read("output"))
    if mask is None or output is None:
        return None
    closed = ~mask if mask.dtype == torch.bool else torch.isneginf(mask)
    rows = closed.all(dim=-1)
    count = int(rows.sum())
    if not count or not torch.isnan(output).any():
        return None
    detail = f"{count} of {rows.numel()} rows of the attention mask leave no key."
    return Singularity(ATTENTION, node, count, rows.numel(), True, detail)


RULES: dict[str, Callable[[Any, Read], Singularity | None]] = {
    **dict.fromkeys(("Log", "Log2", "Log10", "Log1P"), _log),
    "Logit": _logit,
    "Div": _div,
    "Reciprocal": _reciprocal,
    "Rsqrt": _reciprocal,
    "Sqrt": _sqrt,
    "Pow": _pow,
    **dict.fromkeys(("Acos", "Asin"), _arc),
    "Atan2": _atan2,
    **dict.fromkeys(("Exp", "Exp2", "Expm1"), _exp),
    **dict.fromkeys(("NllLoss", "NllLoss2D", "NllLossNd"), _nll),
    "Mean": _mean,
    **dict.fromkeys(("Std", "Var", "StdMean", "VarMean"), _spread),
    **dict.fromkeys(
        ("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"), _loss_of_nothing
    ),
    **dict.fromkeys(("CtcLoss", "CudnnCtcLoss"), _ctc),
    "Softmax": _softmax,
    **dict.fromkeys(
        (
            "ScaledDotProductFlashAttentionForCpu",
            "ScaledDotProductEfficientAttention",
            "ScaledDotProductCudnnAttention",
        ),
        _fused_attention,
    ),
}
"""By operation: tells where it is singular."""

KEPT: dict[str, tuple[str, ...]] = {
    "Sqrt": ("result",),
    "Pow": ("self", "exponent"),
    "Acos": ("self",),
    "Asin": ("self",),
    "Atan2": ("self", "other"),
    "Log": ("self",),
    "Log2": ("self",),
    "Log10": ("self",),
    "Log1P": ("self",),
    "Div": ("other",),
    "Reciprocal": ("result",),
    "Rsqrt": ("result",),
    "Exp": ("result",),
    "Where": ("condition",),
    "Clamp": ("min",),
    "ClampMin": ("min",),
    "ClampMax": ("max",),
    "Softmax": ("result", "dim"),
    "NllLoss": ("total_weight", "target", "reduction"),
    "CtcLoss": ("result0", "zero_infinity"),
    "CudnnCtcLoss": ("result0", "zero_infinity"),
    "Mean": ("self_sym_sizes", "dim"),
    **dict.fromkeys(("Std", "Var", "StdMean", "VarMean"), ("self", "correction", "dim")),
    **dict.fromkeys(
        ("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
        ("self", "target", "reduction"),
    ),
    "Abs": ("self",),
    "Addmm": ("mat1",),
    "Convolution": ("input",),
}
"""What to keep of a node until the gradient is known to be finite."""


def singularity(node: Any, read: Read | None = None) -> Singularity | None:
    """Whether a node stands where it is not finite.

    Args:
        node: A node of the graph.
        read: Reads what the node keeps; from the node itself by default.
    """
    rule = RULES.get(operation_of(node))
    if rule is None:
        return None
    with torch.no_grad():
        return rule(node, read or (lambda name: saved(node, name)))


def is_masked(node: Any) -> bool:
    """Whether a mask went into the node's input: a filled, selected or added constant within two operations."""
    waiting = [(child, 0) for child, _ in node.next_functions if child is not None]
    while waiting:
        child, depth = waiting.pop()
        operation = operation_of(child)
        if operation in ("MaskedFill", "Where", "Baddbmm", "IndexPut", "MaskedScatter"):
            return True
        if operation == "Add" and any(n is None for n, _ in child.next_functions):
            return True
        if depth < 2 and operation not in ("Bmm", "Mm", "Addmm"):
            waiting.extend((n, depth + 1) for n, _ in child.next_functions if n is not None)
    return False


def is_predicted_scale(node: Any) -> bool:
    """Whether a divisor is a positive function of a prediction: exp, softplus or square, perhaps with a factor."""
    for _ in range(6):
        if node is None:
            return False
        operation = operation_of(node)
        if operation in ("Exp", "Exp2", "Softplus"):
            return True
        if operation == "Pow":
            below = producer_of(node.next_functions[0][0])
            return below is not None and operation_of(below) in ("Exp", "Softplus")
        if operation not in (
            "Mul",
            "Add",
            "Expand",
            "Clone",
            "Squeeze",
            "Unsqueeze",
            "View",
            "Select",
            "Slice",
            "Sqrt",
        ):
            return False
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return False


def _axis(dim: int, num_dims: int) -> int:
    # Saved axes are unsigned: -1 comes as 2**64 - 1.
    if dim >= 1 << 63:
        dim -= 1 << 64
    return dim + num_dims if dim < 0 else dim
