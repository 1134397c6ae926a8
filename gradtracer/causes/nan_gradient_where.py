"""A selection hid a value that is not finite."""

from __future__ import annotations

from gradtracer.causes._born import SEEN, birth_case, born_as
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class NanGradientWhere(Cause):
    """torch.where (or a clamp, or a mask) does not take a value whose gradient is not finite.

    What:
        where(x > 0, log(x), 0), where(z <= 0, exp(z), 1 + z), where(d > 0, sqrt(d), 0): the branch not taken is
        computed all the same.

    Why:
        Its gradient is 0 times infinity, which is NaN, while the value that was taken and the loss are finite.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the loss is finite, the gradient is not, and below a
        selection held at this step an operation is not finite at elements that were not taken: +7. Root: the module
        that the operation stands in, none where it is part of the loss expression. Onset: the step at which it was
        seen.

    Thresholds:
        The operation and its operand were seen, not inferred: ln 1000 = 7.

    Fixes:
        skip_nonfinite_step keeps the weights; rollback where they are lost already. The operation itself is changed
        in the source.

    References:
        PyTorch documentation, torch.where; pytorch/pytorch issues 68425 and 108618.
    """

    code = "nan_gradient_where"
    title = "The branch not taken is not finite"
    prior = 0.03

    def consider(self, series: Series) -> Case | None:
        """Weigh the operation that was seen to make the first NaN."""
        found = born_as(series, "nan_gradient_where")
        if found is None:
            return None
        return birth_case(
            series,
            found,
            SEEN,
            "Both branches are computed, and the selection multiplies the gradient of the one not taken by 0.",
            "Make the input of the branch safe before the operation and not only its result: where(z "
            "<= 0, exp(z.clamp(max=0)), 1 + z), or x_safe = where(ok, x, 1) and then the operation on "
            "x_safe.",
        )
