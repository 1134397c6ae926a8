"""A division met zero."""

from __future__ import annotations

from gradtracer.causes._born import SEEN, birth_case, born_as
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class DivisionByZero(Cause):
    """A quotient received a divisor that had reached 0.

    What:
        A normalisation by a sum, a norm, a spread or a target that is 0 for some row; 1 / sqrt(x) or a negative power
        at 0.

    Why:
        0 / 0 is NaN and x / 0 infinite; one such row spoils the mean over all of them.

    Definition:
        Evidence, with its log-likelihood ratio in nats: of the loss's graph, in forward order, a division,
        reciprocal, reciprocal root or negative power is the first operation that receives a 0 to divide by: +7; a sum
        is divided by a constant 0, which may as well be called a mean over nothing: +5.5. Root: the module that the
        operation stands in, none where it is part of the loss expression. Onset: the step at which it was seen.

    Thresholds:
        The operation and its operand were seen, not inferred: ln 1000 = 7. A sum over a count of 0 is called a mean
        over nothing by three of four who report it: ln 4 less.

    Fixes:
        skip_nonfinite_step keeps the weights; rollback where they are lost already. The operation itself is changed
        in the source.

    References:
        IEEE 754-2019, section 7.3 (division by zero).
    """

    code = "division_by_zero"
    title = "A division by a value that reached 0"
    prior = 0.03

    def consider(self, series: Series) -> Case | None:
        """Weigh the operation that was seen to make the first NaN."""
        found = born_as(series, "division_by_zero", "sum_over_zero")
        if found is None:
            return None
        is_division = found.code == "division_by_zero"
        return birth_case(
            series,
            found,
            SEEN if is_division else SEEN - 1.5,
            "The quotient is infinite or NaN.",
            "Keep the divisor away from 0 where it is computed: divide by x.clamp_min(eps), add eps "
            "under the root, or leave such rows out of the mean.",
        )
