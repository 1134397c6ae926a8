"""The gradient along the depth of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gradtracer import stats
from gradtracer.records import ModelDescription
from gradtracer.samples import LayerTable

# The gradient of these says nothing about depth: a batch leaves most rows of a table untouched, and the parameters of a
# normalisation stand beside the path of the gradient, on a scale of their own.
_BESIDE_THE_PATH = ("Embedding", "Norm")


def on_the_path(layer: str, types: Mapping[str, str]) -> bool:
    """Whether the layer's gradient can be compared with that of its neighbours."""
    return not any(word in types.get(layer, "") for word in _BESIDE_THE_PATH)


@dataclass(frozen=True)
class DepthProfile:
    """Gradient RMS per parameter, from the layer nearest to the input to that nearest to the output."""

    layers: tuple[str, ...]
    rms: tuple[float, ...]

    @property
    def decades(self) -> tuple[float, ...]:
        """log10 of the RMS; an RMS of 0 counts as float32's smallest number."""
        return tuple(math.log10(max(r, 1e-45)) for r in self.rms)

    @property
    def reference(self) -> float:
        """RMS near the output: the larger of the last two layers."""
        return max(self.rms[-2:])

    @property
    def fitted_fall(self) -> float:
        """Decades by which it falls from output to input, along a robust line (Theil and Sen)."""
        return stats.theil_sen_slope(self.decades) * (len(self.rms) - 1)

    @property
    def trend(self) -> float:
        """Kendall's tau over depth: 1 where it falls at every layer on the way to the input."""
        return stats.kendall_tau(self.decades)

    @property
    def largest_step_share(self) -> float:
        """Share of the whole fall that happens between two neighbours."""
        return stats.largest_rise_share(self.decades)


def depth_profile(table: LayerTable, model: ModelDescription | None) -> DepthProfile | None:
    """The profile of a sampled step; None where fewer than 4 layers have a finite gradient.

    The RMS is ``sqrt(mean^2 + std^2)`` over the elements of the gradient, which needs no count of parameters; where
    these were not recorded, the norm over the square root of the count.
    """
    types = {layer.name: layer.type for layer in model.layers} if model else {}
    sizes = {layer.name: layer.num_parameters for layer in model.layers} if model else {}
    means, stds, norms = (table.signal(s) for s in ("grad_mean", "grad_std", "grad_norm"))
    order = [layer.name for layer in model.layers if layer.name in norms] if model else list(norms)
    layers: list[str] = []
    rms: list[float] = []
    for layer in order:
        if not on_the_path(layer, types):
            continue
        if layer in means and layer in stds:
            value = math.hypot(means[layer], stds[layer])
        else:
            value = norms[layer] / math.sqrt(sizes.get(layer) or 1)
        if math.isfinite(value):
            layers.append(layer)
            rms.append(value)
    return DepthProfile(tuple(layers), tuple(rms)) if len(layers) >= 4 else None
