"""Whether an operation runs over the samples of a batch instead of within each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from gradtracer.records import AuditFinding, Measure
from gradtracer.training.activations import first_tensor
from gradtracer.training.audits._loss import CLASSIFIERS, batch_size, loss_nodes
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph, operation_of, saved


@AUDITS.register
class BatchAxis(Audit):
    """An operation runs over the batch axis, so that samples of a batch see each other, or over another wrong axis.

    What:
        A recurrent or attention module that takes the batch for time; a softmax over the samples; a log-softmax over
        another axis than the one that the likelihood takes for classes.

    Why:
        A prediction then depends on which other samples are in the batch; at best nothing is learnt from order.

    Definition:
        With B the first axis of the targets and of the model's output and input: a recurrent or attention module whose
        input is [a, b, features] with `batch_first` unset, a = B and b other than B and 1; or with it set, b = B and a
        other than B and 1. A softmax over axis 0, of length B, of a result none of whose other axes is B or 1, where
        the softmax is what the loss takes or has three axes or more. A log-softmax over another axis than 1 directly
        under a likelihood, whose classes are on axis 1.

    Thresholds:
        None: axes are exact. Two calls must agree, with B of more than one sample, so that a last batch of one length
        with the sequence is no proof.

    Fixes:
        In the source: batch_first=True, a transposition, or the right `dim`.

    References:
        PyTorch documentation: LSTM (batch_first), MultiheadAttention (batch_first), Softmax (dim), NLLLoss (shape).
    """

    code = "batch_axis"
    reads_parts = True

    TWICE = 2

    def __init__(self) -> None:
        self._fed: dict[str, tuple[nn.Module, tuple[int, ...]]] = {}
        self._root: tuple[int | None, int | None] = (None, None)
        self._seen: dict[tuple[str, str | None], int] = {}
        self._step = -1

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """Take note of what sequence modules and the model are given."""
        if context.step != self._step:
            self._step, self._fed, self._root = context.step, {}, (None, None)
        given, made = first_tensor(inputs), first_tensor(output)
        if module is context.model:
            self._root = (_first_axis(given), _first_axis(made))
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and given is not None and given.dim() == 3:
            self._fed[name] = (module, tuple(given.shape))
        return ()

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Compare with the batch of the loss."""
        batch = batch_size(graph)
        for code, detail, layer, size in self._found(graph, batch):
            key = (code, layer)
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] >= self.TWICE:
                yield finding(
                    context, code, detail, layer=layer, measures=(Measure(name="axis_length", value=float(size)),),
                    source=graph.computed_at,
                )  # fmt: skip

    def _found(self, graph: LossGraph, batch: int | None) -> Iterable[tuple[str, str, str | None, int]]:
        given, made = self._root
        if batch is None:
            batch = made
        agreed = batch if batch is not None and batch > 1 and made == batch and given in (batch, None) else None
        if agreed is not None and given is not None:
            for name, (module, shape) in self._fed.items():
                if found := self._sequence(module, shape, agreed):
                    yield "batch_taken_for_time", found, name, agreed
        if batch is not None and batch > 1:
            yield from self._softmax(graph, batch, made)
        yield from self._classes(graph)

    def _sequence(self, module: nn.Module, shape: tuple[int, ...], batch: int) -> str | None:
        time, other = (1, 0) if getattr(module, "batch_first", False) else (0, 1)
        if shape[time] != batch or shape[other] in (batch, 1):
            return None
        flag = "set" if time else "not set"
        return (
            f"{type(module).__name__} with batch_first {flag} received {list(shape)}: it takes the axis of {batch}, "
            "which is the batch of the loss, for time."
        )

    def _softmax(self, graph: LossGraph, batch: int, made: int | None) -> Iterable[tuple[str, str, str | None, int]]:
        region = set(graph.expression)
        for node in graph.nodes:
            if operation_of(node) not in ("Softmax", "LogSoftmax"):
                continue
            result, dim = saved(node, "result"), saved(node, "dim")
            if not isinstance(result, Tensor) or not isinstance(dim, int) or result.dim() < 2:
                continue
            axis = _axis(dim, result.dim())
            others = [n for i, n in enumerate(result.shape) if i != axis]
            if axis != 0 or result.shape[0] != batch or any(n in (batch, 1) for n in others):
                continue
            at_loss = node in region or any(c in region for c in graph.consumers.get(node, ()))
            if not at_loss and (result.dim() < 3 or made != batch):
                continue
            layer = graph.module_of.get(node) or graph.layer_at(node)
            detail = f"{node.name()} runs over axis 0 of {list(result.shape)}, which is the batch of the loss."
            yield "softmax_over_batch", detail, layer, batch

    def _classes(self, graph: LossGraph) -> Iterable[tuple[str, str, str | None, int]]:
        for loss in loss_nodes(graph):
            if loss.operation not in CLASSIFIERS or not loss.node.next_functions:
                continue
            before = loss.node.next_functions[0][0]
            if before is None or operation_of(before) != "LogSoftmax":
                continue
            result, dim = saved(before, "result"), saved(before, "dim")
            if not isinstance(result, Tensor) or not isinstance(dim, int) or result.dim() < 2:
                continue
            axis = _axis(dim, result.dim())
            if axis != 1 and result.shape[axis] > 1:
                layer = graph.module_of.get(before) or graph.layer_at(before)
                detail = f"log_softmax runs over axis {axis} of {list(result.shape)}, and the classes are on axis 1."
                yield "log_softmax_over_wrong_axis", detail, layer, result.shape[axis]


def _first_axis(tensor: Tensor | None) -> int | None:
    return tensor.shape[0] if tensor is not None and tensor.dim() > 1 else None


def _axis(dim: int, num_dims: int) -> int:
    # Saved axes are unsigned: -1 comes as 2**64 - 1.
    if dim >= 1 << 63:
        dim -= 1 << 64
    return dim + num_dims if dim < 0 else dim
