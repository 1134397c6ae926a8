"""Values that exceed half precision."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradtracer.records import AuditFinding, Measure
from gradtracer.training.audits._sampling import Later
from gradtracer.training.audits.base import AUDITS, LOSS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph, saved_tensors

_MAX_HALF = 65504.0
_PRODUCTS = frozenset({"MmBackward0", "BmmBackward0", "AddmmBackward0", "MulBackward0", "PowBackward0", "ExpBackward0",
                       "ConvolutionBackward0", "BaddbmmBackward0", "LinearBackward0", "SumBackward0", "SumBackward1",
                       "AddBackward0", "SquareBackward0", "MvBackward0", "DotBackward0"})  # fmt: skip
_MAX_DISTANCE = 8
_MAX_PRODUCTS, _MAX_ELEMENTS = 32, 4_000_000
_NEAR = 0.1
"""Share of the range from which on every step is looked at."""


@AUDITS.register
class HalfOverflow(Audit):
    """Whether a float16 value has left its range, and whether a loss scaler can find a scale at all.

    What:
        Activations above 65,504 under autocast or in a half-precision model, and a GradScaler that goes on halving its
        scale because every step overflows.

    Why:
        The value becomes infinite and the loss with it; under a scaler every update is skipped without a word.

    Definition:
        half_precision_overflow (`warning`): at the first loss that is not finite, a float16 operation put out
        non-finite values of finite inputs; where the operation is a product of kept matrices, only if its result in
        float32 exceeds 65,504. Layer: the last before it.
        loss_scale_collapsed (`warning`): the scale of a GradScaler has fallen below 1.
        Products of batches of float16 matrices (attention logits) are computed again in float32 at sampled steps, and
        at every step once they fill a tenth of the range: an infinite logit leaves the loss finite and its gradient
        not. The scale is recorded as the signal loss_scale.

    Thresholds:
        65,504 is the largest float16 number. A scaler lowers its scale until gradients fit; below 1 it makes them
        smaller than they are, so what overflows is not the scaled gradient.

    Fixes:
        None that is live yet: keep the layer in float32, scale its inputs, or use bfloat16.

    References:
        Micikevicius et al. 2018, arXiv:1710.03740, section 3. IEEE 754-2019, binary16.
    """

    code = "half_overflow"
    every_step = True

    def __init__(self) -> None:
        self._scales: Later[int] = Later()
        self._collapsed = False
        self._overflowed = False
        self._ranges: Later[tuple[int, tuple[str | None, ...]]] = Later()
        self._watching = False
        self._nearest: tuple[float, str | None] = (0.0, None)
        """Largest share of the range that a product filled when last seen, and its layer."""

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Follow the loss scale; look for the origin where the loss is not finite."""
        scale = graph.loss_scale
        if scale is not None:
            if context.sampled:
                context.record(LOSS, "loss_scale", scale.detach().reshape(()))
            self._scales.put(context.step, scale.detach().reshape(()))
            for step, value in self._scales.take():
                if 0 < float(value) < 1.0 and not self._collapsed:
                    self._collapsed = True
                    yield finding(
                        context,
                        "loss_scale_collapsed",
                        f"The loss scale has fallen to {float(value):.3g} at step {step}: every step overflows at any "
                        "scale.",
                        measures=[Measure(name="loss_scale", value=float(value), threshold=1.0)],
                    )
        if context.sampled or self._watching:
            yield from self._watch(context, graph)
        value = graph.unscaled
        if self._overflowed or (value.device.type != "cpu" and not context.sampled) or math.isfinite(float(value)):
            return
        self._overflowed = True
        origin = _overflow(graph)
        if origin is not None:
            node, count = origin
            yield finding(
                context,
                "half_precision_overflow",
                f"{node.name()} put out {count} values beyond the range of float16, which ends at 65504.",
                layer=graph.nearest_layer(node),
                measures=[Measure(name="num_overflowed", value=float(count), threshold=0.0, unit="elements")],
            )

    def _watch(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """How much of the range products of float16 matrices fill; a product may overflow while the loss is finite."""
        found = [
            (graph.nearest_layer(n), a)
            for n in graph.nodes
            if _is_half(n) and (a := _largest_of_product(n)) is not None
        ]
        if found:
            found = found[:_MAX_PRODUCTS]
            self._ranges.put((context.step, tuple(layer for layer, _ in found)), torch.stack([a for _, a in found]))
        for (step, layers), largest in self._ranges.take():
            shares = (largest / _MAX_HALF).tolist()
            self._nearest = max(zip(shares, layers, strict=True), key=lambda pair: pair[0])
            self._watching = self._nearest[0] >= _NEAR
            over = next((i for i, share in enumerate(shares) if share > 1.0), None)
            if over is not None and not self._overflowed:
                self._overflowed = True
                yield finding(
                    context,
                    "half_precision_overflow",
                    f"A product of float16 matrices behind {layers[over]} reaches {shares[over] * _MAX_HALF:.3g} at "
                    f"step {step}; the range of float16 ends at 65504.",
                    layer=layers[over],
                    measures=[Measure(name="largest", value=shares[over] * _MAX_HALF, threshold=_MAX_HALF)],
                ).model_copy(update={"step": step})


def _overflow(graph: LossGraph) -> tuple[Any, int] | None:
    """The float16 node whose output is the first that is not finite, in forward order, and how many elements are."""
    if any(_num_non_finite(p) for p in graph.parameters()):
        return None  # The weights were lost before.
    for node in graph.nodes:
        for saved in saved_tensors(node):
            count = _num_non_finite(saved)
            if not count:
                continue
            if saved.grad_fn is None:
                return None  # data, a mask, or a parameter
            return _blame(saved.grad_fn, count)
    for node in graph.nodes:
        if _is_half(node) and (count := _product_overflow(node)):
            return node, count
    return None


def _blame(born: Any, count: int) -> tuple[Any, int] | None:
    """The nearest float16 operation, at the node or shortly before it, that is proved to exceed the range, or may."""
    level, seen = [born], {born}
    suspect: tuple[Any, int] | None = None
    for _ in range(_MAX_DISTANCE):
        for node in level:
            if not _is_half(node):
                continue
            known = _product_overflow(node)
            if known:
                return node, known
            if known is None and suspect is None and (node.name() in _PRODUCTS or node.name().startswith("ToCopy")):
                suspect = (node, count)
        level = [n for node in level for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(level)
    return suspect


def _product_overflow(node: Any) -> int | None:
    """How many elements of a product of kept matrices exceed the range; None where that cannot be told."""
    if node.name() not in ("MmBackward0", "BmmBackward0"):
        return None
    a, b = (next(saved_tensors(node, f"_saved_{n}"), None) for n in ("self", "mat2"))
    if a is None or b is None or not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return None
    return int(((a.detach().float() @ b.detach().float()).abs() > _MAX_HALF).sum())


def _largest_of_product(node: Any) -> Tensor | None:
    """The largest magnitude in the product that a node made, in float32; None where it keeps no two matrices."""
    if node.name() != "BmmBackward0":
        return None
    a, b = (next(saved_tensors(node, f"_saved_{n}"), None) for n in ("self", "mat2"))
    if a is None or b is None or a.shape[0] * a.shape[1] * b.shape[2] > _MAX_ELEMENTS:
        return None
    return (a.detach().float() @ b.detach().float()).abs().max()


def _is_half(node: Any) -> bool:
    return any(getattr(m, "dtype", None) is torch.float16 for m in getattr(node, "_input_metadata", ()))


def _num_non_finite(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor.detach())).sum()) if tensor.is_floating_point() else 0
