"""A predicted scale has run away."""

from __future__ import annotations

from gradtracer.causes._born import SEEN, birth_case, born_as
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class UnboundedVariance(Cause):
    """A predicted variance, precision or scale has collapsed to 0 or overflown.

    What:
        exp of a log-variance without bound, as a divisor or as the weight of a squared residual, in a Gaussian
        likelihood, a learnt loss weight or a policy.

    Why:
        Where the residual can be made small the likelihood grows without bound as the variance goes to 0, so the log-
        variance runs away until exp overflows.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the first operation that is not finite divides by an
        exponential, a softplus or its square that is 0, or is an exponential that overflows and weighs a residual:
        +7. Root: the module that the operation stands in, none where it is part of the loss expression. Onset: the
        step at which it was seen.

    Thresholds:
        The operation and its operand were seen, not inferred: ln 1000 = 7.

    Fixes:
        skip_nonfinite_step keeps the weights; rollback where they are lost already. The operation itself is changed
        in the source.

    References:
        Nix and Weigend 1994 (mean and variance networks). Seitzer et al. 2022, arXiv:2203.09168 (pitfalls of
        heteroscedastic likelihoods).
    """

    code = "unbounded_variance"
    title = "A predicted scale has run away"
    prior = 0.02

    def consider(self, series: Series) -> Case | None:
        """Weigh the operation that was seen to make the first NaN."""
        found = born_as(series, "unbounded_variance")
        if found is None:
            return None
        return birth_case(
            series,
            found,
            SEEN,
            "Nothing in the loss keeps the predicted scale within what a float can hold.",
            "Bound what the scale is computed from, log_var.clamp(-10, 10) or softplus(raw) + 1e-3, "
            "or use F.gaussian_nll_loss, which keeps the variance above eps.",
        )
