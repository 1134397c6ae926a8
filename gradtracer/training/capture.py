"""Reads the dynamics of a training loop: what, when and at which cost is DESIGN's section 5.

Nothing here changes training: no random number is drawn, no tensor of the user's is written, and nothing is left on the
model or the optimizer. On a GPU nothing is waited for: numbers stay on the device and are copied in one piece after a
sampled step, and read once that copy has arrived.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, CaptureNotice, NonFiniteOrigin, Observation, SourceLocation
from gradtracer.samples import LayerTable, Layout, Sample
from gradtracer.signals import MISSING, NON_FINITE
from gradtracer.training import nonfinite, statistics
from gradtracer.training.activations import ActivationCapture, ForwardPass, first_tensor
from gradtracer.training.audits import Audit, AuditContext
from gradtracer.training.graph import LossGraph
from gradtracer.training.held import HeldInputs
from gradtracer.training.layers import Layer, layers_of, source_of, watched_modules
from gradtracer.training.program import Program
from gradtracer.training.rank_mail import RankMail
from gradtracer.training.readings import HostCopy, Numbers, OpenStep
from gradtracer.training.schedule import Schedule
from gradtracer.training.sharded_readings import ShardedReadings
from gradtracer.training.sharding import is_sharded, local

log = logging.getLogger("gradtracer")


_ATTENTIVE_STEPS = 500
"""Steps at each of which audits look that ask for every step; later they look at sampled steps only, so that a long
run does not pay for what shows at its start."""
_LOOK_BACK = 32
"""Steps whose per-layer gradient norms are kept in memory, to be written when something goes wrong."""
_GROWTH_STEPS = 16
_LAST_PARTS_S = 5.0
"""At the end: for the other ranks to send what they have read of their parts."""
_DEVICE_BATCH = 100
"""On a GPU: steps after which the pending numbers are copied at the latest."""


class Sink(Protocol):
    """Where samples go; see `gradtracer.training.recorder.Recorder`."""

    def add_sample(self, sample: Sample) -> None:
        """Append a step."""
        ...

    def add_table(self, step: int, table: LayerTable) -> None:
        """Append a look-back table."""
        ...

    def add_observation(self, observation: Observation) -> None:
        """Append a fact."""
        ...


@dataclass(frozen=True)
class _Held:
    """The parameters of an optimizer that belong to the model."""

    sizes: tuple[int, ...]
    index: list[int]
    parameters: list[nn.Parameter]
    is_uniform: bool
    """Whether all are of one device and one type that is not half: their norms are one call."""

    def norms(self, gradients: list[Tensor]) -> Tensor | None:
        """Norms where every parameter has a dense gradient, `[len(index)]`; None where one is None, sparse or half."""
        if not self.is_uniform or not gradients:
            return None
        try:
            found = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
        except (TypeError, RuntimeError, NotImplementedError):  # one is missing, sparse, or of another kind
            return None
        return torch.stack(found)


class Capture:
    """Turns a training loop into samples.

    Args:
        model: The model.
        optimizers: Those known from the start; others are found when they step.
        schedule: Which steps are sampled.
        sink: Takes the samples.
        on_step_end: Called in the training thread after every step with its number; may change the model.
        on_guards: Called before an update, after gradients were read; may change gradients.
        after_guards: Called after the update.
        audits: What looks at sampled steps.
        loss_fn: The loss function, where the user named it.
        mail: Carries what is read to the main rank, where there are several.
        rank: Of this process.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        schedule: Schedule,
        sink: Sink,
        *,
        on_step_end: Callable[[int], None],
        on_guards: Callable[[Optimizer], None],
        after_guards: Callable[[Optimizer], None],
        audits: Sequence[Audit] = (),
        loss_fn: Callable[..., Any] | None = None,
        mail: RankMail | None = None,
        rank: int = 0,
    ) -> None:
        self.model = model
        self.program = Program(model)
        self.layers: list[Layer] = layers_of(model)
        self._schedule = schedule
        self._sink = sink
        self._on_step_end, self._on_guards, self._after_guards = on_step_end, on_guards, after_guards

        named = [(i, name, p) for i, layer in enumerate(self.layers) for name, p in layer.parameters]
        self.parameters = [p for _, _, p in named]
        self.parameter_names = [name for _, name, _ in named]
        self._number = {id(p): n for n, p in enumerate(self.parameters)}
        self._layer_index = np.asarray([i for i, _, _ in named], dtype=np.intp)
        self._numel = np.asarray([p.numel() for p in self.parameters], dtype=np.float64)
        self.layer_of_parameter = {id(p): self.layers[i].name for i, _, p in named}
        self._has_rows = {
            n
            for n, (i, _, p) in enumerate(named)
            if p.dim() > 1 and isinstance(self.layers[i].module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
        }
        self.is_sharded = any(is_sharded(p) for p in self.parameters)
        """Whether this rank holds a part of the parameters only."""
        self._unsharded: list[nn.Parameter] = []
        """Kept so that their ids stay their own."""
        self._mail = mail if self.is_sharded else None
        self._parts = ShardedReadings(self.parameters, mail, rank) if mail is not None and self.is_sharded else None
        self._on_device = any(p.device.type != "cpu" for p in self.parameters)
        self._norm_layout = Layout(tuple((layer.name, "grad_norm") for layer in self.layers))
        self._layouts: dict[tuple[tuple[str, str], ...], Layout] = {}

        self.loss_sources: list[SourceLocation | None] = []
        """Where the losses of the first step are computed."""
        self.optimizers: list[Optimizer] = []
        self._unheld_cache: list[int] | None = None
        self._held: dict[int, _Held] = {}
        self._foreign: set[int] = set()
        self._foreign_refs: list[Optimizer] = []
        for optimizer in optimizers:
            self._adopt(optimizer)

        self.explicit: bool | None = None
        """Whether the user marks steps; None until it is known."""
        self._updates_per_step = 1
        self._loss_fn = loss_fn
        self._set_audits([audit for audit in audits if audit.reads_parts or not self.is_sharded])
        self._found: set[tuple[str, str | None]] = set()
        self._has_news = False
        self._last_audited = -1
        self._watched = {} if is_compiled(model) else watched_modules(model)
        self.activations = ActivationCapture(self._watched, model, self._on_forward)
        self._module_of: dict[Any, str] = {}
        """Names of modules by the graph node of their output, of the sampled step under way."""
        self._held_inputs = HeldInputs(everything=self._on_device, program=self.program)
        self.forward_order: list[str] = []
        self.fed_by: dict[str, str] = {}
        self.activation_types: dict[str, str] = {}
        self._recent: deque[tuple[int, Sequence[int], np.ndarray]] = deque(maxlen=_LOOK_BACK)
        self._tabled: deque[int] = deque(maxlen=4 * _LOOK_BACK)
        self._last_gradients: dict[int, Tensor] = {}
        self._weights_before: list[Tensor] = []
        self._weights_index: list[int] = []
        self._loss_was_finite = True
        self._gradient_was_finite = True
        self._blamed_at_hand = -1
        self.last_step = -1
        """The last finished step; -1 before the first."""
        self.recent_losses: deque[tuple[int, float]] = deque(maxlen=256)
        """Step and loss of the last steps, coded as in `gradtracer.signals`, without missing ones."""
        self._last_end = time.perf_counter()
        self._waiting: list[OpenStep] = []
        self._copy: HostCopy | None = None
        self._open = OpenStep(0, sampled=False)
        self._next: OpenStep | None = None
        """After an update that may or may not have ended the step: what comes until that is known."""
        self._begin(0)

    @property
    def held(self) -> set[int]:
        """Ids of the parameters that the optimizers seen so far hold."""
        return {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]}

    def is_due(self, step: int) -> bool:
        """Whether the step is one of those that are sampled, as far as is known now."""
        return self._schedule.is_due(step)

    def takes_news(self) -> bool:
        """Whether an audit has found something since this was last asked."""
        has_news, self._has_news = self._has_news, False
        return has_news

    def note_intervention(self) -> None:
        """A fix has changed weights or the optimizer's state."""
        for audit in self._audits:
            audit.on_intervention()

    def audit(self, code: str) -> Audit | None:
        """The audit of a code; None where it broke."""
        return next((audit for audit in self._audits if audit.code == code), None)

    def close(self) -> None:
        """Hand over what is left: the open step if anything happened in it, and what a GPU still holds."""
        if self._open.updated and self.explicit is not True:
            self._end(MISSING, run_commands=False)
        self.activations.disarm()
        if self._waiting:
            self._copy = self._copy or HostCopy(self._waiting)
            self._emit(self._copy)
        if self._mail is not None and self._parts is not None:
            self._mail.give_up(_LAST_PARTS_S)
            self._emit_whole(self._parts)

    # ------------------------------------------------------------------ what the hooks report

    def on_backward(self, loss: Tensor, unscaled: Tensor) -> None:
        """See `gradtracer.training.hooks.TrainingListener`."""
        self.activations.in_backward = True
        value = unscaled.detach()
        now = self._now
        now.losses.append(value)
        if not self._on_device:
            finite = math.isfinite(value.item())
            first_non_finite = not finite and self._loss_was_finite
            self._loss_was_finite = finite
        else:
            first_non_finite = False
        if loss.grad_fn is None:
            return
        which = (len(self._open.updated), len(now.losses))
        looked_at = first_non_finite or now.sampled
        if looked_at or self._constant_audits:
            graph = LossGraph(loss, self.layer_of_parameter, self._module_of, unscaled, self.program)
            if first_non_finite:
                graph.owners = self._held_inputs.owners_in(graph)
                self._report(nonfinite.birth_in_graph(graph, now.step))
            if looked_at:
                self._held_inputs.learn(which, graph)
                if now.step == 0:
                    self._note_loss()
            with torch.no_grad():
                self._audit(lambda audit, context: audit.on_loss(context, graph), sampled=looked_at)
        self._held_inputs.hold(which, loss)

    def _note_loss(self) -> None:
        source = self.program.loss_line()
        if source not in self.loss_sources:
            self.loss_sources.append(source)

    def on_backward_done(self) -> None:
        """See `gradtracer.training.hooks.TrainingListener`."""
        self.activations.in_backward = False
        with torch.no_grad():
            self._audit(lambda audit, context: audit.on_backward(context), sampled=self._now.sampled)

    def on_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        """See `gradtracer.training.hooks.TrainingListener`."""
        if not self._is_ours(optimizer):
            return
        if self.explicit is not True and id(optimizer) in self._open.updated:
            # Second update without a mark in between: the loop does not mark its steps. Gradients of the next step
            # stand already, so nothing that touches the model may run here.
            self.explicit = False
            self._end(MISSING, run_commands=False)
        self._rejoin()
        if id(optimizer) in self._open.updated:
            self._open.forget_update()  # several updates within one marked step: the last one is described
        self.program.note_update(optimizer)
        if not has_closure:
            with torch.no_grad():
                self._read_gradients(optimizer)
            self._on_guards(optimizer)
        with torch.no_grad():
            self._audit(lambda audit, context: audit.on_gradients(context, optimizer), sampled=self._open.sampled)
            if self._open.sampled:
                self._read_weights(optimizer)
        rate = optimizer.param_groups[0].get("lr", MISSING)
        if not self._open.updated:
            self._open.learning_rate = float(rate)

    def on_updated(self, optimizer: Optimizer, has_closure: bool) -> None:
        """See `gradtracer.training.hooks.TrainingListener`."""
        if not self._is_ours(optimizer):
            return
        if has_closure:  # gradients of the last evaluation inside the step
            with torch.no_grad():
                self._read_gradients(optimizer)
        else:
            self._after_guards(optimizer)
        with torch.no_grad():
            if self._open.sampled:
                self._read_update()
            self._audit(lambda audit, context: audit.on_update(context, optimizer), sampled=self._open.sampled)
        self._open.updated.append(id(optimizer))
        if self.explicit is False and len(self._open.updated) >= self._updates_per_step:
            self._end(MISSING, run_commands=True)
        elif self.explicit is not True:
            # Whether this update ended the step is known at the next one, whose forward and backward pass come first.
            self._open.take(self.activations.disarm())
            self._next = self._new_step(self._open.step + 1)

    def mark_step(self, loss: float | Tensor | None) -> None:
        """The user says that a step is over."""
        self.explicit = True
        self._rejoin()
        if loss is None:
            self._end(MISSING, run_commands=True)
        elif isinstance(loss, Tensor):
            self._end(loss.detach().reshape(()), run_commands=True)
        else:
            value = float(loss)
            if self._on_device:
                self._look_at_held(value)
            self._end(value if math.isfinite(value) else NON_FINITE, run_commands=True)

    def _look_at_held(self, loss: float) -> None:
        """On a device: the user has read the loss, so what it depends on is still at hand."""
        finite = math.isfinite(loss)
        if not finite and self._loss_was_finite:
            self._blame_for_loss()
        self._loss_was_finite = finite
        now = self._open
        if finite and self._gradient_was_finite and now.grad_norms and _is_idle(now.grad_norms[0].device):
            norms = torch.cat([n.detach().reshape(-1).float() for n in now.grad_norms]).cpu().numpy()
            bad = np.asarray(now.index, dtype=np.intp)[~np.isfinite(norms)]
            if len(bad):
                self._note_backward_origin(now, bad, loss)
                self._blamed_at_hand = now.step

    def _blame_for_loss(self) -> None:
        held, step = self._held_inputs, self._open.step
        if (data := held.spoilt_data()) is not None:
            self._report(nonfinite.born_in_data(step, *data, held.source))
        elif (blamed := held.blame()) is not None:
            found, layer = blamed
            graph = held.graph_of(found.node, self.layer_of_parameter)
            if graph is not None:
                found = nonfinite.as_variance(graph, found)
            self._report(nonfinite.born_in_loss(step, found, layer, held.source))

    # ------------------------------------------------------------------ audits

    def _report(self, birth: nonfinite.Birth) -> None:
        origin = birth.origin
        if origin.where == "loss" and self._loss_fn is not None and (source := source_of(self._loss_fn)) is not None:
            origin = origin.model_copy(update={"source": source})
        self._sink.add_observation(origin)
        if birth.fault is not None:
            self._sink.add_observation(birth.fault)

    def _on_forward(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._now.step == 0:
            self.program.note_forward()
        if self.is_sharded and name:
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in self.layer_of_parameter:  # whole for the forward pass: a leaf of its own
                    self.layer_of_parameter[id(parameter)] = name
                    self._unsharded.append(parameter)
        tensor = first_tensor(output)
        if tensor is not None and tensor.grad_fn is not None:
            # The innermost module comes first, and keeps the node.
            self._module_of.setdefault(tensor.grad_fn, name)
        self._audit(lambda audit, context: audit.on_forward(context, name, module, inputs, output))

    def _audit(self, look: Callable[[Audit, AuditContext], Iterable[AuditFinding]], sampled: bool = True) -> None:
        now = self._now
        if not sampled and now.step >= _ATTENTIVE_STEPS:
            return
        audits = self._audits if sampled else self._constant_audits
        if not audits:
            return
        if now.step > self._last_audited + 1:
            for audit in self._constant_audits:
                audit.on_gap()
        self._last_audited = now.step
        context = self._context(now, sampled)
        for audit in audits:
            try:
                findings = list(look(audit, context))
            except Exception as error:
                self._retire(audit, error)
                continue
            for found in findings:
                if (found.code, found.layer) not in self._found:
                    self._found.add((found.code, found.layer))
                    self._has_news = True
                    self._sink.add_observation(found)

    def _context(self, now: OpenStep, sampled: bool) -> AuditContext:
        if not sampled and now.context is not None:
            return now.context
        activations = self.activations
        now.context = AuditContext(
            step=now.step, model=self.model, layers=self.layers, optimizers=self.optimizers,
            layer_of=self.layer_of_parameter, names=self._watched, loss_fn=self._loss_fn,
            record=lambda layer, signal, value: now.recorded.__setitem__((layer, signal), value), sampled=sampled,
            silent={key: name for key, (name, _) in activations.silent.items()}, kwargs=activations.kwargs,
            waited_s=activations.waited_s, computed_s=activations.computed_s,
        )  # fmt: skip
        return now.context

    def _set_audits(self, audits: Sequence[Audit]) -> None:
        self._audits = audits
        self._constant_audits = [audit for audit in audits if audit.every_step]

    def _retire(self, audit: Audit, error: Exception) -> None:
        """An audit that breaks costs itself, no more."""
        self._set_audits([a for a in self._audits if a is not audit])
        log.warning("the audit %s is turned off because of an error of its own", audit.code, exc_info=error)
        self._sink.add_observation(
            CaptureNotice(
                step=self._now.step, message=f"The audit {audit.code} is off: {type(error).__name__}: {error}"
            )
        )

    # ------------------------------------------------------------------ reading

    def _read_gradients(self, optimizer: Optimizer) -> None:
        now = self._open
        held = self._held_by(optimizer)
        extra = () if now.updated else self._unheld()
        index, gradients = held.index, [cast(Tensor, p.grad) for p in held.parameters]
        if self.is_sharded:
            gradients = [cast(Tensor, None if g is None else local(g)) for g in gradients]
        norms = held.norms(gradients) if not extra else None
        if norms is None:
            present = [(n, self.parameters[n].grad) for n in (*index, *extra)]
            index = [n for n, g in present if g is not None]
            gradients = [statistics.gradient_values(local(g)) for _, g in present if g is not None]
            if not gradients:
                return
            norms = statistics.norms(gradients)
        if not self._on_device and not math.isfinite(float(norms.sum())):
            # A float32 sum of squares overflows above 1e19 while every element is finite.
            norms = torch.tensor([statistics.exact_norm(g) for g in gradients], dtype=torch.float64)
        scale = getattr(optimizer, "grad_scale", None)
        if isinstance(scale, Tensor):  # a fused optimizer divides inside its kernel
            norms = norms / scale.to(norms.device, norms.dtype)
        now.index = index if not now.index else [*now.index, *index]
        now.grad_norms.append(norms)
        if now.sampled or self._schedule.is_due(now.step + 1):
            self._read_directions(index, gradients)
        if now.sampled:
            means = torch.stack([statistics.mean(g) for g in gradients])
            now.grad_means.append(means / scale.to(means.device) if isinstance(scale, Tensor) else means)
            now.weight_norms.append(statistics.norms([self._weights(n) for n in index]))
            now.zero_rows += [
                (n, statistics.zero_row_fraction(g))
                for n, g in zip(index, gradients, strict=True)
                if n in self._has_rows
            ]

    def _read_directions(self, index: list[int], gradients: list[Tensor]) -> None:
        """Compare with the gradients of the step before, and keep these for the next."""
        samples = {
            n: statistics.strided_sample(g).clone()
            for n, g in zip(index, gradients, strict=True)
            if g.shape == self._weights(n).shape
        }
        pairs = [(n, s, self._last_gradients[n]) for n, s in samples.items() if n in self._last_gradients]
        if pairs and self._open.sampled:
            dots = torch.stack([torch.dot(a, b) for _, a, b in pairs])
            norms = statistics.norms([a for _, a, _ in pairs]) * statistics.norms([b for _, _, b in pairs])
            self._open.cosines.append(([n for n, _, _ in pairs], dots, norms))
        self._last_gradients = samples

    def _weights(self, number: int) -> Tensor:
        return local(self.parameters[number].detach())

    def _read_weights(self, optimizer: Optimizer) -> None:
        held = self._held_by(optimizer)
        self._weights_index = [n for n, p in zip(held.index, held.parameters, strict=True) if p.grad is not None]
        self._weights_before = [statistics.strided_sample(self._weights(n)).clone() for n in self._weights_index]

    def _read_update(self) -> None:
        if not self._weights_before:
            return
        after = [statistics.strided_sample(self._weights(n)) for n in self._weights_index]
        moved = torch._foreach_sub(after, self._weights_before)  # pyright: ignore[reportPrivateImportUsage]
        scale = torch.tensor(
            [self._numel[n] / max(b.numel(), 1) for n, b in zip(self._weights_index, self._weights_before, strict=True)]
        )
        moved_norms, norms = statistics.norms(list(moved)), statistics.norms(self._weights_before)
        scale = scale.to(norms.device, norms.dtype)
        self._open.updates.append((self._weights_index, moved_norms.square() * scale, norms.square() * scale))
        self._weights_before, self._weights_index = [], []

    # ------------------------------------------------------------------ steps

    @property
    def _now(self) -> OpenStep:
        """The step that what happens now belongs to, as far as is known."""
        return self._open if self._next is None else self._next

    def _new_step(self, step: int) -> OpenStep:
        sampled = self._schedule.is_due(step)
        if sampled:
            self.activations.arm()
        return OpenStep(step, sampled)

    def _begin(self, step: int) -> None:
        self._held_inputs.release()
        self._module_of = {}
        self._open = self._new_step(step)

    def _rejoin(self) -> None:
        """The last update did not end the step."""
        if self._next is not None:
            if self.activations.armed:
                self._next.take(self.activations.disarm())
                self.activations.arm()
            self._open.join(self._next)
            self._next = None

    def _end(self, loss: float | Tensor, *, run_commands: bool) -> None:
        done, following = self._open, self._next
        now = time.perf_counter()
        done.time_s, done.step_time_s, self._last_end = time.time(), now - self._last_end, now
        if isinstance(loss, Tensor) or not math.isnan(loss):
            done.loss = loss
        elif done.losses:
            # What the update follows is the sum over the backward calls: accumulated losses are parts of one objective.
            done.loss = done.losses[0] if len(done.losses) == 1 else torch.stack([x.float() for x in done.losses]).sum()
        self._updates_per_step = max(self._updates_per_step, len(done.updated))
        if following is None and self.activations.armed:
            done.take(self.activations.disarm())
        if done.forward is not None:
            self._learn_forward_order(done.forward)
        self._next = None
        if done.sampled:
            with torch.no_grad():
                self._audit(lambda audit, context: audit.on_step_end(context))
            self.activations.silent = {}
        self._waiting.append(done)
        if not self._on_device:
            self._emit(HostCopy(self._waiting))
        else:
            if self._copy is None and (done.sampled or len(self._waiting) >= _DEVICE_BATCH):
                self._copy = HostCopy(self._waiting)
            if self._copy is not None and self._copy.arrived:
                self._emit(self._copy)
        self._schedule.end_step()
        self.last_step = done.step
        if run_commands:
            self._on_step_end(done.step)
        if following is None:
            self._begin(done.step + 1)
        else:
            self._open = following

    def _learn_forward_order(self, forward: ForwardPass) -> None:
        if len(forward.scalars) > len(self.forward_order):
            self.forward_order = list(forward.scalars)
            self.fed_by = dict(forward.fed_by)
            self.activation_types = dict(forward.types)

    def _emit(self, copy: HostCopy) -> None:
        self._copy = None
        self._waiting = self._waiting[len(copy.steps) :]
        for step, numbers in zip(copy.steps, copy.numbers(), strict=True):
            if self._parts is None:
                self._emit_step(step, numbers)
            else:
                self._parts.put(step, numbers)
        if self._parts is not None:
            self._emit_whole(self._parts)

    def _emit_whole(self, parts: ShardedReadings) -> None:
        for step, numbers in parts.take():
            self._emit_step(step, numbers)

    def _emit_step(self, step: OpenStep, numbers: Numbers) -> None:
        norms, loss = numbers.grad_norms, numbers.loss
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(np.dot(norms, norms))
        bad = np.empty(0, dtype=np.intp)
        if not step.index:
            total = MISSING
        elif math.isfinite(square):
            total = math.sqrt(square)
            self._gradient_was_finite = True
        else:
            bad = np.asarray(step.index, dtype=np.intp)[~np.isfinite(norms)]
            total = NON_FINITE
            self._note_backward_origin(step, bad, loss)
        self._recent.append((step.step, step.index, norms))
        table = None
        if step.sampled:
            table = self._table(step, numbers, bad)
            self._tabled.append(step.step)
        sample = Sample(
            step=step.step, time_s=step.time_s, loss=loss, grad_norm=total, learning_rate=step.learning_rate,
            step_time_s=step.step_time_s, num_non_finite_grads=float(len(set(self._layer_index[bad].tolist()))),
            layers=table,
        )  # fmt: skip
        if not math.isnan(loss):
            self.recent_losses.append((step.step, loss))
        self._sink.add_sample(sample)
        if self._schedule.suspects(loss, total):
            self._write_look_back()

    def _layer_norms(self, index: Sequence[int], norms: np.ndarray) -> np.ndarray:
        """Norms by layer, NaN where a layer has none, infinity where one is not finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.where(np.isfinite(norms), norms * norms, np.inf)
        total, present = self._over_layers(index, squares)
        return np.where(present, np.sqrt(total), np.nan)

    def _note_backward_origin(self, step: OpenStep, bad: np.ndarray, loss: float) -> None:
        if self._gradient_was_finite and loss != NON_FINITE and step.step != self._blamed_at_hand:
            names = {self.layers[i].name for i in self._layer_index[bad].tolist()}
            order = [n for n in self.forward_order if n in names] or [n.name for n in self.layers if n.name in names]
            # Of a step that was over before its numbers arrived, nothing is held any more.
            blamed = self._held_inputs.blame() if step is self._open else None
            self._gradient_was_finite = False
            if blamed is not None:
                found, layer = blamed
                self._report(nonfinite.born_in_gradient(step.step, found, layer, order[-1], self._held_inputs.source))
                return
            self._sink.add_observation(
                NonFiniteOrigin(
                    step=step.step, where="backward", layer=order[-1], num_non_finite=len(bad),
                    detail="The loss is finite; the gradient is not, from this layer toward the input.",
                )
            )  # fmt: skip
        self._gradient_was_finite = False

    def _write_look_back(self) -> None:
        tabled = set(self._tabled)
        for step, index, norms in self._recent:
            if step not in tabled:
                with np.errstate(over="ignore"):
                    per_layer = self._layer_norms(index, norms).astype(np.float32)
                self._sink.add_table(step, LayerTable(self._norm_layout, per_layer, look_back=True))
                self._tabled.append(step)

    # ------------------------------------------------------------------ tables

    def _over_layers(self, index: Sequence[int], values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sum over each layer's parameters, and which layers have any."""
        layers = self._layer_index[list(index)]
        total = np.bincount(layers, weights=values.astype(np.float64), minlength=len(self.layers))
        present = np.zeros(len(self.layers), dtype=bool)
        present[layers] = True
        return total, present

    def _table(self, step: OpenStep, numbers: Numbers, bad: np.ndarray) -> LayerTable:
        rows: dict[str, np.ndarray] = {}
        per_layer = self._layer_norms(step.index, numbers.grad_norms)
        with np.errstate(all="ignore"):
            if step.index:
                count, present = self._over_layers(step.index, self._numel[step.index])
                means, _ = self._over_layers(step.index, numbers.grad_means * self._numel[step.index])
                mean = np.where(present, means / count, np.nan)
                rows["grad_norm"] = per_layer
                rows["grad_mean"] = mean
                rows["grad_std"] = np.sqrt(np.maximum(per_layer**2 / count - mean**2, 0.0))
                weights, _ = self._over_layers(step.index, numbers.weight_norms.astype(np.float64) ** 2)
                rows["weight_norm"] = np.where(present, np.sqrt(weights), np.nan)
                rows["num_non_finite_grad"] = np.where(
                    present, self._over_layers(bad.tolist(), np.ones(len(bad)))[0], np.nan
                )
                bad_weights, _ = self._over_layers(step.index, ~np.isfinite(numbers.weight_norms))
                rows["num_non_finite_weight"] = np.where(present, bad_weights, np.nan)
                rows["grad_growth_rate"] = self._growth_rate()
            if numbers.updates:
                index = [n for part, _, _ in numbers.updates for n in part]
                moved, present = self._over_layers(index, np.concatenate([m for _, m, _ in numbers.updates]))
                weights, _ = self._over_layers(index, np.concatenate([w for _, _, w in numbers.updates]))
                rows["update_ratio"] = np.where(present & (weights > 0), np.sqrt(moved / weights), np.nan)
                rows["update_ratio"][present & ~np.isfinite(moved)] = np.inf
            if numbers.cosines:
                index = [n for part, _, _ in numbers.cosines for n in part]
                dots, present = self._over_layers(index, np.concatenate([d for _, d, _ in numbers.cosines]))
                norms, _ = self._over_layers(index, np.concatenate([n for _, _, n in numbers.cosines]))
                rows["step_cosine"] = np.where(present & (norms > 0), dots / norms, np.nan)
            if numbers.zero_rows:
                zero = np.full(len(self.layers), np.nan)
                for number, value in numbers.zero_rows:
                    zero[self._layer_index[number]] = value
                rows["zero_grad_fraction"] = zero
        names = [layer.name for layer in self.layers]
        columns = [(name, signal) for signal in rows for name in names]
        values = [rows[signal] for signal in rows]
        columns += numbers.activation_columns
        values.append(numbers.activations)
        key = tuple(columns)
        layout = self._layouts.setdefault(key, Layout(key))
        with np.errstate(over="ignore"):  # what float32 does not hold is recorded as not finite
            packed = np.concatenate(values).astype(np.float32) if values else np.empty(0, np.float32)
        return LayerTable(layout, packed)

    def _growth_rate(self) -> np.ndarray:
        """Least-squares slope of log ||g|| over the last steps, by layer, 1/step."""
        recent = list(self._recent)[-_GROWTH_STEPS:]
        if len(recent) < 4:
            return np.full(len(self.layers), np.nan)
        steps = np.asarray([s for s, _, _ in recent], dtype=np.float64)
        logs = np.log(np.stack([self._layer_norms(index, norms) for _, index, norms in recent]))
        logs[~np.isfinite(logs)] = np.nan
        centred = steps - steps.mean()
        return (centred[:, None] * (logs - logs.mean(axis=0))).sum(axis=0) / (centred**2).sum()

    # ------------------------------------------------------------------ optimizers

    def _is_ours(self, optimizer: Optimizer) -> bool:
        if id(optimizer) in self._held:
            return True
        if id(optimizer) in self._foreign:
            return False
        if any(id(p) in self._number for group in optimizer.param_groups for p in group["params"]):
            self._adopt(optimizer)
            return True
        self._foreign.add(id(optimizer))
        self._foreign_refs.append(optimizer)  # so that its id is not given to another
        return False

    def _adopt(self, optimizer: Optimizer) -> None:
        self.optimizers.append(optimizer)
        self._held[id(optimizer)] = self._hold(optimizer)
        self._unheld_cache = None

    def _hold(self, optimizer: Optimizer) -> _Held:
        index = [
            self._number[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in self._number
        ]
        parameters = [self.parameters[n] for n in index]
        kinds = {(p.device, p.dtype) for p in parameters}
        uniform = len(kinds) == 1 and all(p.dtype not in (torch.float16, torch.bfloat16) for p in parameters)
        return _Held(_sizes(optimizer), index, parameters, uniform)

    def _held_by(self, optimizer: Optimizer) -> _Held:
        held = self._held[id(optimizer)]
        if held.sizes != _sizes(optimizer):  # a group was added
            held = self._held[id(optimizer)] = self._hold(optimizer)
            self._unheld_cache = None
        return held

    def _unheld(self) -> list[int]:
        if self._unheld_cache is None:
            held = self.held
            self._unheld_cache = [n for n, p in enumerate(self.parameters) if id(p) not in held]
        return self._unheld_cache

    def unheld_with_gradient(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters: those that train, have a gradient, and are held by no known optimizer."""
        return [
            (self.parameter_names[n], self.parameters[n])
            for n in self._unheld()
            if self.parameters[n].requires_grad and self.parameters[n].grad is not None
        ]


def _is_idle(device: torch.device) -> bool:
    """Whether reading from the device waits for nothing: the user has just waited for it."""
    return device.type != "cuda" or torch.cuda.current_stream(device).query()


def _sizes(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple(len(group["params"]) for group in optimizer.param_groups)


def is_compiled(model: nn.Module) -> bool:
    """Whether any part of the model went through `torch.compile`: forward hooks would make it compile again."""
    return any(
        type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None
        for m in model.modules()
    )
