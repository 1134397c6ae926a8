"""Multiply the logits of an attention by a factor."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.fixes._modules import ROOT, all_modules, choose, forget_moments, keep
from gradtracer.fixes._ranks import over_ranks
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety

_NUM_BATCHES = 2
_LARGE, _USUAL = 1.0, 3**-0.5
"""Deviation of queries and keys that is too large, and the one that torch's initialisation of a linear layer gives for
inputs of unit variance."""


class ScaleAttentionLogitsParameters(FixParameters):
    """Parameters of `scale_attention_logits`."""

    layers: str = Field(
        min_length=1,
        max_length=2000,
        description="Modules in whose forward pass the attention is computed, with commas.",
    )
    factor: float = Field(
        gt=0, le=1, description="What logits are multiplied by: 1 / sqrt(d) where that is missing, d the head's width."
    )
    unit_queries: bool = Field(
        default=True,
        description="Also scale down the layers of queries and keys whose outputs have a deviation above 1.",
    )


@FIXES.register
class ScaleAttentionLogits(Fix[ScaleAttentionLogitsParameters]):
    """Multiply what goes into an attention's softmax by a factor, from now on.

    What:
        `softmax` and `scaled_dot_product_attention` that the named modules call are given smaller logits. Layers that
        make queries and keys (found on a captured batch as the two sides of a product) are scaled down
        where their outputs deviate by more than 1, to what an initialised layer gives, and their moments forgotten.

    Why:
        With logits of a deviation far above 1 the softmax picks one key by chance and passes no gradient to queries and
        keys; in half precision large ones overflow.

    Definition:
        ``softmax(factor * logits)``; for queries and keys ``W <- W / (sqrt(3) std(output))`` where ``std(output) > 1``.

    Safety:
        Guarded: the model computes another function, and the saved model needs the factor too: put it in the source.
        The state dict stays as it is.

    Undo:
        Logits are used as they are; weights that were scaled are put back.

    References:
        Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1. Zhai et al. 2023, arXiv:2303.06296.
    """

    code = "scale_attention_logits"
    title = "Scale attention logits"
    safety = Safety.GUARDED
    standing = True
    changes_function = True
    num_batches = _NUM_BATCHES
    mends = ("attention_entropy_collapse", "fp16_overflow")
    Parameters = ScaleAttentionLogitsParameters

    def preview(self, run: LiveRun, parameters: ScaleAttentionLogitsParameters) -> list[Change]:
        """The modules and the factor."""
        return [
            Change(target=f"{name}: factor of the logits", old=1.0, new=parameters.factor)
            for name in _attentions(run, parameters)
        ]

    def apply(self, run: LiveRun, parameters: ScaleAttentionLogitsParameters) -> Undo:
        """Scale."""
        from gradtracer.training.flow import reading_flow
        from gradtracer.training.function_swap import FunctionSwap, tempered

        attentions = _attentions(run, parameters)
        known = all_modules(run)
        with reading_flow(run.model) as flow:
            run.rehearse(1)
        inside = {
            name
            for pair in flow.products
            for name in pair
            if any(name.startswith(f"{a}.") or a == ROOT for a in attentions)
        }
        makers = [known[name] for name in sorted(inside) if hasattr(known.get(name), "weight")]
        put_back = keep(run, (p for m in makers for p in m.parameters(recurse=False)))
        if parameters.unit_queries:
            for maker in makers:
                _scale_down(run, maker)
        names = ("softmax", "scaled_dot_product_attention")
        swaps = [FunctionSwap(m, dict.fromkeys(names, tempered(parameters.factor))) for m in attentions.values()]

        def undo() -> None:
            for swap in swaps:
                swap.remove()
            put_back()

        return undo


def _attentions(run: LiveRun, parameters: ScaleAttentionLogitsParameters) -> dict[str, Any]:
    chosen = choose(run, parameters.layers, lambda m: True, "module")
    named = [n.strip() for n in parameters.layers.split(",")]
    return {name: module for name, module in chosen.items() if name in named}


def _scale_down(run: LiveRun, maker: Any) -> None:
    import torch

    outputs: list[Any] = []
    handle = maker.register_forward_hook(lambda m, inputs, output: outputs.append(output.detach().float()))
    try:
        run.rehearse(_NUM_BATCHES)
    finally:
        handle.remove()
    variance = torch.cat([x.flatten() for x in outputs]).var() if outputs else torch.zeros(())
    deviation = float(over_ranks(variance, "mean").sqrt())
    if deviation > _LARGE:
        with torch.no_grad():
            for parameter in maker.parameters(recurse=False):
                parameter *= _USUAL / deviation
        forget_moments(run, maker.parameters(recurse=False))
