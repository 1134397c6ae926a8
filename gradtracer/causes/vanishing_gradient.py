"""The gradient vanishes on its way to the input."""

from __future__ import annotations

import numpy as np

from gradtracer.causes._reading import event_ids, evidence, fix, in_forward_order, source_of, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence, Measure
from gradtracer.series import Series

_SATURATING = ("Sigmoid", "Tanh", "Softsign", "Hardsigmoid", "Hardtanh")


@CAUSES.register
class VanishingGradientCause(Cause):
    """Each layer passes on a fraction of the gradient, so that the first layers receive next to none.

    What:
        Depth, saturating activations or weights that are too small multiply the gradient by a factor below one, layer
        after layer.

    Why:
        The first layers keep their random weights; the later ones learn what can be learned from random features.

    Definition:
        Evidence, with its log-likelihood ratio in nats: layers faded (vanishing_gradient): +5; the activations between
        them saturate by their type (sigmoid, tanh): +1.5, or there are none of these: -0.5; more than half of their
        outputs are within 1 % of a bound: +1; the loss has lost less than a tenth of its first value: +1, or it fell by
        more than half: -1.5; rectifiers died: -3; it began after step 10, and the first updates had thrown the model
        off (unsettled_start): -5.
        Root: of the layers that faded first, the one that receives least, which is the one nearest to the input: no
        single layer makes the fade, and this one's weights stand still longest. Affected: the others in the order from
        there to the output.

    Thresholds:
        The rule needs a fade over the depth and layers that stand still; without this cause both together are rare:
        ln 150 = 5. Saturating activations are in nearly all such runs and in a fifth of others: ln 5. Dead rectifiers
        make a similar profile and explain it better.

    Fixes:
        layer_scale_init with centred units: with orthonormal weights, or keeping the weights' directions.

    References:
        Hochreiter 1991, chapter 4. Glorot & Bengio 2010. He, Zhang, Ren, Sun 2016, arXiv:1512.03385 (residual paths).
    """

    code = "vanishing_gradient"
    title = "The gradient vanishes with depth"
    prior = 0.06

    FIRST_STEPS = 10

    def consider(self, series: Series) -> Case | None:
        """Weigh layers that the gradient does not reach."""
        events = warnings_of(series, "vanishing_gradient")
        if not events:
            return None
        began = min(e.step for e in events)
        layers = in_forward_order(series, (e.layer for e in events if e.layer))
        first = {e.layer for e in events if e.step == began}
        root = next((layer for layer in layers if layer in first), None)
        affected = tuple(sorted(layers, key=lambda layer: (layer != root, layers.index(layer))))
        root_event = next(e for e in events if e.layer == root)
        found = [evidence(root_event.message, 5.0, events=[root_event])]
        types = [layer.type for layer in series.model.layers] if series.model else []
        saturating = sorted({t for t in types if any(word in t for word in _SATURATING)})
        if saturating:
            found.append(evidence(f"The activations are of a saturating kind: {', '.join(saturating)}.", 1.5))
        elif types:
            found.append(evidence("The model has no module of a saturating activation.", -0.5))
        found.extend(self._saturation(series))
        found.extend(self._progress(series))
        thrown = warnings_of(series, "unsettled_start")
        if thrown and began >= self.FIRST_STEPS:
            found.append(evidence(thrown[0].message, -5.0, events=thrown))
        if dead := warnings_of(series, "dead_units"):
            found.append(evidence(dead[0].message, -3.0, events=dead))
        kind = f"the {saturating[0]} activations" if saturating else "the layers"
        return Case(
            evidence=found,
            layer=root,
            onset_step=began,
            explanation=f"On the way from the loss to {root} {kind} take away a part of the gradient at each of "
            f"{len(series.model.layers) if series.model else len(layers)} modules. {root_event.message} "
            f"{len(affected)} layers stand still and keep their initial weights.",
            affected_layers=affected,
            event_ids=event_ids(events),
            source=source_of(series, root),
            advice="Use ReLU or GELU in place of sigmoid or tanh, and put a normalisation or a residual connection "
            "around each block; initialise by He (rectifiers) or Glorot with the gain of the activation (tanh: 5/3).",
            fixes=tuple(
                fix(
                    "layer_scale_init",
                    "Activations lie where they have a slope, and no layer shrinks the gradient.",
                    centre=True,
                    orthonormal=orthonormal,
                )
                for orthonormal in (True, False)
            ),
        )

    def _saturation(self, series: Series) -> list[Evidence]:
        found = series.table_at()
        shares = list(found[1].signal("saturated_fraction").values()) if found else []
        if not shares or np.median(shares) <= 0.5:
            return []
        measure = Measure(name="saturated_fraction", value=float(np.median(shares)), threshold=0.5)
        return [evidence("More than half of the activations' outputs are at a bound.", 1.0, measures=[measure])]

    def _progress(self, series: Series) -> list[Evidence]:
        losses = series.run("loss")
        losses = losses[np.isfinite(losses)]
        if len(losses) < 20:
            return []
        first, now = float(np.median(losses[:5])), float(np.median(losses[-5:]))
        measure = Measure(name="loss", value=now, baseline=first)
        if first - now < 0.1 * abs(first):
            return [evidence("The loss has hardly fallen since the start.", 1.0, measures=[measure])]
        if first - now > 0.5 * abs(first):
            return [evidence("The loss has fallen by more than half all the same.", -1.5, measures=[measure])]
        return []
