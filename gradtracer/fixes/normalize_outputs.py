"""Normalise what a layer puts out to unit length."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._modules import all_of, choose_one, draw_anew, trained_layers
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class NormalizeOutputsParameters(FixParameters):
    """Parameters of `normalize_outputs`."""

    layer: str = Field(min_length=1, max_length=500, description="The layer that puts out the representations.")
    length: float = Field(default=1.0, gt=0, le=1000, description="Length that every row is given.")
    reinitialize: bool = Field(
        default=False,
        description="Draw the trained layers anew: a representation that has collapsed seldom comes back.",
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of the random numbers.")


class UnitLength:
    """Forward hook: rows of one length.

    Args:
        length: The length.
    """

    def __init__(self, length: float) -> None:
        self.length = length

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        """The output, normalised along its last axis; None, which leaves it, where it is no tensor of numbers."""
        if not hasattr(output, "is_floating_point") or not output.is_floating_point() or output.dim() < 2:
            return None
        return self.length * output / output.norm(dim=-1, keepdim=True).clamp_min(1e-12)


@FIXES.register
class NormalizeOutputs(Fix[NormalizeOutputsParameters]):
    """Give every row that a layer puts out the same length.

    What:
        A hook on the layer divides its output by its Euclidean length along the last axis. The state dict stays as it
        is.

    Why:
        Where a loss compares rows without normalising them, shrinking all of them to one point is a way to make it
        small, or to bring it to rest at its margin. On the sphere rows cannot shrink, only turn.

    Definition:
        ``z <- length * z / max(||z||, 1e-12)``.

    Safety:
        Guarded: the model computes another function, and the saved model needs the normalisation too: put it in the
        source. What the length of a row said is lost.

    Undo:
        The output is used as it is; weights that were drawn anew are put back.

    References:
        Schroff, Kalenichenko, Philbin 2015, arXiv:1503.03832, section 3.1. Wang & Isola 2020, arXiv:2005.10242.
    """

    code = "normalize_outputs"
    title = "Normalise representations"
    safety = Safety.GUARDED
    standing = True
    changes_function = True
    shows_in_loss = False
    loss_may_rise = True
    num_batches = 1
    mends = ("embedding_collapse",)
    Parameters = NormalizeOutputsParameters

    def preview(self, run: LiveRun, parameters: NormalizeOutputsParameters) -> list[Change]:
        """The layer."""
        layer = choose_one(run, parameters.layer)
        if any(isinstance(hook, UnitLength) for hook in layer._forward_hooks.values()):
            raise BadParameter(f"the outputs of {parameters.layer} are normalised already")
        changes = [Change(target=f"{parameters.layer}.output: length", old="as it comes", new=parameters.length)]
        if parameters.reinitialize:
            changes.append(Change(target="all trained layers", old="as trained", new="drawn anew"))
        return changes

    def apply(self, run: LiveRun, parameters: NormalizeOutputsParameters) -> Undo:
        """Normalise from the next forward pass on."""
        self.preview(run, parameters)
        undos: list[Undo] = []
        if parameters.reinitialize:
            undos.append(draw_anew(run, trained_layers(run), parameters.seed))
        undos.append(choose_one(run, parameters.layer).register_forward_hook(UnitLength(parameters.length)).remove)
        return all_of(undos)
