"""A power met zero."""

from __future__ import annotations

from gradtracer.causes._born import SEEN, birth_case, born_as
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class NanGradientPow(Cause):
    """A power with an exponent below 1 received 0 as its base, or a fractional one a base below 0.

    What:
        x ** 0.5, x ** 0.75, generalised means and focal or gamma corrections at x = 0.

    Why:
        The slope p x^(p - 1) is infinite at 0 while the value is 0, so the loss is finite and the gradient is not.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the loss is finite, the gradient is not, and a power held at
        this step received 0 with an exponent between 0 and 1; or a fractional power received a base below 0: +7.
        Root: the module that the operation stands in, none where it is part of the loss expression. Onset: the step
        at which it was seen.

    Thresholds:
        The operation and its operand were seen, not inferred: ln 1000 = 7.

    Fixes:
        skip_nonfinite_step keeps the weights; rollback where they are lost already. The operation itself is changed
        in the source.

    References:
        PyTorch documentation, torch.pow; d x^p / dx = p x^(p - 1).
    """

    code = "nan_gradient_pow"
    title = "The gradient of a power at 0"
    prior = 0.02

    def consider(self, series: Series) -> Case | None:
        """Weigh the operation that was seen to make the first NaN."""
        found = born_as(series, "nan_gradient_pow")
        if found is None:
            return None
        return birth_case(
            series,
            found,
            SEEN,
            "The power has no finite slope there.",
            "Keep the base above 0 where the power is taken: x.clamp_min(1e-6) ** p, or (x + 1e-6) ** p.",
        )
