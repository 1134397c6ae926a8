"""Layers that are set not to train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from gradtracer.records import AuditFinding, Measure, Severity
from gradtracer.training.activations import first_tensor
from gradtracer.training.audits._parts import whole_parts
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.layers import Layer
from gradtracer.training.spectrum import looks_learnt


@AUDITS.register
class FrozenLayers(Audit):
    """Layers run at every step, do not require a gradient, and look as drawn at random.

    What:
        requires_grad=False on layers that have learnt nothing yet: a name that matched too much, a freeze left over
        from another stage.

    Why:
        What is frozen at random values is a random projection; what is behind it can only make the best of that.

    Definition:
        Over 8 sampled steps: a layer with a weight of two axes or more ran, none of its parameters ever required a
        gradient, others of the model do, and no frozen layer looks learnt (`gradtracer.training.spectrum`: largest
        singular value above 1.1 of a random matrix's). Frozen layers that all have a trained one of the same class and
        shape are the copy of a network (a target or teacher), and do not count. A layer between trained ones has an
        input with a history, and a trained layer behind it.

    Thresholds:
        A frozen layer before the first trained one is a random feature map and may be meant: `info`, and
        `frozen_and_stalled` waits for the loss. Between trained layers random weights are a fault by themselves:
        adapters and norm tuning keep pretrained ones.

    Fixes:
        In the source: requires_grad_(True).

    References:
        Rahimi and Recht 2007 (random features). Martin and Mahoney 2021, JMLR 22(165) (the spectrum of trained
        weights).
    """

    code = "frozen_layers"

    STEPS = 8

    def __init__(self) -> None:
        self._number = -1
        self._order: list[str] = []
        self._with_history: set[str] = set()
        self._num_steps = 0
        self._never: set[str] | None = None
        self._done = False

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """Take note of which layers ran, and in which order."""
        if self._number != context.step:
            self._number, self._order, self._with_history = context.step, [], set()
        if name and name not in self._order and next(module.parameters(recurse=False), None) is not None:
            self._order.append(name)
            given = first_tensor(inputs)
            if given is not None and given.requires_grad:
                self._with_history.add(name)
        return ()

    def on_step_end(self, context: AuditContext) -> Iterable[AuditFinding]:
        """Tell of layers that never required a gradient."""
        if self._done or self._number != context.step or not self._order:
            return
        self._num_steps += 1
        layers = {layer.name: layer for layer in context.layers}
        frozen = {
            n
            for n in self._order
            if n in layers
            and any(p.dim() > 1 for _, p in layers[n].parameters)
            and not any(p.requires_grad or p.grad is not None for _, p in layers[n].parameters)
        }
        self._never = frozen if self._never is None else self._never & frozen
        self._never -= {n for n in self._never if _is_adapted(layers[n], context.layers)}
        if self._num_steps < self.STEPS:
            return
        self._done = True
        trained = [n for n in self._order if n in layers and any(p.requires_grad for _, p in layers[n].parameters)]
        if not self._never or not trained or _is_copy([layers[n] for n in self._never], [layers[n] for n in trained]):
            return
        ordered = [n for n in self._order if n in self._never]
        weights = [p for n in ordered for _, p in layers[n].parameters if p.dim() > 1]
        if looks_learnt(weights):
            return
        last = self._order.index(trained[-1])
        between = [n for n in ordered if n in self._with_history and self._order.index(n) < last]
        held = {id(p) for o in context.optimizers for g in o.param_groups for p in g["params"]}
        num_held = sum(id(p) in held for n in ordered for _, p in layers[n].parameters)
        ends_frozen = self._order.index(ordered[-1]) > last
        for i, (part, inside) in enumerate(whole_parts(ordered, [n for n in self._order if n in layers])):
            is_between = any(n in between for n in inside)
            severe = is_between and any(isinstance(layers[n].module, _MIXING) for n in inside if n in between)
            yield finding(
                context, "frozen_at_random",
                f"{part} does not require a gradient and looks as drawn at random"
                + ("; it stands between layers that train." if is_between else "."),
                layer=part,
                severity=Severity.WARNING if severe else Severity.INFO,
                measures=(
                    Measure(name="num_layers", value=float(len(inside)), unit="layers"),
                    Measure(name="position", value=float(i)),
                    Measure(name="held_by_optimizer", value=float(num_held > 0)),
                    Measure(name="output_layer", value=float(ends_frozen)),
                    Measure(name="num_trained_layers", value=float(len(trained))),
                ),
            )  # fmt: skip


_MIXING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention)


def _is_adapted(frozen: Layer, layers: Sequence[Layer]) -> bool:
    """Whether a trained product of two thin matrices stands beside the frozen one (Hu et al. 2021, LoRA, eq. 3)."""
    parent = frozen.name.rpartition(".")[0]
    beside = [
        p.shape
        for layer in layers
        if layer.name == parent or layer.name.rpartition(".")[0] == parent
        for _, p in layer.parameters
        if p.dim() == 2 and p.requires_grad
    ]
    shapes = [p.shape for _, p in frozen.parameters if p.dim() == 2]

    def joins(a: Any, b: Any, out: int, given: int) -> bool:
        return {out, given} <= {*a, *b} and bool(min(a) == min(b) < min(out, given))

    return any(joins(a, b, *shape) for shape in shapes for a in beside for b in beside if a != b)


def _is_copy(frozen: Sequence[Layer], trained: Sequence[Layer]) -> bool:
    """Whether each frozen layer has a trained counterpart of its own."""

    def shapes(layers: Sequence[Layer]) -> Counter[Any]:
        return Counter((type(x.module), tuple(tuple(p.shape) for _, p in x.parameters)) for x in layers)

    return not shapes(frozen) - shapes(trained)
