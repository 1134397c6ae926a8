"""The data are not finite."""

from __future__ import annotations

import numpy as np

from gradtracer.causes._born import birth_fixes
from gradtracer.causes._reading import (
    event_ids,
    evidence,
    fix,
    in_forward_order,
    non_finite_weights,
    usual_grad_norm,
    warnings_of,
)
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence, FixSuggestion, Measure, NonFiniteOrigin, SemanticEvent
from gradtracer.series import Series


@CAUSES.register
class NanInData(Cause):
    """A batch holds NaN or infinity, in its inputs or targets, or becomes so in preprocessing.

    What:
        Values that were not finite before the first layer saw them.

    Why:
        One such row makes loss and gradient NaN, and the next update every weight.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the capture saw non-finite values in a tensor that no layer had
        computed: +7, or saw them begin elsewhere: -6; without that, the first layer's output is the first that is not
        finite, with finite weights: +2; the gradient norm before was within a factor of 10 of its usual value, so
        nothing was growing: +1, or beyond: -2; updates overshot or the gradient exploded before: -3.
        Root: the first layer that received them. Onset: the step at which they came.

    Thresholds:
        The origin is seen, not inferred: ln 1000 = 7 leaves room for a constant of the model that is not finite. Data
        come without a warning, a blow-up announces itself over some steps: factors of 3 to 20.

    Fixes:
        skip_nonfinite_step, so that such a batch changes nothing; impute_inputs, which comes first where a tenth of the
        batches (and three of them) would be lost. From a rollback where the weights are already lost.

    References:
        IEEE 754-2019, section 6.2 (NaN propagates).
    """

    code = "nan_in_data"
    title = "The data hold NaN or infinity"
    prior = 0.06

    FREQUENT, FREQUENT_SHARE = 3, 0.1

    def consider(self, series: Series) -> Case | None:
        """Weigh where non-finite numbers began."""
        events = warnings_of(series, "non_finite")
        origin = next((o for o in series.observations if isinstance(o, NonFiniteOrigin)), None)
        if not events and origin is None:
            return None
        began = origin.step if origin else events[0].step
        first_layer = next((info.name for info in series.model.layers if info.num_parameters), None) if (
            series.model
        ) else None  # fmt: skip
        receiver = self._first_receiver(series, began) or first_layer
        found = self._origin(origin, events, receiver, first_layer)
        if found is None:
            return None
        layer = (origin.layer if origin else None) or receiver
        found.extend(self._before(series, began))
        return Case(
            evidence=found,
            layer=layer,
            onset_step=began,
            explanation=f"The batch of step {began} held values that are not finite"
            + (f"; {layer} is the first layer that received them." if layer else ".")
            + (" The update that followed made the weights non-finite too." if non_finite_weights(series) else ""),
            affected_layers=(layer,) if layer else (),
            event_ids=event_ids(events),
            source=origin.source if origin else None,
            advice="Find the rows (torch.isfinite on inputs and targets of this batch) and drop or impute them where "
            "the data are loaded; look for a division by a standard deviation of zero in the preprocessing.",
            fixes=self._fixes(series, layer, began),
        )

    def _fixes(self, series: Series, layer: str | None, began: int) -> tuple[FixSuggestion, ...]:
        effect = "The layer receives the mean of the column where a number is missing, and no row is lost."
        impute = fix("impute_inputs", effect, rollback_first=non_finite_weights(series), layer=layer)
        bad = np.isinf(series.run("loss")[series.steps >= began])
        is_frequent = bad.sum() >= self.FREQUENT and bad.mean() >= self.FREQUENT_SHARE
        return (impute, *birth_fixes(series)) if is_frequent else (*birth_fixes(series), impute)

    def _origin(
        self, origin: NonFiniteOrigin | None, events: list[SemanticEvent], receiver: str | None, first: str | None
    ) -> list[Evidence] | None:
        if origin is not None:
            measure = Measure(name="elements", value=None, num_non_finite=origin.num_non_finite)
            if origin.where == "data":
                return [evidence(origin.detail or "The batch is not finite.", 7.0, events=events, measures=[measure])]
            statement = f"Non-finite values were first seen elsewhere: {origin.where}"
            return [evidence(statement + (f" at {origin.layer}." if origin.layer else "."), -6.0, measures=[measure])]
        if not events or events[0].to_state != "non_finite_forward" or receiver is None or receiver != first:
            return None
        return [evidence(f"{receiver} is the first layer and the first with a non-finite output.", 2.0, events=events)]

    def _before(self, series: Series, began: int) -> list[Evidence]:
        found: list[Evidence] = []
        earlier = [e for e in warnings_of(series, "update_ratio_too_high", "exploding_gradient") if e.step < began]
        if earlier:
            found.append(evidence(earlier[0].message, -3.0, events=earlier))
        usual = usual_grad_norm(series, began)
        norms = series.run("grad_norm")[series.steps < began][-3:]
        norms = norms[np.isfinite(norms)]
        if np.isfinite(usual) and len(norms):
            calm = float(norms.max()) <= 10 * usual
            measure = Measure(name="grad_norm", value=float(norms.max()), baseline=usual)
            statement = "Up to the step before, the gradient was as usual." if calm else "The gradient grew before."
            found.append(evidence(statement, 1.0 if calm else -2.0, measures=[measure]))
        return found

    def _first_receiver(self, series: Series, step: int) -> str | None:
        for found, table in series.tables:
            if found >= step:
                layers = [n for n, count in table.signal("num_non_finite_activation").items() if count > 0]
                if layers:
                    return in_forward_order(series, layers)[0]
        return None
