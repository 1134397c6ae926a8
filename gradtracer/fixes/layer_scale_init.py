"""Rescale weights to unit variance of the layers' outputs."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._modules import choose, forget_moments, keep, seeded
from gradtracer.fixes._ranks import over_ranks
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety

_NUM_BATCHES = 2
_MAX_ROUNDS = 5


class LayerScaleInitParameters(FixParameters):
    """Parameters of `layer_scale_init`."""

    layers: str | None = Field(
        default=None, max_length=2000, description="Layers, or modules that contain them, with commas; all by default."
    )
    deviation: float = Field(
        default=1.0, gt=0, le=100, description="Standard deviation that outputs are given, before the activation."
    )
    orthonormal: bool = Field(default=False, description="Draw orthonormal weights first: what was learned is lost.")
    centre: bool = Field(default=False, description="Also move biases so that every unit has mean 0.")
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of the random numbers.")


@FIXES.register
class LayerScaleInit(Fix[LayerScaleInitParameters]):
    """Rescale the weights of each layer so that what it puts out has unit variance on the data (LSUV).

    What:
        Layer by layer in forward order, on captured batches: linear and convolutional layers. The optimizer forgets its
        moments of them.

    Why:
        With every layer at the same scale neither activations nor gradients grow or fade with depth, and saturating
        activations work where they have a slope.

    Definition:
        In forward order: ``W <- W * deviation / sqrt(Var(output))``, again until the deviation is within 5 %, at most 5
        times; with `centre` the bias loses the mean of each unit. With `orthonormal` W is first drawn anew with
        orthonormal rows or columns, and biases are 0.

    Safety:
        Guarded: the output changes. Early in a run that is what is wanted; a trained model loses what its scales say.

    Undo:
        Weights and moments are put back.

    References:
        Mishkin & Matas 2016, arXiv:1511.06422, algorithm 1. Salimans & Kingma 2016, arXiv:1602.07868, section 3
        (centring).
    """

    code = "layer_scale_init"
    title = "Rescale layers to unit variance"
    safety = Safety.GUARDED
    num_batches = _NUM_BATCHES
    mends = ("bad_initialisation", "vanishing_gradient", "exploding_gradient", "input_scale")
    Parameters = LayerScaleInitParameters

    def preview(self, run: LiveRun, parameters: LayerScaleInitParameters) -> list[Change]:
        """The layers that would be rescaled."""
        new = f"standard deviation {parameters.deviation:g}" + (", drawn anew" if parameters.orthonormal else "")
        return [Change(target=f"{name}.output", old="as it is", new=new) for name in _chosen(run, parameters)]

    def apply(self, run: LiveRun, parameters: LayerScaleInitParameters) -> Undo:
        """Rescale."""
        import torch

        from gradtracer.training.flow import reading_flow
        from gradtracer.training.initialise import initialise

        chosen = _chosen(run, parameters)
        with reading_flow(run.model) as flow:
            run.rehearse(1)
        order = [name for name in flow.order if name in chosen]
        if not order:
            raise BadParameter(f"none of {', '.join(chosen)[:200]} ran in a captured batch")
        undo = keep(run, (p for m in chosen.values() for p in m.parameters(recurse=False)))
        generator = seeded(run, parameters.seed)
        if parameters.orthonormal:
            for name in order:
                initialise(chosen[name], "none", "orthogonal", generator)
        with torch.no_grad():
            for name in order:
                if not _rescale(run, chosen[name], parameters):
                    undo()
                    raise BadParameter(
                        f"the output of {name} is constant or not finite, so no scale makes its variance 1; "
                        "orthonormal=true draws its weights anew, reinitialize_layer does so for the layers before it"
                    )
        forget_moments(run, (p for n in order for p in chosen[n].parameters(recurse=False)))
        return undo


def _rescale(run: LiveRun, module: Any, parameters: LayerScaleInitParameters) -> bool:
    for _ in range(_MAX_ROUNDS):
        mean, deviation = _output(run, module)
        if not math.isfinite(deviation) or deviation <= 0:
            return False
        if parameters.centre and module.bias is not None:
            module.bias -= mean.to(module.bias)
        if abs(deviation / parameters.deviation - 1) <= 0.05:
            break
        module.weight *= parameters.deviation / deviation
        if parameters.centre and module.bias is not None:
            module.bias *= parameters.deviation / deviation
    return True


def _output(run: LiveRun, module: Any) -> tuple[Any, float]:
    """Means by unit, and the deviation: of all outputs, or with centring by unit around their own means."""
    import torch

    from gradtracer.training.flow import by_unit

    rows: list[Any] = []
    handle = module.register_forward_hook(lambda m, inputs, output: rows.append(by_unit(output)))
    try:
        run.rehearse(_NUM_BATCHES)
    finally:
        handle.remove()
    if not rows:
        return None, math.nan
    values = torch.cat(rows).double()
    mean, square = over_ranks(torch.stack([values.mean(dim=0), values.square().mean(dim=0)]), "mean")
    variance = float((square - mean.square()).mean())
    # Less than that is rounding of a constant.
    return mean, math.sqrt(variance) if variance > 1e-10 * float(square.mean()) else 0.0


def _chosen(run: LiveRun, parameters: LayerScaleInitParameters) -> dict[str, Any]:
    import torch

    kinds = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    return choose(
        run,
        parameters.layers,
        lambda m: isinstance(m, kinds) and m.weight.requires_grad,
        "trained linear or convolutional layer",
    )
