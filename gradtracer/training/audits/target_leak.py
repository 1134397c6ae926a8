"""Whether the model is shown what it must predict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradtracer.records import AuditFinding, Measure, Severity, clean_name
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.audits.labels import between_shares
from gradtracer.training.graph import LossGraph
from gradtracer.training.layers import ROOT, source_of
from gradtracer.training.probe import Call, copied, copy_of, map_tensors, may_probe, run_copy, tensors_in
from gradtracer.training.targets import LossTerm, loss_terms, rows_of

_MIN_TIMES, _MIN_ROWS, _MIN_COLUMNS = 4, 16, 4
_EQUAL = 0.999
_OFFSETS = (1, 0, -1, 2, 3)
_MOVED = 1e-3


@AUDITS.register
class TargetLeak(Audit):
    """The target is reachable from the input: by looking ahead in a sequence, or as a column of the input.

    What:
        A model that predicts the next element of its own input, and whose output at a time depends on later inputs: a
        mask that is missing, a bidirectional layer, a convolution that looks ahead. A column of the input that
        determines the target. And targets that are the input at another offset than the next element.

    Why:
        The loss falls below what is possible, and the model is useless where the answer is not known.

    Definition:
        With input ``x[b, t]`` and target ``y[b, t]``, next-element prediction is ``y[b, t] = x[b, t+1]`` for 99.9 % of
        the targets that count. Then a copy in evaluation mode is run twice, with ``x`` and with ``x`` whose times after
        the middle ``m`` come from other rows. It leaks where outputs at times up to ``m`` with a target differ by more
        than 1e-3 of their standard deviation. Layer: the first module whose output there differs although its own input
        there does not.
        Column: in three batches of 16 rows or more the squared correlation of one column with the target (its
        correlation ratio with the classes) is 1 within 1e-6, for a table of 4 columns or more.
        Offset: ``y[b, t] = x[b, t+d]`` with d of -1, 2 or 3, or d = 0 in a model that does not look ahead.

    Thresholds:
        Equal inputs give equal outputs up to rounding, about 1e-6 of their scale; 1e-3 leaves room for half precision.
        A column of real data never determines the target to six digits by chance. Models that squeeze a sequence into
        one vector on purpose (an autoencoder) look ahead through it: a leak is claimed only at a layer that keeps the
        times apart, else it is `info`.

    Fixes:
        In the source: the causal mask, bidirectional=False, left padding; the column; one shift.

    References:
        Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3 (masking). Kaufman, Rosset, Perlich 2012, ACM TKDD 6(4)
        (leakage in data mining).
    """

    code = "target_leak"

    PROBE_STEPS = (1, 10, 100)
    COLUMN_STEPS = 10

    def __init__(self) -> None:
        self._call: Call | None = None
        self._next = 0
        self._columns: list[set[int]] = []

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """Note the call of the model."""
        if module is context.model and self._call is None:
            self._call = Call(tuple(inputs), dict(context.kwargs or {}))
        return ()

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Compare targets with inputs, and look ahead in a copy."""
        call, self._call = self._call, None
        if call is None:
            return
        if context.step < self.COLUMN_STEPS and len(self._columns) < 3:
            yield from self._look_at_columns(context, graph, call)
        if self._next < len(self.PROBE_STEPS) and context.step >= self.PROBE_STEPS[self._next]:
            self._next += 1
            yield from self._look_ahead(context, graph, call)

    def on_step_end(self, context: AuditContext) -> Iterable[AuditFinding]:
        """Forget the call of a step without backward."""
        self._call = None
        return ()

    def _look_at_columns(self, context: AuditContext, graph: LossGraph, call: Call) -> Iterable[AuditFinding]:
        tensors = list(tensors_in((call.inputs, dict(call.kwargs))))
        terms = loss_terms(graph)
        if len(tensors) != 1 or len(terms) != 1:
            return
        x, (_, y) = tensors[0], rows_of(terms[0])
        if not x.is_floating_point() or x.dim() != 2 or x.shape[0] != len(y) or len(y) < _MIN_ROWS:
            return
        if x.shape[1] < _MIN_COLUMNS or x.shape[1] > 4096:
            return
        shares = _determined(terms[0], x, y)
        if shares is None:
            return
        self._columns.append(set(torch.nonzero(shares > 1 - 1e-6).flatten().tolist()))
        if len(self._columns) < 3:
            return
        always = set.intersection(*self._columns)
        if 0 < len(always) <= x.shape[1] // _MIN_COLUMNS:
            column = min(always)
            yield finding(
                context,
                "target_in_input",
                f"Column {column} of the input determines the target exactly, in three batches of {len(y)} rows.",
                measures=(Measure(name="column", value=float(column)), Measure(name="r_squared", value=1.0)),
                source=source_of(context.model),
            )

    def _look_ahead(self, context: AuditContext, graph: LossGraph, call: Call) -> Iterable[AuditFinding]:
        terms = loss_terms(graph)
        if len(terms) != 1 or not may_probe(context.model):
            return
        match = _match(terms[0], call)
        if match is None:
            return
        try:
            seen = _Ahead(context.model, call, match).run()
        except Exception:  # the user's code on a copy may raise anything; then nothing is claimed
            return
        if match.offset == 1 and seen.moved > _MOVED:
            layer = seen.layer
            where = f"from {layer} on" if layer else "and no single layer was seen to mix them"
            yield finding(
                context,
                "looks_ahead",
                f"The target is the next element of the input, and outputs up to the middle of the sequence change by "
                f"{seen.moved:.2g} of their standard deviation when only later elements do, {where}.",
                layer=layer,
                severity=Severity.WARNING if layer else Severity.INFO,
                measures=(Measure(name="change_ahead", value=seen.moved, baseline=0.0, threshold=_MOVED),),
                source=source_of(context.model.get_submodule(layer)) if layer else source_of(context.model),
            )
        elif match.offset != 1 and (match.offset != 0 or seen.moved <= _MOVED):
            yield finding(
                context,
                "token_shift",
                f"The target is the input itself {match.offset:+d} elements away (0 is the same element), not the next "
                "one.",
                measures=(Measure(name="offset", value=float(match.offset), baseline=1.0),),
                source=source_of(context.model),
            )


def _determined(term: LossTerm, x: Tensor, y: Tensor) -> Tensor | None:
    """The share of the target's variance that each column of a table settles, or the other way round for classes."""
    if term.kind == "values":
        a, b = x.double() - x.double().mean(0), y.double() - y.double().mean()
        squares = a.square().sum(0) * b.square().sum()
        return (a * b[:, None]).sum(0).square() / squares.clamp_min(1e-300)
    groups = torch.where((y >= 0) & (y < term.num_outputs), y, term.num_outputs)
    shares, told, present, number = between_shares(x, groups, term.num_outputs)
    if not bool((present > 1) & (2 * present <= number)):
        return None
    return torch.where(told, shares, 0.0)


@dataclass(frozen=True)
class _Match:
    """The input that the target was cut from."""

    sequence: Tensor
    offset: int
    time: int
    """Axis of the sequence that is time: 0 or 1."""
    counted: Tensor
    """`[batch, time]`, which targets count."""


def _match(term: LossTerm, call: Call) -> _Match | None:
    _, target = rows_of(term)
    for x in tensors_in((call.inputs, dict(call.kwargs))):
        if x.dim() < 2 or x.dim() > 3 or (x.dim() == 2) != (not x.is_floating_point()):
            continue
        for time in (1, 0):
            found = _match_along(term, x, target, time)
            if found is not None:
                return found
    return None


def _match_along(term: LossTerm, x: Tensor, target: Tensor, time: int) -> _Match | None:
    batch, times = (x.shape[0], x.shape[1]) if time == 1 else (x.shape[1], x.shape[0])
    if times < _MIN_TIMES or batch < 1:
        return None
    sequence = x if time == 1 else x.transpose(0, 1)  # [batch, time, ...]
    columns = [sequence] if x.dim() == 2 else [sequence[..., i] for i in range(min(sequence.shape[-1], 16))]
    for length, start in ((times, 0), (times - 1, 1)):
        if target.numel() != batch * length:
            continue
        asked = target.reshape(batch, length) if time == 1 else target.reshape(length, batch).transpose(0, 1)
        counted = torch.ones_like(asked, dtype=torch.bool)
        if term.kind == "classes":
            counted = (asked != term.ignore_index) & (asked >= 0)
        for column in columns:
            if bool((column == column[:, :1]).all()):
                continue
            # The same length: any offset. One shorter: the model has shifted, and its outputs end one earlier.
            for offset in _OFFSETS if start == 0 else (1,):
                first, last = max(0, -offset), min(length, times - offset)
                told = counted[:, first:last]
                equal = (asked[:, first:last] == column[:, first + offset : last + offset]) & told
                if int(told.sum()) >= _MIN_TIMES and float(equal.sum()) >= _EQUAL * float(told.sum()):
                    return _Match(x, offset, time, counted)
    return None


@dataclass(frozen=True)
class _Seen:
    moved: float
    layer: str | None


class _Ahead:
    """Two runs of a copy that differ in later times only."""

    def __init__(self, model: nn.Module, call: Call, match: _Match) -> None:
        self._model, self._match = model, match
        self._call = call
        x = match.sequence
        self._times = x.shape[match.time]
        self._batch = x.shape[1 - match.time]
        self._middle = self._times // 2

    def run(self) -> _Seen:
        x, time = self._match.sequence, self._match.time
        other = x.flip(1 - time) if self._batch > 1 else x.flip(time)
        at = torch.arange(self._times, device=x.device)
        late = (at >= self._middle).reshape([-1 if d == time else 1 for d in range(x.dim())])
        later = torch.where(late, other, x)
        cut = self._batch if time == 0 else None
        with copy_of(self._model) as clone:
            names = {id(m): clean_name(n) or ROOT for n, m in clone.named_modules()}
            readings: list[list[_Passed]] = []
            outputs: list[Any] = []
            for sequence in (x, later):
                call = Call(
                    map_tensors(self._call.inputs, lambda t, s=sequence: s if t is x else t),
                    map_tensors(dict(self._call.kwargs), lambda t, s=sequence: s if t is x else t),
                )
                passed: list[_Passed] = []
                handles = [
                    m.register_forward_hook(lambda m, i, o, p=passed: p.append(self._read(m, i, o)))
                    for m in clone.modules()
                ]
                outputs.append(run_copy(clone, copied(call, None) if cut else copied(call), seed=0))
                readings.append(passed)
                for handle in handles:
                    handle.remove()
            moved = self._moved(*outputs)
            if moved <= _MOVED:
                return _Seen(moved, None)
            return _Seen(moved, self._first(clone, names, *readings))

    def _early(self, tensor: Tensor) -> Tensor | None:
        """The part of a tensor that belongs to the times before the middle; None where it has no times."""
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return None
        times, batch = (self._times, self._times - 1), self._batch
        if tensor.shape[0] == batch and tensor.shape[1] in times:
            return tensor[:, : self._middle]
        if tensor.shape[1] == batch and tensor.shape[0] in times:
            return tensor[: self._middle].transpose(0, 1)
        if tensor.dim() > 2 and tensor.shape[0] == batch and tensor.shape[-1] in times:
            return tensor.movedim(-1, 1)[:, : self._middle]
        if tensor.shape[0] == batch * self._times and self._match.time == 1:
            return tensor.reshape(batch, self._times, *tensor.shape[1:])[:, : self._middle]
        return None

    def _moved(self, one: Any, other: Any) -> float:
        for a, b in zip(tensors_in(one), tensors_in(other), strict=True):
            early, later = self._early(a), self._early(b)
            if early is None or later is None:
                continue
            counted = self._match.counted[:, : self._middle]
            scale = a.float().std()
            if not bool(counted.any()) or counted.shape != early.shape[:2] or not float(scale) > 0:
                continue
            change = (early.float() - later.float()).abs().flatten(2).amax(2) if early.dim() > 2 else (
                early.float() - later.float()
            ).abs()  # fmt: skip
            return float((change * counted).max() / scale)
        return 0.0

    def _read(self, module: nn.Module, inputs: Any, output: Any) -> _Passed:
        given = [t for t in tensors_in(inputs) if t.is_floating_point() and t.dim() > 1]
        first = next(tensors_in(output), None)
        return _Passed(
            module,
            [(t if (e := self._early(t)) is None else e).clone() for t in given],
            None if first is None or (early := self._early(first)) is None else early.clone(),
        )

    def _first(self, clone: nn.Module, names: dict[int, str], one: list[_Passed], other: list[_Passed]) -> str | None:
        for a, b in zip(one, other, strict=True):
            if a.module is not b.module or a.output is None or b.output is None or a.output.shape != b.output.shape:
                continue
            same = all(_close(p, q) for p, q in zip(a.inputs, b.inputs, strict=True))
            if same and not _close(a.output, b.output) and a.module is not clone and _keeps_times(a.module, one):
                return names[id(a.module)]
        return None


@dataclass(frozen=True)
class _Passed:
    """One call of a module in a run: what belongs to early times."""

    module: nn.Module
    inputs: list[Tensor]
    output: Tensor | None


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    scale = a.float().std() if a.numel() > 1 else a.float().abs().max()
    return bool((a.float() - b.float()).abs().max() <= _MOVED * scale.clamp_min(1e-30))


def _keeps_times(module: nn.Module, calls: Sequence[_Passed]) -> bool:
    """Whether the module mixes times itself, and not through one vector for all of them."""
    inside = {id(m) for m in _below(module)}
    if not inside:
        return True
    if any(isinstance(m, nn.RNNBase) for m in _below(module)):
        return False
    return all(call.output is not None for call in calls if id(call.module) in inside)


def _below(module: nn.Module) -> Iterator[nn.Module]:
    return (m for m in module.modules() if m is not module)
