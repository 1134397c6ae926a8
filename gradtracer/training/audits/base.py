"""What an audit is: a look at what numbers alone don't show, at sampled steps.

An audit sees what others don't: the loss's graph before backward frees it, the inputs of modules, the optimizer's
state, the model on a probe. It puts what it finds on record in one of two forms: an `AuditFinding` (a fact, once per
code and layer) or a number of a signal at this step, which detectors and causes read like any other.

Audits run in the training thread, so they are bounded in time and change nothing (no random number drawn, no tensor
written). They see sampled steps only, plus the first step at which a loss is not finite; one that costs next to
nothing may ask for every step.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, Measure, Severity, SourceLocation
from gradtracer.registry import Registry
from gradtracer.signals import INPUT_LAYER, LOSS_LAYER
from gradtracer.training.graph import LossGraph
from gradtracer.training.layers import Layer

AUDITS: Registry[type[Audit]]

LOSS, INPUT = LOSS_LAYER, INPUT_LAYER
"""Layer names under which signals of the loss and of the model's input are recorded."""


@dataclass(frozen=True)
class AuditContext:
    """What an audit may look at; valid during one call."""

    step: int
    model: nn.Module
    layers: Sequence[Layer]
    optimizers: Sequence[Optimizer]
    layer_of: dict[int, str]
    """Names of layers by id of parameter."""
    names: dict[int, str]
    """Names of the watched modules by id."""
    loss_fn: Callable[..., Any] | None
    record: Callable[[str, str, Tensor | float], None]
    """``record(layer, signal, value)``: a scalar (on any device) under a signal of `gradtracer.signals`."""
    sampled: bool = True
    """Whether this step is sampled, so that what is recorded goes into its table."""
    silent: Mapping[int, str] = field(default_factory=dict[int, str])
    """By storage address of the output: modules in training mode that ran in this step while gradients were off."""
    kwargs: Mapping[str, Any] | None = None
    """Keyword arguments of the call, in `on_forward`; None where they are not known."""
    waited_s: float | None = None
    """Time from the end of the step before to the first layer that ran in this one; None where that was not seen."""
    computed_s: float | None = None
    """Time since then."""


class Audit(ABC):
    """A stateful look at one run; one instance a tracker. Override what you need.

    The docstring of a subclass is its page: a summary line and the sections What, Why, Definition, Thresholds, Fixes
    and References.
    """

    code: ClassVar[str]
    """Name of the audit and of its file."""
    every_step: ClassVar[bool] = False
    """Whether `on_loss`, `on_backward`, `on_gradients` and `on_update` are called at every step of a run's first 500:
    for what is cheap (some tens of microseconds) and would be missed between samples. `on_gap` tells of steps that
    were left out later."""
    reads_parts: ClassVar[bool] = False
    """Whether it may look where parameters are sharded over ranks: it touches no parameter, gradient or optimizer
    state, which would wait for all ranks, and takes the loss's graph for what it is then: one without parameters."""

    def on_gap(self) -> None:  # noqa: B027
        """Steps were left out since the last call: what compares neighbouring steps begins anew."""

    def on_intervention(self) -> None:  # noqa: B027
        """A fix has changed weights or the optimizer's state: what was known of them is void."""

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """A watched module, or the model itself, has run with gradients (sampled steps, not inside backward)."""
        return ()

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """`backward` is about to run on a loss."""
        return ()

    def on_backward(self, context: AuditContext) -> Iterable[AuditFinding]:
        """`backward` has returned: gradients stand as it left them, still scaled and not yet clipped."""
        return ()

    def on_gradients(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Gradients are final; the optimizer is about to step."""
        return ()

    def on_update(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """The optimizer has stepped."""
        return ()

    def on_step_end(self, context: AuditContext) -> Iterable[AuditFinding]:
        """The sampled step is over; the model may be probed on a copy."""
        return ()


def finding(
    context: AuditContext,
    code: str,
    detail: str,
    *,
    layer: str | None = None,
    severity: Severity = Severity.WARNING,
    measures: Sequence[Measure] = (),
    source: SourceLocation | None = None,
) -> AuditFinding:
    """A finding at the current step.

    Args:
        context: The context of the call.
        code: What was found, e.g. `softmax_into_cross_entropy`; a cause looks for it by this name.
        detail: What was seen, in one sentence with numbers.
        layer: Module path.
        severity: `info` where it is only evidence; `warning` where it is a fault by itself.
        measures: The numbers.
        source: Where it stands in the user's program.
    """
    return AuditFinding(
        step=context.step,
        code=code,
        layer=layer,
        severity=severity,
        measures=tuple(measures),
        source=source,
        detail=detail,
    )


AUDITS = Registry("audit")
