"""What several causes read from a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gradtracer.records import (
    Evidence,
    FixSuggestion,
    InterventionState,
    LayerInfo,
    Measure,
    OptimizerDescription,
    ParameterScalar,
    ParameterValue,
    SemanticEvent,
    Severity,
    SourceLocation,
)
from gradtracer.series import Series


def warnings_of(series: Series, *kinds: str) -> list[SemanticEvent]:
    """Events of these detectors that cost something, by first step."""
    return series.events_of(*kinds, min_severity=Severity.WARNING)


def first_step(events: Iterable[SemanticEvent]) -> float:
    """First step of the earliest event; infinity where there is none."""
    return min((event.step for event in events), default=math.inf)


def event_ids(events: Iterable[SemanticEvent]) -> tuple[str, ...]:
    """Ids in order of time."""
    return tuple(e.id for e in sorted(events, key=lambda e: (e.step, _number(e.id))))


def evidence(
    statement: str, ratio: float, *, events: Sequence[SemanticEvent] = (), measures: Sequence[Measure] = ()
) -> Evidence:
    """A piece of evidence; by default with the measures of its first event."""
    return Evidence(
        statement=statement,
        log_likelihood_ratio=ratio,
        measures=tuple(measures) or (events[0].evidence if events else ()),
        event_ids=event_ids(events),
    )


def fix(code: str, effect: str, *, rollback_first: bool = False, **parameters: ParameterScalar) -> FixSuggestion:
    """A suggestion with its parameters."""
    return FixSuggestion(
        fix=code,
        rollback_first=rollback_first,
        parameters=tuple(ParameterValue(name=n, value=v) for n, v in parameters.items()),
        expected_effect=effect,
    )


def joined(layers: Iterable[str]) -> str | None:
    """Layers as a fix takes them; None, which stands for all, where they are too many for a parameter."""
    names = ", ".join(layers)
    return names if 0 < len(names) <= 2000 else None


@dataclass(frozen=True)
class RateJump:
    """The learning rate rose at once."""

    step: int
    before: float
    after: float


def rate_jump(series: Series, step: float, *, window: int = 10, factor: float = 5.0) -> RateJump | None:
    """The largest rise of the learning rate, by `factor` or more, in the `window` steps up to `step`.

    A schedule that warms up or restarts rises too; it rises by less within one step, or comes back to where it has
    been: a rate that the run has already trained at is no jump.
    """
    steps, rates = series.steps, series.run("learning_rate")
    found: RateJump | None = None
    for i in range(1, len(steps)):
        if not step - window <= steps[i] <= step:
            continue
        before, after = float(rates[i - 1]), float(rates[i])
        known = float(np.nanmax(rates[:i])) if np.isfinite(rates[:i]).any() else math.inf
        if before > 0 and after >= factor * max(before, known) and (not found or after / before > found.after):
            found = RateJump(int(steps[i]), before, after)
    return found


def rate_at(series: Series, step: float) -> float:
    """The learning rate at a step, or the nearest recorded one before it; NaN where there is none."""
    rates = series.run("learning_rate")
    known = np.flatnonzero(np.isfinite(rates) & (series.steps <= step))  # a step without an update has none
    return float(rates[known[-1]]) if len(known) else math.nan


def last_rate(series: Series) -> float:
    """The learning rate now; NaN where it was not recorded."""
    return rate_at(series, math.inf)


def usual_grad_norm(series: Series, before: float) -> float:
    """Median norm of the whole gradient before a step; NaN with fewer than 5 finite values."""
    norms = series.run("grad_norm")[series.steps < before]
    norms = norms[np.isfinite(norms) & (norms > 0)]
    return float(np.median(norms)) if len(norms) >= 5 else math.nan


def weights_are_damaged(series: Series, since: float) -> bool:
    """Whether weights hold non-finite values, or the loss is now above all it was before the step.

    Going on from such weights is no use; a snapshot from before is.
    """
    if non_finite_weights(series):
        return True
    steps, losses = series.steps, series.run("loss")
    # The loss of the first step is that of the initial weights, whatever its update did to them.
    before, now = losses[steps < max(since, 1)], losses[1:][-5:]
    before = before[np.isfinite(before)]
    if not len(now) or np.isnan(now).all():
        return False
    if np.isinf(now).any():
        return True
    return bool(len(before) and np.nanmedian(now) > before.max())


def non_finite_weights(series: Series) -> bool:
    """Whether weights are not finite, by the last sampled step, or by the update that came last."""
    protected = any(i.fix == "skip_nonfinite_step" and i.state in _IN_FORCE for i in series.interventions)
    if np.isinf(series.run("grad_norm")[-1:]).any() and not protected:
        return True  # an optimizer has just used such a gradient
    for _, table in series.tables[-1:]:
        if any(n > 0 for n in table.signal("num_non_finite_weight").values()):
            return True
        if any(math.isinf(ratio) for ratio in table.signal("update_ratio").values()):
            return True
    return False


_IN_FORCE = (InterventionState.APPLIED, InterventionState.KEPT)


def layer_info(series: Series, layer: str | None) -> LayerInfo | None:
    """The description of a layer."""
    model = series.model
    return next((info for info in model.layers if info.name == layer), None) if model and layer else None


_FAULTS_OF_THE_PROGRAM = {
    "gradients_never_cleared": -6.0,
    "gradients_still_scaled": -6.0,
    "weights_too_large": -6.0,
    "epsilon_underflows": -6.0,
    "half_precision_overflow": -5.0,
    "accumulation_not_averaged": -5.0,
    "optimizer_state_lost": -4.0,
}


def outdone_by_the_program(series: Series, began: float) -> list[Evidence]:
    """What speaks against a cause of overshooting: a fact about the program that makes steps too large by itself.

    Args:
        series: The run.
        began: First step of the symptoms; what was found later is no reason for them.
    """
    found = [f for f in series.audit(*_FAULTS_OF_THE_PROGRAM) if f.step <= began + 1]
    worst = min(found, key=lambda f: _FAULTS_OF_THE_PROGRAM[f.code], default=None)
    if worst is not None:
        return [evidence(worst.detail, _FAULTS_OF_THE_PROGRAM[worst.code], measures=worst.measures)]
    multiplied = next(iter(series.audit("loss_multiplied")), None)
    rates = series.run("learning_rate")
    rates = rates[np.isfinite(rates)]
    if multiplied is None or not len(rates) or rates.max() > USUAL_RATE or _scale_does_not_matter(series):
        return []
    statement = f"{multiplied.detail} At a rate of {rates[0]:.3g} it is this factor that makes steps too large."
    return [evidence(statement, -4.0, measures=multiplied.measures)]


USUAL_RATE = 0.1
"""Plain gradient descent on a mean loss is seldom meant to go faster."""


def _scale_does_not_matter(series: Series) -> bool:
    optimizer = series.last_observation(OptimizerDescription)
    return optimizer is None or ignores_scale(optimizer.type)


def ignores_scale(optimizer: str) -> bool:
    """Whether updates of this class of optimizer do not depend on the scale of the gradient."""
    return any(word in optimizer for word in _SCALE_FREE)


_SCALE_FREE = ("Adam", "RMSprop", "Adagrad", "Adadelta", "Lion", "Rprop", "LAMB", "LARS", "Adafactor")


def hyperparameter(series: Series, name: str) -> float | None:
    """The largest value of a hyperparameter over the groups of the optimizer; None where it has none."""
    optimizer = series.last_observation(OptimizerDescription)
    values = [
        float(p.value)
        for group in (optimizer.groups if optimizer else ())
        for p in group.hyperparameters
        if p.name == name and isinstance(p.value, (int, float))
    ]
    return max(values, default=None)


def source_of(series: Series, layer: str | None) -> SourceLocation | None:
    """Where the layer stands in the user's program, else where the model does."""
    info = layer_info(series, layer)
    if info and info.source:
        return info.source
    return series.model.source if series.model else None


def loss_source(series: Series) -> SourceLocation | None:
    """Where the user's program computes the loss, else where its model stands."""
    model = series.model
    return (model.loss_source or model.source) if model else None


def optimizer_source(series: Series) -> SourceLocation | None:
    """Where the user's program builds the optimizer; None where it builds several, or that is not known."""
    found = [o.source for o in series.observations if isinstance(o, OptimizerDescription)]
    return found[0] if found and all(source == found[0] for source in found) else None


def in_forward_order(series: Series, layers: Iterable[str]) -> list[str]:
    """The layers from input to output."""
    known = {name: i for i, name in enumerate(series.layers)}
    return sorted(dict.fromkeys(layers), key=lambda name: known.get(name, len(known)))


def rounded(value: float) -> float:
    """Two significant digits: a suggestion is no measurement."""
    return float(f"{value:.2g}")


def _number(event_id: str) -> int:
    digits = "".join(c for c in event_id if c.isdigit())
    return int(digits) if digits else 0
