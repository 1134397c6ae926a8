"""What a step costs besides its arithmetic: waiting, and memory that is not given back."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import psutil
import torch

from gradtracer.records import AuditFinding
from gradtracer.training.audits.base import AUDITS, INPUT, LOSS, Audit, AuditContext
from gradtracer.training.graph import LossGraph

_KEY = "gradtracer"


class _Mark:
    """Lives as long as the node of the graph that it was put on."""


@AUDITS.register
class StepCosts(Audit):
    """Time between steps, and graphs that outlive their step.

    What:
        How long the step waited before its first layer ran; how many graphs of earlier steps are still held; the memory
        of the process or device.

    Why:
        A loop that waits for its data leaves the hardware idle; a loss or output that is kept with its graph fills the
        memory until the run dies.

    Definition:
        ``data_wait_s`` runs from the end of the step before to the first layer of any model, with or without gradients
        (a rollout or an evaluation ends the wait); ``compute_s`` from there to the end of the step. A mark is put into
        the metadata of the loss's node and of the first layer's node at sampled steps; a graph is retained while one of
        the two marks is alive. Only graphs of at least 40 steps ago count.

    Thresholds:
        40 steps: truncated backpropagation through time keeps tens of steps on purpose. Before all graphs are called
        retained, garbage in cycles is collected, once.

    Fixes:
        None; see the causes.

    References:
        Torch documentation, FAQ, "My model reports out of memory" (do not accumulate history across the loop).
    """

    code = "step_costs"
    reads_parts = True

    AGE = 40

    def __init__(self) -> None:
        self._marks: deque[tuple[int, list[weakref.ref[_Mark]]]] = deque(maxlen=64)
        self._collected = False
        self._process = psutil.Process()

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Put the marks."""
        first = next((n for n in graph.nodes if graph.own_layer(n) is not None), None)
        marks = [m for node in (first, graph.root) if node is not None and (m := _mark(node)) is not None]
        if marks:
            self._marks.append((context.step, marks))
        return ()

    def on_step_end(self, context: AuditContext) -> Iterable[AuditFinding]:
        """Record waits, and the marks that are alive."""
        if context.waited_s is not None and context.computed_s is not None:
            context.record(INPUT, "data_wait_s", context.waited_s)
            context.record(INPUT, "compute_s", context.computed_s)
        old = [marks for step, marks in self._marks if step <= context.step - self.AGE]
        alive = _num_alive(old)
        if len(old) >= 5 and alive == len(old) and not self._collected and gc.isenabled():
            self._collected = True
            gc.collect()
            alive = _num_alive(old)
        context.record(LOSS, "num_watched_graphs", float(len(old)))
        context.record(LOSS, "num_retained_graphs", float(alive))
        context.record(LOSS, "resident_bytes", float(_memory(context, self._process)))
        return ()


def _mark(node: Any) -> weakref.ref[_Mark] | None:
    metadata = getattr(node, "metadata", None)
    if metadata is None or _KEY in metadata:  # a node that is used again by design, such as a constant of the model
        return None
    mark = metadata[_KEY] = _Mark()
    return weakref.ref(mark)


def _num_alive(graphs: list[list[weakref.ref[_Mark]]]) -> int:
    return sum(any(mark() is not None for mark in marks) for marks in graphs)


def _memory(context: AuditContext, process: psutil.Process) -> int:
    device = next((p.device for layer in context.layers for _, p in layer.parameters), torch.device("cpu"))
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return process.memory_info().rss
