"""Set the learning rate."""

from __future__ import annotations

from pydantic import Field

from gradtracer.fixes._updates import hold, hyperparameters
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class SetLearningRateParameters(FixParameters):
    """Parameters of `set_learning_rate`."""

    learning_rate: float = Field(gt=0, le=1e3, description="The rate to use from the next update on.")
    group: int | None = Field(default=None, ge=0, le=10_000, description="Only this parameter group; all by default.")


@FIXES.register
class SetLearningRate(Fix[SetLearningRateParameters]):
    """Use this learning rate for every update until it is reverted, whatever a scheduler says.

    What:
        The rate is put in before each update and the scheduler's own value put back after it, so that a scheduler
        neither overrides the fix nor is thrown off by it.

    Why:
        A rate that is too high makes steps overshoot; one that is too low wastes the run.

    Definition:
        ``lr_used = learning_rate`` for the chosen groups.

    Safety:
        Guarded: a rate that suits one state of the training may not suit another.

    Undo:
        From the next update on the optimizer uses its own value again.

    References:
        Bengio 2012, "Practical recommendations for gradient-based training of deep architectures", section 3.1.1.
    """

    code = "set_learning_rate"
    title = "Set the learning rate"
    safety = Safety.GUARDED
    standing = True
    works_sharded = True
    mends = (
        "attention_entropy_collapse",
        "dead_relu",
        "embedding_collapse",
        "exploding_gradient",
        "gradient_accumulation",
        "learning_rate_too_high",
        "learning_rate_too_low",
        "loss_scale",
        "scheduler_misuse",
        "warmup_missing",
        "zombie_embeddings",
    )
    Parameters = SetLearningRateParameters

    def preview(self, run: LiveRun, parameters: SetLearningRateParameters) -> list[Change]:
        """Old and new rate of each group that would change."""
        return [
            Change(target=target, old=float(rate), new=parameters.learning_rate)
            for target, rate in hyperparameters(run, "lr", parameters.group)
        ]

    def apply(self, run: LiveRun, parameters: SetLearningRateParameters) -> Undo:
        """Hold the rate from the next update on."""
        self.preview(run, parameters)
        return hold(run, lambda optimizer: lambda hyper: {"lr": parameters.learning_rate}, parameters.group)
