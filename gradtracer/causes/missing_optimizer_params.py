"""Parameters that no optimizer holds."""

from __future__ import annotations

import numpy as np

from gradtracer.causes._reading import (
    event_ids,
    evidence,
    fix,
    in_forward_order,
    optimizer_source,
    source_of,
    warnings_of,
)
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence, Measure, OptimizerDescription
from gradtracer.series import Series


@CAUSES.register
class MissingOptimizerParams(Cause):
    """Trainable parameters were never given to an optimizer.

    What:
        Layers whose parameters receive gradients that nothing applies: a head that was added after the optimizer was
        built, a group that was left out, a layer that was replaced while the optimizer holds the old one.

    Why:
        The loss still falls on account of the others, so the run looks slow and not broken.

    Definition:
        Evidence, with its log-likelihood ratio in nats: parameters with a gradient that no optimizer holds: +5; their
        weights are the same at all sampled steps: +1.5, or they change: -6 (something else updates them); an optimizer
        holds parameters that the model does not: +1.
        Root: the first of these layers in forward order. Onset: step 0.

    Thresholds:
        Who leaves a layer out on purpose freezes it, and then it has no gradient; a gradient without an optimizer is on
        purpose in perhaps one run of a hundred and fifty: ln 150 = 5.

    Fixes:
        add_missing_parameters. In the source: pass the parameters to the optimizer.

    References:
        PyTorch documentation, torch.optim, "Constructing it" and "Per-parameter options".
    """

    code = "missing_optimizer_params"
    title = "Parameters are missing from the optimizer"
    prior = 0.04

    def consider(self, series: Series) -> Case | None:
        """Weigh parameters that have a gradient and no optimizer."""
        optimizer = series.last_observation(OptimizerDescription)
        events = warnings_of(series, "untrained_parameters")
        if optimizer is None or not optimizer.missing or not events:
            return None
        layers = in_forward_order(series, (name.rpartition(".")[0] or "(root)" for name in optimizer.missing))
        root = layers[0]
        shown = ", ".join(optimizer.missing[:4]) + (" and more" if len(optimizer.missing) > 4 else "")
        measure = Measure(name="num_missing_parameters", value=float(len(optimizer.missing)), unit="tensors")
        found = [evidence(f"No optimizer holds {shown}.", 5.0, events=events, measures=[measure])]
        found.extend(self._unchanged(series, layers))
        if optimizer.num_foreign:
            measure = Measure(name="num_foreign_parameters", value=float(optimizer.num_foreign), unit="tensors")
            statement = "The optimizer holds parameters that the model does not have: perhaps of layers since replaced."
            found.append(evidence(statement, 1.0, measures=[measure]))
        return Case(
            evidence=found,
            layer=root,
            onset_step=0,
            explanation=f"{', '.join(layers[:4])}: gradients arrive at every step, but {optimizer.type} was not given "
            f"{shown}, so the initial values stay.",
            affected_layers=tuple(layers),
            event_ids=event_ids(events),
            source=optimizer_source(series) or source_of(series, root),
            advice=f"Pass them where the optimizer is built, e.g. {optimizer.type}(model.parameters(), ...), or "
            "optimizer.add_param_group({'params': ...}); build it after all layers are in place. If they are meant to "
            "stay as they are, set requires_grad=False.",
            fixes=(fix("add_missing_parameters", "They train with the others, at the rate of the largest group."),),
        )

    def _unchanged(self, series: Series, layers: list[str]) -> list[Evidence]:
        spreads: list[float] = []
        for layer in layers:
            _, norms = series.layer(layer, "weight_norm")
            if len(norms) > 1 and np.isfinite(norms).all() and norms.max() > 0:
                spreads.append(float(np.ptp(norms) / norms.max()))
        if not spreads:
            return []
        spread = max(spreads)
        measure = Measure(name="relative_spread_of_weight_norm", value=spread, threshold=1e-6)
        # float32 norms of equal weights are equal; a reduction in another order moves the last digits.
        if spread <= 1e-6:
            return [evidence("Their weights have not changed in any sampled step.", 1.5, measures=[measure])]
        return [evidence("Their weights change all the same.", -6.0, measures=[measure])]
