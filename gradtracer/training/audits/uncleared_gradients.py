"""Gradients of the step before still stand when backward runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, Measure, Severity, SourceLocation
from gradtracer.training.audits._sampling import Later, has_dense_gradient, parameters_of, spread, thin
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph
from gradtracer.training.stack import calling_line

_NUM_PARAMETERS = 3


@dataclass
class _Consumed:
    """The gradient that an optimizer has last used, and what stood in its place at each backward call since."""

    parameters: list[nn.Parameter]
    sample: Tensor
    stands: list[Tensor | bool] = field(default_factory=list)
    streak: int = 0
    since: int = 0
    first: int | None = None
    """The first step at which the gradient was not cleared."""
    num_cleared_after_streak: int = 0
    called_from: SourceLocation | None = None
    """Where backward was called while the gradient stood."""


@AUDITS.register
class UnclearedGradients(Audit):
    """Whether the gradient that an optimizer has used is cleared before the next one is added to it.

    What:
        Optimizers that use the sum of all gradients so far, because nobody calls `zero_grad`.

    Why:
        Every step then goes along a sum over the past, which grows, overshoots and oscillates.

    Definition:
        A thin sample of the gradients that stand after an update is kept. The gradient is uncleared at the next update
        if, at the first backward call after it, exactly these numbers stand (and not all are 0), and at no later
        backward call before the next update an empty or zero gradient stands. Gradients that are thrown away before the
        optimizer's own backward (those a generator's loss leaves in the discriminator) are cleared in this sense.
        gradients_never_cleared (`warning`): so at three updates of one optimizer in a row.
        gradients_cleared_rarely (`info`): after such a row they were cleared, twice.

    Thresholds:
        Two gradients in a row that agree in every bit are the same gradient; three updates in a row leave out a loop
        that gives one step two losses.

    Fixes:
        None that is live: call optimizer.zero_grad() before backward, once an update.

    References:
        PyTorch documentation, torch.optim.Optimizer.zero_grad.
    """

    code = "uncleared_gradients"
    every_step = True

    IN_A_ROW = 3

    def __init__(self) -> None:
        self._consumed: dict[int, _Consumed] = {}
        self._verdicts: Later[tuple[int, int]] = Later()

    def on_gap(self) -> None:
        """What was used before the gap is no neighbour of what stands now."""
        self._consumed.clear()

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Look at what stands where the new gradient will be added."""
        for consumed in self._consumed.values():
            if consumed.streak and consumed.called_from is None:
                consumed.called_from = calling_line("backward")
            if not all(has_dense_gradient(p) for p in consumed.parameters):
                consumed.stands.append(False)
                continue
            now = _sample(consumed.parameters)
            stands = (now != 0).any()
            if not consumed.stands:
                stands = stands & (now == consumed.sample).all() if now.shape == consumed.sample.shape else False
            consumed.stands.append(stands)
        return ()

    def on_gradients(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Judge the way from the last update to this one."""
        consumed = self._consumed.get(id(optimizer))
        if consumed is not None and consumed.stands:
            key = (id(optimizer), context.step)
            if any(s is False for s in consumed.stands):
                self._verdicts.put(key, torch.tensor(False))
            else:
                self._verdicts.put(key, torch.stack([torch.as_tensor(s) for s in consumed.stands]).all())
        for (number, step), uncleared in self._verdicts.take():
            if number in self._consumed:
                yield from self._judge(context, self._consumed[number], step, bool(uncleared))

    def on_update(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Keep what was used."""
        consumed = self._consumed.get(id(optimizer))
        if consumed is not None and all(has_dense_gradient(p) for p in consumed.parameters):
            parameters = consumed.parameters
        else:
            parameters = spread([p for p in parameters_of(optimizer) if has_dense_gradient(p)], _NUM_PARAMETERS)
        if not parameters:
            self._consumed.pop(id(optimizer), None)
        elif consumed is None:
            self._consumed[id(optimizer)] = _Consumed(parameters, _sample(parameters))
        else:
            consumed.parameters, consumed.sample = parameters, _sample(parameters)
            consumed.stands = []
        return ()

    def _judge(self, context: AuditContext, consumed: _Consumed, step: int, uncleared: bool) -> Iterable[AuditFinding]:
        if not uncleared:
            consumed.num_cleared_after_streak += consumed.streak > 0
            consumed.streak = 0
            if consumed.num_cleared_after_streak == 2:
                yield finding(
                    context,
                    "gradients_cleared_rarely",
                    "Gradients are cleared at some updates and not at others.",
                    severity=Severity.INFO,
                    source=consumed.called_from,
                ).model_copy(update={"step": consumed.first or 0})
            return
        if consumed.streak == 0:
            consumed.since = step
            consumed.first = step if consumed.first is None else consumed.first
        consumed.streak += 1
        if consumed.streak == self.IN_A_ROW:
            found = finding(
                context,
                "gradients_never_cleared",
                f"From step {consumed.since} on the gradient that the optimizer had used still stood when backward "
                "added the next one to it.",
                measures=[Measure(name="num_updates", value=float(self.IN_A_ROW), threshold=float(self.IN_A_ROW))],
                source=consumed.called_from,
            )
            yield found.model_copy(update={"step": consumed.since})


def _sample(parameters: list[nn.Parameter]) -> Tensor:
    samples = [thin(p.grad) for p in parameters if p.grad is not None]
    first = samples[0]
    return torch.cat([s.to(first.device, torch.float32) for s in samples])
