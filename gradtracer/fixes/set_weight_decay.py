"""Set the weight decay."""

from __future__ import annotations

from pydantic import Field

from gradtracer.fixes._updates import hold, hyperparameters
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class SetWeightDecayParameters(FixParameters):
    """Parameters of `set_weight_decay`."""

    weight_decay: float = Field(ge=0, le=10, description="The decay to use from the next update on.")
    group: int | None = Field(default=None, ge=0, le=10_000, description="Only this parameter group; all by default.")


@FIXES.register
class SetWeightDecay(Fix[SetWeightDecayParameters]):
    """Use this weight decay for every update until it is reverted.

    What:
        The decay is put in before each update and the optimizer's own put back after it. Groups that have none (biases,
        normalisations) keep 0.

    Why:
        A decay that beats the gradient pulls every weight to zero, and nothing is learned.

    Definition:
        ``weight_decay_used = weight_decay`` for the chosen groups whose own is above 0, or for the one that is named.

    Safety:
        Guarded: a decay that is too small lets weights grow and the model overfit.

    Undo:
        From the next update on the optimizer uses its own value again.

    References:
        Krogh & Hertz 1991, NIPS, equation 5. Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2.
    """

    code = "set_weight_decay"
    title = "Set the weight decay"
    safety = Safety.GUARDED
    standing = True
    works_sharded = True
    shows_in_loss = False
    mends = ("weight_decay_too_large",)
    Parameters = SetWeightDecayParameters

    def preview(self, run: LiveRun, parameters: SetWeightDecayParameters) -> list[Change]:
        """Old and new decay of each group that would change."""
        found = hyperparameters(run, "weight_decay", parameters.group)
        decayed = [(target, decay) for target, decay in found if decay > 0 or parameters.group is not None]
        return [
            Change(target=target, old=float(decay), new=parameters.weight_decay) for target, decay in decayed or found
        ]

    def apply(self, run: LiveRun, parameters: SetWeightDecayParameters) -> Undo:
        """Hold the decay from the next update on."""
        every = len(self.preview(run, parameters)) == len(hyperparameters(run, "weight_decay", parameters.group))
        new = parameters.weight_decay
        return hold(
            run,
            lambda optimizer: lambda hyper: {"weight_decay": new} if every or hyper.get("weight_decay", 0) > 0 else {},
            parameters.group,
        )
