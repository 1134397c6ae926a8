"""How sharply attention looks, read from the loss's graph, so that functional attention is seen too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, Measure
from gradtracer.training.audits._reading import RESHAPING, below_reshaping, children, dim_of, facing, owner_of
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph, saved
from gradtracer.training.layers import source_of

_SOFTMAX = ("SoftmaxBackward0", "SafeSoftmaxBackward0")
_MATMUL = ("BmmBackward0", "BaddbmmBackward0", "MmBackward0")
_DROPOUT = ("NativeDropoutBackward0", "MulBackward0", "DivBackward0")
_ELEMENTWISE = RESHAPING | {
    "MulBackward0", "DivBackward0", "AddBackward0", "SubBackward0", "MaskedFillBackward0", "WhereBackward0",
    "TanhBackward0", "ClampBackward0", "NativeDropoutBackward0",
}  # fmt: skip
_MAX_ELEMENTS = 500_000
_MAX_QUERIES = 64


@dataclass(frozen=True)
class Sharpness:
    """Scalars on the device; see `sharpness`."""

    entropy: Tensor
    saturation: Tensor
    logit_std: Tensor
    key_share: Tensor


@dataclass(frozen=True)
class _Attention:
    layer: str
    weights: Tensor
    """``[batch, queries, keys]``."""
    scale: float
    """Constant factors between the products of projections and the softmax, multiplied."""
    width: int
    """Length of a query; 0 if unknown."""
    logits: Tensor | None = None
    """Scaled products of queries and keys for some examples, before any mask."""


@AUDITS.register
class AttentionAudit(Audit):
    """Attention concentrates on single keys.

    What:
        Scaled dot-product attention whose logits are so large that the softmax picks one key in nearly every row,
        before anything was learned: the factor 1/sqrt(d) is missing or upside down, or queries and keys begin too
        large.

    Why:
        A saturated softmax passes next to no gradient to queries and keys, so where it looks stays as random as it
        began; only the values are learned. In half precision the logits overflow besides.

    Definition:
        Of a row of weights w over the m keys that it may see: entropy ``-sum w ln w / ln m`` in [0, 1], mean over rows
        (attention_entropy); share of rows below 0.1 (attention_saturation); standard deviation of the logits over keys
        (attention_logit_std, nats: of the scaled products, or of ln w where these are not kept); share of rows whose
        largest weight is at the key that is most often so (attention_key_share). A key may be seen if its weight is
        above 0 for any example. Weights are those
        of softmax nodes between two matrix products, or recomputed for a fused attention on at most 64 queries.
        The finding `attention_saturated_at_start` needs, at the first step of a run whose optimizer has made none
        before: mean entropy below 0.3, half of the rows saturated, no key that half of the rows agree on, and either
        constant factors of at least 2/sqrt(d) between projections and softmax, or logits of a standard deviation above
        8 nats.

    Thresholds:
        Logits of standard deviation s over m keys leave an entropy of about ln m - s^2/2 while s^2 < 2 ln m, and of a
        few hundredths beyond (the random energy model, Derrida 1981): 0.3 cannot come from s near 1, which the factor
        1/sqrt(d) gives to independent queries and keys of unit variance. Sharp heads that were learned agree on a key
        (the first token, a separator) or stand in a layer with others; half of the rows saturated at scattered keys
        with a wrong factor is what an untrained layer shows. 8 nats: sqrt(d) for d = 64, the usual head.

    Fixes:
        None that is live: put the factor 1/sqrt(d) into the code. A later collapse: set_learning_rate.

    References:
        Vaswani et al. 2017, section 3.2.1, footnote 4. Zhai et al. 2023, arXiv:2303.06296. Derrida 1981,
        doi:10.1103/PhysRevB.24.2613.
    """

    code = "attention"

    MAX_ENTROPY = 0.3
    MIN_SATURATION = 0.5
    MAX_KEY_SHARE = 0.5
    MIN_FACTOR = 2.0
    LARGE_LOGIT_STD = 8.0

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Record how sharp each attention is; judge it at the first step."""
        for seen in _attentions(context, graph):
            found = sharpness(seen.weights, seen.logits)
            if found is None:
                continue
            context.record(seen.layer, "attention_entropy", found.entropy)
            context.record(seen.layer, "attention_saturation", found.saturation)
            context.record(seen.layer, "attention_logit_std", found.logit_std)
            context.record(seen.layer, "attention_key_share", found.key_share)
            if context.step == 0 and not any(_has_stepped(o) for o in context.optimizers):
                yield from self._at_start(context, seen, found)

    def _at_start(self, context: AuditContext, seen: _Attention, found: Sharpness) -> Iterator[AuditFinding]:
        entropy, saturation, share, std = torch.stack(
            [found.entropy, found.saturation, found.key_share, found.logit_std]
        ).tolist()
        if not (entropy < self.MAX_ENTROPY and saturation >= self.MIN_SATURATION and share < self.MAX_KEY_SHARE):
            return
        factor = seen.scale * math.sqrt(seen.width) if seen.width else math.nan
        unscaled = factor >= self.MIN_FACTOR
        if not (unscaled or std > self.LARGE_LOGIT_STD):
            return
        module = dict(context.model.named_modules()).get(seen.layer)
        yield finding(
            context,
            "attention_saturated_at_start",
            f"At the first step {100 * saturation:.0f} % of the rows of attention look at one key alone, at scattered "
            f"keys: the logits have a standard deviation of {std:.3g}"
            + (f", and the factor before the softmax is {seen.scale:.3g} for queries of length {seen.width}."
               if unscaled else "."),
            layer=seen.layer,
            measures=[
                Measure(name="attention_entropy", value=entropy, threshold=self.MAX_ENTROPY),
                Measure(name="attention_saturation", value=saturation, threshold=self.MIN_SATURATION),
                Measure(name="attention_logit_std", value=std, threshold=self.LARGE_LOGIT_STD, unit="nats"),
                *([Measure(name="factor_times_sqrt_d", value=factor, baseline=1.0, threshold=self.MIN_FACTOR)]
                  if unscaled else []),
            ],
            source=source_of(module) if module is not None else None,
        )  # fmt: skip


def sharpness(weights: Tensor, logits: Tensor | None = None) -> Sharpness | None:
    """What rows of attention weights show; None where fewer than 4 keys may be seen by any row.

    Args:
        weights: ``[batch, queries, keys]``, rows that sum to 1.
        logits: ``[..., queries, keys]``, where they are known.
    """
    weights = _sample(weights).float()
    allowed = (weights > 0).any(dim=0).sum(dim=-1)
    rows = (allowed >= 4).nonzero()[:, 0] if allowed.device.type == "cpu" else None
    if rows is not None:
        if len(rows) == 0:
            return None
        weights, allowed = weights[:, rows], allowed[rows]
    elif weights.shape[-1] < 4:
        return None
    counted = (allowed >= 4).to(weights.dtype).expand(weights.shape[:2])
    num = counted.sum()
    log_weights = weights.clamp_min(torch.finfo(torch.float32).tiny).log()
    keys = allowed.clamp_min(2).to(weights.dtype)
    entropy = -(weights * log_weights).sum(dim=-1) / keys.log()
    if logits is not None:
        std = logits.std(dim=-1, unbiased=False).mean()
    else:
        seen = (weights > 0).to(weights.dtype)
        num_seen = seen.sum(dim=-1).clamp_min(1)
        mean = (log_weights * seen).sum(dim=-1) / num_seen
        variance = ((log_weights - mean[..., None]).square() * seen).sum(dim=-1) / num_seen
        std = (variance.sqrt() * counted).sum() / num
    top = torch.nn.functional.one_hot(weights.argmax(dim=-1), weights.shape[-1]).to(weights.dtype)
    return Sharpness(
        entropy=(entropy * counted).sum() / num,
        saturation=((entropy < 0.1) * counted).sum() / num,
        logit_std=std,
        key_share=(top * counted[..., None]).sum(dim=(0, 1)).max() / num,
    )


def _sample(weights: Tensor) -> Tensor:
    """Evenly spaced queries and examples, about `_MAX_ELEMENTS` weights."""
    weights = weights.detach()
    if weights.shape[1] * weights.shape[2] * 8 > _MAX_ELEMENTS:
        # The last query stays: of a causal mask it is the row that sees all keys.
        count = min(weights.shape[1], _MAX_QUERIES)
        picked = torch.linspace(0, weights.shape[1] - 1, count, device=weights.device).round().long()
        weights = weights[:, picked]
    per_example = weights.shape[1] * weights.shape[2]
    stride = max(1, math.ceil(weights.shape[0] * per_example / _MAX_ELEMENTS))
    return weights[::stride]


def _attentions(context: AuditContext, graph: LossGraph) -> Iterator[_Attention]:
    seen: set[Any] = set()
    for node in graph.nodes:
        if node.name().startswith("ScaledDotProduct"):
            found = _fused(context, graph, node)
            if found is not None:
                yield found
        elif node.name() in _MATMUL:
            for child in children(node):
                softmax = below_reshaping(child, _DROPOUT)
                if softmax.name() in _SOFTMAX and softmax not in seen:
                    seen.add(softmax)
                    found = _plain(context, graph, softmax)
                    if found is not None:
                        yield found


def _plain(context: AuditContext, graph: LossGraph, softmax: Any) -> _Attention | None:
    """Attention whose softmax is a node of its own, if its logits are products of activations."""
    path = _to_product(softmax)
    if path is None:
        return None
    product, outer = path
    scale = outer
    inputs = list(children(product))
    if len(inputs) < 2 or graph.own_layer(product) is not None:
        return None
    for start in inputs[-2:]:
        scale *= _factor(start)
    layers = facing(graph, inputs)
    if not layers:
        return None
    weights = saved(softmax, "result")
    names = ("batch1", "batch2") if product.name() == "BaddbmmBackward0" else ("self", "mat2")
    left, right = (saved(product, name) for name in names)
    if weights is None:
        return None
    weights = weights.movedim(dim_of(softmax), -1)
    if weights.dim() < 2:
        return None
    weights = weights.reshape(-1, *weights.shape[-2:])
    logits = None
    if left is not None and right is not None and left.dim() == 3:
        stride = max(1, math.ceil(weights.numel() / _MAX_ELEMENTS))
        logits = left[::stride].float() @ right[::stride].float() * outer
    width = left.shape[-1] if left is not None else 0
    return _Attention(owner_of(context, list(layers.values())), weights, scale, width, logits)


def _to_product(softmax: Any) -> tuple[Any, float] | None:
    """The matrix product below a softmax, and the constants multiplied in between."""
    stack: list[tuple[Any, float, int]] = [(child, 1.0, 0) for child in children(softmax)]
    while stack:
        node, scale, hops = stack.pop()
        if node.name() in _MATMUL:
            return node, scale
        if node.name() in _ELEMENTWISE and hops < 16:
            stack.extend((child, scale * _constant(node), hops + 1) for child in children(node))
    return None


def _factor(node: Any) -> float:
    """Constants multiplied into an operand of a product on its way from the layer that made it."""
    scale = 1.0
    for _ in range(16):
        if node.name() not in _ELEMENTWISE:
            break
        scale *= _constant(node)
        below = list(children(node))
        if len(below) != 1:
            break
        node = below[0]
    return scale


def _constant(node: Any) -> float:
    """The number that a node multiplies with; 1 where it is none."""
    if node.name() not in ("MulBackward0", "DivBackward0"):
        return 1.0
    other = saved(node, "other")
    if other is None and node.name() == "MulBackward0":
        other = saved(node, "self")
    if not isinstance(other, Tensor) or other.numel() != 1 or other.requires_grad or other.device.type != "cpu":
        return 1.0
    value = abs(float(other))
    if not (math.isfinite(value) and value > 0):
        return 1.0
    return value if node.name() == "MulBackward0" else 1.0 / value


def _fused(context: AuditContext, graph: LossGraph, node: Any) -> _Attention | None:
    """Attention in one fused node, its weights computed anew for some queries."""
    query, key = saved(node, "query"), saved(node, "key")
    if query is None or key is None:
        return None
    inputs: Sequence[Any] = [n for n, _ in node.next_functions[:2] if n is not None]
    layers = facing(graph, inputs)
    if not layers or query.dim() != 4 or key.shape[-2] < 4:
        return None
    own_scale = getattr(node, "_saved_scale", None)
    width = query.shape[-1]
    scale = float(own_scale) if own_scale is not None else 1.0 / math.sqrt(width)
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    picked = torch.linspace(0, num_queries - 1, min(num_queries, _MAX_QUERIES), device=query.device).round().long()
    stride = max(1, math.ceil(query.shape[0] * query.shape[1] * len(picked) * num_keys / _MAX_ELEMENTS))
    examples = slice(None, None, min(stride, query.shape[0]))
    query, key = query[examples][:, :, picked].float(), key[examples].float()
    if key.shape[1] != query.shape[1]:  # grouped queries share a key head
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = query @ key.transpose(-2, -1) * scale
    mask = saved(node, "attn_mask")
    if mask is None:
        mask = saved(node, "attn_bias")
    if isinstance(mask, Tensor):
        mask = mask.expand(*mask.shape[:-2], num_queries, num_keys) if mask.dim() >= 2 else mask
        mask = mask[..., picked, :] if mask.dim() >= 2 else mask
        if mask.dim() == 4 and mask.shape[0] > 1:
            mask = mask[examples]
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask.float()
    if getattr(node, "_saved_is_causal", False):
        later = torch.arange(num_keys, device=query.device)[None] > picked[:, None]
        logits = logits.masked_fill(later, -math.inf)
    weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)
    for start in inputs:
        scale *= _factor(start)
    return _Attention(owner_of(context, list(layers.values())), weights.flatten(0, 1), scale, width)


def _has_stepped(optimizer: Optimizer) -> bool:
    """Whether the optimizer carries on an earlier run."""
    return any(bool(state) for state in optimizer.state.values())
