"""Parameters that the optimizer is to train and that no loss depends on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, Measure, Severity
from gradtracer.training.audits._parts import whole_parts
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph
from gradtracer.training.spectrum import looks_learnt


@dataclass
class _Step:
    nodes: dict[str, list[Any]] = field(default_factory=dict)
    """Graph nodes of the outputs of each layer that ran."""
    fed_raw: set[str] = field(default_factory=set)
    """Layers whose input has no history."""
    storages: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    cut: dict[str, str] = field(default_factory=dict)
    """By layer: the module that received its values without their history."""
    reached_nodes: set[Any] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    num_losses: int = 0


@AUDITS.register
class UnreachedParameters(Audit):
    """Layers run at every step, an optimizer is to train them, and no loss depends on what they put out.

    What:
        A graph that is cut: `detach()`, `.data`, `no_grad`, a conversion to numpy or to integers between a part of the
        model and the loss; a generator whose score was detached.

    Why:
        The part keeps its initial values, and the rest learns around it.

    Definition:
        Over sampled steps: a layer ran with gradients (or, without, and its output was fed to a layer that was
        reached), an optimizer that stepped holds its parameters, and no loss of the step has a parameter of it in its
        graph; or its parameters are, the output of the layer is not, and their gradient is exactly 0. It must hold at
        8 sampled steps, and never have been otherwise. Layers that form a module as a whole are named by it.

    Thresholds:
        8 of the first 10 steps, so that losses and optimizers that take turns (a generator that steps every fifth
        time) have had theirs. It is a fault by itself where the part is fed by the data or its values are seen to go
        on without their history, and it looks as drawn at random (`gradtracer.training.spectrum`): what only ends in
        an output that nobody uses, and a pretrained part that is kept on purpose, are `info`.

    Fixes:
        In the source: remove the cut.

    References:
        PyTorch documentation, Autograd mechanics, "Locally disabling gradient computation". Martin and Mahoney 2021,
        JMLR 22(165) (the spectrum of trained weights).
    """

    code = "unreached_parameters"

    STEPS = 8

    def __init__(self) -> None:
        self._now = _Step()
        self._number = -1
        self._count: dict[str, int] = {}
        self._reached_once: set[str] = set()
        self._from_data: set[str] = set()
        self._cut: dict[str, str] = {}
        self._versions: dict[str, tuple[int, ...]] = {}
        self._told: set[str] = set()

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """Take note of what ran, on what, and whether values went on without their history."""
        self._begin(context)
        now = self._now
        given = list(_tensors(inputs))
        for tensor in given:
            if tensor.requires_grad or not tensor.is_floating_point():
                continue
            key = tensor.untyped_storage().data_ptr()
            if key in now.storages and now.storages[key][0] != name:
                now.cut[now.storages[key][0]] = name
            elif key in context.silent:
                now.cut[context.silent[key]] = name
        if next(module.parameters(recurse=False), None) is not None and name:
            made = list(_tensors(output))
            now.nodes.setdefault(name, []).extend(t.grad_fn for t in made if t.grad_fn is not None)
            if not any(t.requires_grad for t in given):
                now.fed_raw.add(name)
        if name:
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    # Kept, so that its storage is not given to another within the step.
                    now.storages[tensor.untyped_storage().data_ptr()] = (name, tensor)
        return ()

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Take note of what the loss depends on."""
        self._begin(context)
        self._now.num_losses += 1
        self._now.reached.update(id(p) for p in graph.parameters())
        self._now.reached_nodes.update(graph.nodes)
        return ()

    def on_update(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Take note of what is to be trained."""
        self._begin(context)
        self._now.held.update(id(p) for group in optimizer.param_groups for p in group["params"])
        return ()

    def on_step_end(self, context: AuditContext) -> Iterable[AuditFinding]:
        """Count the layers that were not reached, and tell of those that never are."""
        now = self._now
        if self._number != context.step or not now.num_losses:
            return
        silent = set(context.silent.values())
        for layer in context.layers:
            trainable = [p for _, p in layer.parameters if p.requires_grad]
            if not trainable or layer.name in self._reached_once:
                continue
            if self._is_reached(layer.name, trainable):
                self._reached_once.add(layer.name)
                self._count.pop(layer.name, None)
                continue
            ran = layer.name in now.nodes or layer.name in silent
            if not ran or not any(id(p) in now.held for p in trainable):
                continue
            if all(p.grad is None for p in trainable):
                versions = tuple(p._version for p in trainable)
                if self._versions.setdefault(layer.name, versions) != versions:
                    self._reached_once.add(layer.name)  # somebody else writes it: an average of another network
                    continue
            self._count[layer.name] = self._count.get(layer.name, 0) + 1
            if layer.name in now.fed_raw:
                self._from_data.add(layer.name)
        self._cut.update(now.cut)
        self._now = _Step()  # lets go of the tensors
        yield from self._tell(context)

    def _is_reached(self, name: str, trainable: Sequence[nn.Parameter]) -> bool:
        now = self._now
        if not any(id(p) in now.reached for p in trainable):
            return False
        nodes = now.nodes.get(name)
        if not nodes or any(node in now.reached_nodes for node in nodes):
            return True
        # The parameters are in the loss by themselves (a penalty, say) and the layer's output is not.
        if next(iter(trainable)).device.type != "cpu":
            return True
        with torch.no_grad():
            return any(p.grad is not None and bool(p.grad.to_dense().any()) for p in trainable)

    def _tell(self, context: AuditContext) -> Iterator[AuditFinding]:
        ready = [n for n, c in self._count.items() if c >= self.STEPS and n not in self._told]
        if not ready:
            return
        self._told.update(ready)
        trained = [x.name for x in context.layers if any(p.requires_grad for _, p in x.parameters)]
        if not any(n in self._reached_once for n in trained):
            return
        weights = {x.name: [p for _, p in x.parameters if p.dim() > 1] for x in context.layers}
        for part, layers in whole_parts(ready, trained):
            inside = [n for n in self._cut if n == part or n.startswith(f"{part}.")]
            is_cut = bool(inside) or any(n in self._from_data for n in layers)
            learnt = looks_learnt(w for n in layers for w in weights[n])
            receiver = next((self._cut[n] for n in inside if not self._cut[n].startswith(f"{part}.")), None)
            to = f"; {receiver} receives its values without their history" if receiver else ""
            yield finding(
                context, "unreached_layers",
                f"{part} runs at every step and an optimizer holds it, but no loss depends on its output{to}.",
                layer=part,
                severity=Severity.WARNING if is_cut and not learnt else Severity.INFO,
                measures=(Measure(name="num_layers", value=float(len(layers)), unit="layers"),),
            )  # fmt: skip

    def _begin(self, context: AuditContext) -> None:
        if self._number != context.step:
            self._number, self._now = context.step, _Step()


def _tensors(values: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict) and depth < 4:
        for value in values.values():
            yield from _tensors(value, depth + 1)
    elif isinstance(values, (tuple, list)) and depth < 4:
        for value in values:
            yield from _tensors(value, depth + 1)
