"""How many backward calls an update takes in, and whether they are averaged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, Measure, Severity, SourceLocation
from gradtracer.training.audits._loss_expression import chain, loss_end
from gradtracer.training.audits._sampling import Later, has_dense_gradient, parameters_of, thin
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph
from gradtracer.training.stack import calling_line


@dataclass
class _Window:
    """The backward calls since the last update."""

    chains: list[tuple[str, ...]] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    scaled: bool = False
    num_thrown_away: int = 0
    source: SourceLocation | None = None
    probe: nn.Parameter | None = None
    raw: Tensor | None = None
    """Thin sample of the probe's gradient as the last backward call left it."""


@AUDITS.register
class BackwardCalls(Audit):
    """Counts the backward calls of an update, and tells accumulation that is averaged from a plain sum.

    What:
        Loops that accumulate gradients over several batches, how their losses are scaled, and gradients that are
        cleared before any update has used them.

    Why:
        A sum over k batches is a gradient k times as large; with a rate that was meant for the mean it overshoots.
        Gradients cleared too early make k batches do the work of one.

    Definition:
        k, the backward calls between two updates of the only optimizer that steps (a count), where all end in the same
        operations, so that they are one loss on several batches and not several losses. f, the constant by which each
        loss is multiplied at its end; c, by how much gradients were scaled down after the last call and before the
        update. accumulation_not_averaged (`info`): two windows in a row with the same k >= 2 and f c k >= 1.5.
        accumulation_averaged (`info`): the same with less. accumulated_gradients_lost (`warning`): three windows in a
        row with the same k >= 3, and an empty or zero gradient at every call but the first.

    Thresholds:
        1.5 lies between 1 (averaged) and 2 (the smallest sum). A sum is only `info`: with a rate to match it trains
        well; the cause looks at what it did. Two calls with a cleared gradient are a sharpness-aware step, hence 3.

    Fixes:
        set_learning_rate to a k-th as a stopgap. In the source: divide the loss by k before backward.

    References:
        PyTorch documentation, "Automatic mixed precision examples", section "Gradient accumulation".
    """

    code = "backward_calls"
    every_step = True

    AVERAGED = 1.5
    SETTLED = 5

    def __init__(self) -> None:
        self._window = _Window()
        self._inside_step = False
        self._steppers: set[int] = set()
        self._last_count = 0
        self._first_update = 0
        self._num_alike = 0
        self._num_lost = 0
        self._num_single = 0
        self._probe: nn.Parameter | None = None
        self._told: set[tuple[str, int]] = set()
        self._ratios: Later[tuple[int, int, float, SourceLocation | None]] = Later()

    def on_gap(self) -> None:
        """Calls were not counted."""
        self._window = _Window()
        self._num_alike = self._num_lost = self._last_count = 0

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """A backward call of the window."""
        if self._inside_step:
            return ()  # of a closure
        window = self._window
        if not window.chains and self._num_single >= self.SETTLED:
            window.chains.append(())  # one call an update is the rule here: only a second one is looked at
            return ()
        if window.chains and window.probe is not None and not has_dense_gradient(window.probe):
            window.num_thrown_away += 1
        window.chains.append(chain(graph))
        window.scaled |= graph.loss_scale is not None
        window.factors.append(loss_end(graph).factor)
        if window.source is None and len(window.chains) == 2:
            window.source = calling_line("backward")
        return ()

    def on_backward(self, context: AuditContext) -> Iterable[AuditFinding]:
        """Keep the gradient as backward left it."""
        if self._inside_step:
            return ()
        window = self._window
        if window.probe is None and context.optimizers:
            if self._probe is None or not has_dense_gradient(self._probe):
                held = [p for o in context.optimizers for p in parameters_of(o) if has_dense_gradient(p)]
                self._probe = max(held, key=lambda p: p.numel(), default=None)
            window.probe = self._probe
        if len(window.chains) > 1 and window.probe is not None and has_dense_gradient(window.probe):
            assert window.probe.grad is not None
            window.raw = thin(window.probe.grad)
        return ()

    def on_gradients(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """The window is over."""
        self._inside_step = True
        self._steppers.add(id(optimizer))
        window, self._window = self._window, _Window()
        count = len(window.chains)
        self._num_single = self._num_single + 1 if count == 1 else 0
        uniform = count >= 2 and len({c for c in window.chains if c}) == 1 and len(self._steppers) == 1
        if not uniform:
            self._num_alike = self._num_lost = self._last_count = 0
            return
        if count != self._last_count:
            self._last_count, self._first_update, self._num_alike, self._num_lost = count, context.step, 0, 0
        self._num_alike += 1
        self._num_lost = self._num_lost + 1 if window.num_thrown_away == count - 1 and not window.scaled else 0
        if self._num_lost == 3 and count >= 3:
            yield self._lost(context, count, window.source)
        if self._num_alike >= 2 and not window.num_thrown_away:
            self._put(window, count)
        for (_, calls, factor, source), ratio in self._ratios.take():
            yield from self._judge(context, calls, factor * min(float(ratio), 1.0), source)

    def on_update(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """The next window begins."""
        self._inside_step = False
        return ()

    def _put(self, window: _Window, count: int) -> None:
        factor = sum(window.factors) / len(window.factors)
        now = window.probe.grad if window.probe is not None else None
        ratio = torch.tensor(1.0)
        if now is not None and window.raw is not None and not now.is_sparse and not window.scaled:
            ratio = torch.linalg.vector_norm(thin(now).float()) / torch.linalg.vector_norm(window.raw.float())
        self._ratios.put((self._first_update, count, factor, window.source), torch.nan_to_num(ratio, nan=1.0))

    def _judge(
        self, context: AuditContext, count: int, factor: float, source: SourceLocation | None
    ) -> Iterable[AuditFinding]:
        averaged = factor * count < self.AVERAGED
        code = "accumulation_averaged" if averaged else "accumulation_not_averaged"
        if (code, count) in self._told:
            return
        self._told.add((code, count))
        how = f"each loss multiplied by {factor:.3g}" if factor != 1.0 else "none of the losses divided"
        yield finding(
            context,
            code,
            f"From step {self._first_update} on an update takes in {count} backward calls of one loss, {how}.",
            severity=Severity.INFO,
            measures=[
                Measure(name="num_backward_calls", value=float(count)),
                Measure(name="sum_over_mean", value=factor * count, threshold=self.AVERAGED),
            ],
            source=source,
        ).model_copy(update={"step": self._first_update})

    def _lost(self, context: AuditContext, count: int, source: SourceLocation | None) -> AuditFinding:
        return finding(
            context,
            "accumulated_gradients_lost",
            f"Of the {count} backward calls before an update, the gradients of all but the last are cleared unused.",
            measures=[Measure(name="num_backward_calls", value=float(count))],
            source=source,
        ).model_copy(update={"step": self._first_update})
