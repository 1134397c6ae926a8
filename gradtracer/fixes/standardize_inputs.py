"""Standardise what the model, or a layer, receives."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._modules import ROOT, all_of, choose_one, draw_anew, trained_layers
from gradtracer.fixes._ranks import over_ranks
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety

_NUM_BATCHES = 8


class StandardizeInputsParameters(FixParameters):
    """Parameters of `standardize_inputs`."""

    layer: str | None = Field(
        default=None, max_length=500, description="The layer whose input is standardised; by default the model's."
    )
    clip: float = Field(default=3.0, gt=0, le=1000, description="Values are kept within this many deviations.")
    reinitialize: bool = Field(
        default=False, description="Draw the trained layers anew: weights made on raw inputs seldom suit others."
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of the random numbers.")


class Standardize:
    """Forward pre-hook: the first input, column by column, with mean 0 and deviation 1.

    Args:
        mean: By column, ``[columns]``.
        deviation: Likewise.
        clip: Bound in deviations.
        axis: The axis of columns.
    """

    def __init__(self, mean: Any, deviation: Any, clip: float, axis: int) -> None:
        self.mean, self.deviation, self.clip, self.axis = mean, deviation, clip, axis

    def __call__(self, module: Any, inputs: Any) -> Any:
        """The inputs, the first one standardised; None where it holds no floating-point numbers."""
        if not inputs or not hasattr(inputs[0], "is_floating_point") or not inputs[0].is_floating_point():
            return None
        given = inputs[0]
        shape = [1] * given.dim()
        shape[self.axis] = -1
        mean, deviation = (x.to(given.device).view(shape) for x in (self.mean, self.deviation))
        return (((given - mean) / deviation).clamp(-self.clip, self.clip).to(given.dtype), *inputs[1:])


@FIXES.register
class StandardizeInputs(Fix[StandardizeInputsParameters]):
    """Subtract the mean and divide by the standard deviation, column by column, before the model sees its input.

    What:
        Mean and deviation come from captured batches and stay as they are from then on. Columns are the last axis, of
        images the second. Only the first positional input is changed, and only if it holds floating-point numbers.

    Why:
        Gradients grow with the inputs (with their square where they are squared): raw units make the first updates
        overshoot, and no one rate suits columns of different scales.

    Definition:
        ``x <- clamp((x - mean) / deviation, -clip, clip)``, deviation 1 where a column is constant.

    Safety:
        Guarded: the model computes another function, and the saved model needs the same standardisation: its numbers
        are in the hook, `model._forward_pre_hooks`, and a model saved whole keeps it. The state dict stays as it is.

    Undo:
        Inputs are used as they are; weights that were drawn anew are put back.

    References:
        LeCun, Bottou, Orr, Müller 1998, "Efficient BackProp", section 4.3.
    """

    code = "standardize_inputs"
    title = "Standardise inputs"
    safety = Safety.GUARDED
    standing = True
    changes_function = True
    num_batches = _NUM_BATCHES
    mends = ("input_scale",)
    Parameters = StandardizeInputsParameters

    def preview(self, run: LiveRun, parameters: StandardizeInputsParameters) -> list[Change]:
        """Where the hook would stand."""
        name = parameters.layer or ROOT
        choose_one(run, name)
        changes = [Change(target=f"{name}.input", old="as it comes", new=f"standardised, clip {parameters.clip:g}")]
        if parameters.reinitialize:
            changes.append(Change(target="all trained layers", old="as trained", new="drawn anew"))
        return changes

    def apply(self, run: LiveRun, parameters: StandardizeInputsParameters) -> Undo:
        """Observe, and place the hook."""
        module = choose_one(run, parameters.layer or ROOT)
        if any(isinstance(hook, Standardize) for hook in module._forward_pre_hooks.values()):
            raise BadParameter(f"the inputs of {parameters.layer or ROOT} are standardised already")
        hook = _observe(run, module, parameters)
        handle = module.register_forward_pre_hook(hook)
        undos: list[Undo] = [handle.remove]
        if parameters.reinitialize:
            undos.append(draw_anew(run, trained_layers(run), parameters.seed))
        return all_of(undos)


def _observe(run: LiveRun, module: Any, parameters: StandardizeInputsParameters) -> Standardize:
    import torch

    seen: list[torch.Tensor] = []
    axes: list[int] = []

    def note(module: Any, inputs: Any) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].is_floating_point() and inputs[0].dim() > 1:
            axes.append(1 if inputs[0].dim() == 4 else -1)
            seen.append(inputs[0].detach().double().movedim(axes[-1], -1).flatten(0, -2))

    handle = module.register_forward_pre_hook(note)
    try:
        run.rehearse(_NUM_BATCHES)
    finally:
        handle.remove()
    if not seen or len({x.shape[1] for x in seen}) > 1:
        raise BadParameter(
            f"{parameters.layer or ROOT} received no floating-point input of one width as its first argument in the "
            "captured batches; name the layer that does with layer="
        )
    rows = torch.cat(seen)
    rows = rows[torch.isfinite(rows).all(dim=1)]
    if len(rows) < 2:
        raise BadParameter("fewer than two rows of the captured batches are finite")
    mean, square = over_ranks(torch.stack([rows.mean(dim=0), rows.square().mean(dim=0)]), "mean")
    variance = (square - mean.square()).clamp_min(0) * len(rows) / (len(rows) - 1)
    deviation = torch.where(variance > 1e-12 * square, variance.sqrt(), torch.ones_like(variance))
    return Standardize(mean.float(), deviation.float(), parameters.clip, axes[0])
