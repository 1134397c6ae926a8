"""Set the optimizer's epsilon."""

from __future__ import annotations

from pydantic import Field

from gradtracer.fixes._updates import hold, hyperparameters
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class SetEpsilonParameters(FixParameters):
    """Parameters of `set_epsilon`."""

    epsilon: float = Field(gt=0, le=1, description="The epsilon to use from the next update on.")
    group: int | None = Field(default=None, ge=0, le=10_000, description="Only this parameter group; all by default.")


@FIXES.register
class SetEpsilon(Fix[SetEpsilonParameters]):
    """Use this epsilon in the optimizer's denominator for every update until it is reverted.

    What:
        The epsilon is put in before each update and the optimizer's own put back after it.

    Why:
        In float16 the default of 1e-8 is 0, so that a small gradient is divided by 0; in any precision a larger epsilon
        tames the steps of parameters with a tiny gradient.

    Definition:
        ``update = lr m / (sqrt(v) + epsilon)``.

    Safety:
        Guarded: an epsilon far above sqrt(v) makes every step smaller.

    Undo:
        From the next update on the optimizer uses its own value again.

    References:
        Kingma & Ba 2015, arXiv:1412.6980, algorithm 1. IEEE 754-2019, binary16 (the smallest number is 6e-8, and the
        root of it 2.4e-4).
    """

    code = "set_epsilon"
    title = "Set the optimizer's epsilon"
    safety = Safety.GUARDED
    standing = True
    works_sharded = True
    mends = ("optimizer_eps_half",)
    Parameters = SetEpsilonParameters

    def preview(self, run: LiveRun, parameters: SetEpsilonParameters) -> list[Change]:
        """Old and new epsilon of each group that would change."""
        return [
            Change(target=target, old=float(epsilon), new=parameters.epsilon)
            for target, epsilon in hyperparameters(run, "eps", parameters.group)
        ]

    def apply(self, run: LiveRun, parameters: SetEpsilonParameters) -> Undo:
        """Hold the epsilon from the next update on."""
        self.preview(run, parameters)
        return hold(run, lambda optimizer: lambda hyper: {"eps": parameters.epsilon}, parameters.group)
