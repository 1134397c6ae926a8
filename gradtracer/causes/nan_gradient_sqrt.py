"""A root met zero."""

from __future__ import annotations

from gradtracer.causes._born import SEEN, birth_case, born_as
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class NanGradientSqrt(Cause):
    """A square root received 0, where its slope is infinite.

    What:
        A Euclidean distance written as sqrt of a sum of squares, at two equal points; the spread of a constant; a
        root of a difference that rounds below 0.

    Why:
        The loss is finite, and the gradient infinity times 0, which is NaN.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the loss is finite, the gradient is not, and a root held at
        this step received 0; or a root received a value below 0: +7. Root: the module that the operation stands in,
        none where it is part of the loss expression. Onset: the step at which it was seen.

    Thresholds:
        The operation and its operand were seen, not inferred: ln 1000 = 7.

    Fixes:
        skip_nonfinite_step keeps the weights; rollback where they are lost already. The operation itself is changed
        in the source.

    References:
        d sqrt(x) / dx = 1 / (2 sqrt(x)). PyTorch documentation, Autograd mechanics, on gradients of non-
        differentiable functions.
    """

    code = "nan_gradient_sqrt"
    title = "The gradient of a root at 0"
    prior = 0.03

    def consider(self, series: Series) -> Case | None:
        """Weigh the operation that was seen to make the first NaN."""
        found = born_as(series, "nan_gradient_sqrt")
        if found is None:
            return None
        return birth_case(
            series,
            found,
            SEEN,
            "The slope of the root is infinite there, and times the inner slope of 0 it is NaN.",
            "Add a small number under the root, torch.sqrt(x + 1e-12), or use "
            "torch.linalg.vector_norm or F.pairwise_distance, whose gradient at 0 is defined.",
        )
