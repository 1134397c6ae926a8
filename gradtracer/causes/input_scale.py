"""Inputs or targets far from unit scale."""

from __future__ import annotations

import math

import numpy as np

from gradtracer.causes._reading import event_ids, evidence, fix, rate_jump, source_of, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Measure
from gradtracer.series import Series


@CAUSES.register
class InputScale(Cause):
    """Inputs or targets are far from unit scale, and the first steps blow up on them.

    What:
        Raw features in their own units (a population, a price, a pixel of 0 to 255) in a model made for unit scale.

    Why:
        The gradient of a layer grows with its input, and where the model squares it with its square: a rate that is
        ordinary elsewhere overshoots at once, or a bounded activation saturates.

    Definition:
        Considered where the run broke (divergence, loss_spike, non_finite, exploding_gradient, update_ratio_too_high)
        within 20 steps of its start without a jump of the rate, or first activations are saturated. Evidence, with its
        log-likelihood ratio in nats: that: +4; the input's root mean square is 100 or more: +5, 10 or more: +2, else
        -4 (the same for targets, where they alone are large); one layer has 90 % of the squared gradient: +1; the rate
        is at most 0.01: +1; no update was ever made: -5 (a loss scaler skips what overflows in half precision).
        Root: the layer with the largest gradient at the first step. Onset: the first step that broke.

    Thresholds:
        Standardised inputs have 1, images 0.5, raw ones 100 and more. With a root mean square of s the largest stable
        rate of a linear layer is 2 / s^2 times a constant: at 100 no usual rate is stable (LeCun et al. 1998). Of the
        runs that overshoot by their rate alone one in 150 has such inputs: 5 = ln 150. Large inputs by themselves are
        nothing: without damage the cause is not considered.

    Fixes:
        standardize_inputs, from the weights of the start, or with layers drawn anew. For targets only the source: a
        lower rate alone leaves columns of small scale without learning.

    References:
        LeCun, Bottou, Orr, Mueller 1998, Efficient BackProp, section 4.3 and 4.7.
    """

    code = "input_scale"
    title = "Inputs or targets are far from unit scale"
    prior = 0.02

    EARLY = 20

    def consider(self, series: Series) -> Case | None:
        """Weigh the scale of the inputs against what broke."""
        broken = [
            e
            for e in warnings_of(
                series, "divergence", "loss_spike", "non_finite", "exploding_gradient", "update_ratio_too_high"
            )
            if e.step <= self.EARLY
        ]
        saturated = self._saturated(series)
        inputs, targets = self._level(series, "(input)", "input_rms"), self._level(series, "(loss)", "target_rms")
        largest = max(inputs, targets)
        if (not broken and not saturated) or largest < 10:
            return None
        if broken and rate_jump(series, broken[0].step) is not None:
            return None
        what = "input" if inputs >= targets else "target"
        measures = [Measure(name=f"{what}_rms", value=largest, baseline=1.0)]
        first = f"The run broke at step {broken[0].step}, in its first steps." if broken else saturated
        found = [
            evidence(first, 4.0, events=broken[:1]),
            evidence(
                f"The {what}s have a root mean square of {largest:.3g}.", 5.0 if largest >= 100 else 2.0,
                measures=measures,
            ),
        ]  # fmt: skip
        layer, share = self._dominating(series)
        if layer and share >= 0.9:
            found.append(evidence(f"{layer} has {share:.0%} of the squared gradient at the first step.", 1.0))
        updates = [v for _, table in series.tables for v in table.signal("update_ratio").values()]
        if not updates:
            found.append(evidence("No update was made, as where a loss scaler skips them.", -5.0))
        rates = series.run("learning_rate")
        if len(rates) and rates[0] <= 0.01:
            found.append(evidence(f"The learning rate of {rates[0]:.3g} is an ordinary one.", 1.0))
        return Case(
            evidence=found,
            layer=layer,
            onset_step=broken[0].step if broken else 0,
            explanation=f"The {what}s are about {largest:.2g} in size; gradients grow with them (with their square "
            "where they are squared), and the first updates overshoot.",
            event_ids=event_ids(broken),
            source=source_of(series, layer),
            advice=f"Standardise the {what}s: subtract the mean and divide by the standard deviation of the training "
            "data, column by column, and clip what lies many deviations out.",
            fixes=(
                fix("standardize_inputs", "The first updates are of a usual size.", rollback_first=True),
                fix("standardize_inputs", "The first updates are of a usual size.", reinitialize=True),
            )
            if what == "input"
            else (),
        )

    def _level(self, series: Series, layer: str, signal: str) -> float:
        _, values = series.layer(layer, signal)
        values = values[np.isfinite(values)][:10]
        return float(np.median(values)) if len(values) else 0.0

    def _dominating(self, series: Series) -> tuple[str | None, float]:
        for _, table in series.tables:
            norms = {n: v for n, v in table.signal("grad_norm").items() if math.isfinite(v)}
            total = sum(v * v for v in norms.values())
            if total > 0:
                layer = max(norms, key=norms.__getitem__)
                return layer, norms[layer] ** 2 / total
        return None, 0.0

    def _saturated(self, series: Series) -> str:
        for layer in series.layers:
            steps, values = series.layer(layer, "saturated_fraction")
            early = values[steps <= self.EARLY]
            if len(values):
                if len(early) >= 3 and float(np.median(early)) >= 0.9:
                    return f"{float(np.median(early)):.0%} of the outputs of {layer} are at their bounds at first."
                return ""
        return ""
