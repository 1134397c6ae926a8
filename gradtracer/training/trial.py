"""Fork and prove: fixes tried on the live state, beside a control, before one of them touches the run.

From the state at a step boundary every branch trains on the same batches with the same random numbers: the control
untouched, each candidate with its fix in force. A branch is judged by its losses in the second half of its steps, each
taken before the update on a batch that it has not seen yet (prequential, Dawid 1984): to learn few batches by heart is
no progress. Then the live state is put back bit for bit.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil
import torch

from gradtracer.errors import BadParameter, GradtracerError, RunRefused
from gradtracer.fixes import Fix, Undo, get_fix
from gradtracer.records import ParameterScalar, ParameterValue, TrialBranch, TrialResult
from gradtracer.records.base import finite
from gradtracer.training.rehearsal import Rehearsal
from gradtracer.training.state import State, TrainingState

log = logging.getLogger("gradtracer")

MAX_TRIAL_S = 60.0
"""How long the training may stand still for a trial."""
_SIGNIFICANT_ERRORS = 2.0
_SIGNIFICANT_SHARE = 0.01
_CLEAR_ERRORS, _CLEAR_SHARE = 4.0, 0.002
"""A difference counts if it is 2 standard errors (over batches) away from zero and 1 % of the control's loss: with few
batches the error itself is uncertain, and less than 1 % within some steps is seldom anything to act on. It counts too
if it is 4 errors away and 0.2 %: where every batch says the same, a small step in the right direction is one."""


@dataclass(frozen=True)
class Plan:
    """A fix with its checked parameters."""

    fix: Fix[Any]
    parameters: Any
    rollback_first: bool = False

    @classmethod
    def parse(cls, code: str, parameters: Mapping[str, ParameterScalar], rollback_first: bool = False) -> Plan:
        """Look the fix up and check its parameters.

        Raises:
            UnknownFix: If there is none of this code.
            BadParameter: If a parameter cannot be used.
        """
        fix = get_fix(code)
        return cls(fix, fix.parse(parameters), rollback_first)

    @property
    def values(self) -> tuple[ParameterValue, ...]:
        """Its parameters as a record has them."""
        return tuple(ParameterValue(name=n, value=v) for n, v in sorted(self.parameters.model_dump().items()))


@dataclass
class _Branch:
    plan: Plan | None
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def final(self) -> list[float]:
        """The losses that count."""
        return self.losses[len(self.losses) // 2 :] if not self.error else []

    @property
    def is_finite(self) -> bool:
        return bool(self.final) and all(map(math.isfinite, self.final))


class Trial:
    """Runs branches from one live state.

    Args:
        state: Takes and restores the state of the training.
        rehearsal: The batches.
        apply: Carries out a plan on the live objects, as it would be on the run.
        last_grad_norms: Gives the gradient norms read since it was last called, one an update.
        max_s: How long it may take; `MAX_TRIAL_S` by default.
        mean: Averages numbers over the ranks that run the same trial, so that they all come to the same verdict.
    """

    def __init__(
        self,
        state: TrainingState,
        rehearsal: Rehearsal,
        apply: Callable[[Plan], Undo],
        last_grad_norms: Callable[[], list[float]],
        *,
        max_s: float | None = None,
        mean: Callable[[Sequence[float]], list[float]] = list,
    ) -> None:
        self._mean = mean
        self._state, self._rehearsal = state, rehearsal
        self._apply, self._last_grad_norms, self._max_s = (
            apply,
            last_grad_norms,
            MAX_TRIAL_S if max_s is None else max_s,
        )

    def run(self, plans: Sequence[Plan], num_steps: int) -> TrialResult:
        """Try the plans.

        Args:
            plans: At least one.
            num_steps: Steps of each branch.

        Returns:
            The control and the candidates, best first.

        Raises:
            RunRefused: If it would not fit into memory or time; nothing was changed.
        """
        self._check_memory()
        started = time.perf_counter()
        live = self._state.take(gradients=True)
        try:
            control = self._branch(None, live, num_steps, len(plans))
            branches = [self._branch(plan, live, num_steps, 0) for plan in plans]
        finally:
            self._state.restore(live)
        candidates = sorted(
            (_record(b, control) for b in branches),
            key=lambda b: (_RANK[b.verdict], b.difference if b.difference is not None else math.inf),
        )
        return TrialResult(
            num_steps=num_steps,
            num_batches=min(num_steps, self._rehearsal.num_batches),
            seconds=time.perf_counter() - started,
            branches=(_record(control, control), *candidates),
            conclusion=_conclusion(candidates[0]),
        )

    def _branch(self, plan: Plan | None, live: State, num_steps: int, num_others: int) -> _Branch:
        self._state.restore(live)
        branch = _Branch(plan)
        undo: Undo | None = None
        self._last_grad_norms()
        try:
            if plan is not None:
                undo = self._apply_on_all(plan)
            started = time.perf_counter()
            for i in range(num_steps):
                loss = self._rehearsal.step(i % self._rehearsal.num_batches)
                norm = max(self._last_grad_norms(), default=math.nan)
                loss, norm, seconds = self._mean([loss, norm, time.perf_counter() - started])
                branch.losses.append(loss)
                branch.grad_norms.append(norm)
                if i == 0 and num_others:
                    self._check_time(seconds, num_steps, num_others)
        except RunRefused:
            raise
        except GradtracerError as error:
            branch.error = str(error)
        except Exception as error:
            log.warning("a branch of a trial failed", exc_info=True)
            branch.error = f"{type(error).__name__}: {error}"
        finally:
            if undo is not None:
                _take_back(undo)
        return branch

    def _apply_on_all(self, plan: Plan) -> Undo:
        """Apply it; where another rank cannot, this one doesn't either."""
        try:
            undo = self._apply(plan)
        except Exception:
            self._mean([0.0])
            raise
        if self._mean([1.0]) != [1.0]:
            _take_back(undo)
            raise BadParameter("it could not be applied on another rank")
        return undo

    def _check_time(self, step_s: float, num_steps: int, num_others: int) -> None:
        expected = step_s * num_steps * (1 + num_others)
        if expected > self._max_s:
            most = max(1, int(self._max_s / (step_s * (1 + num_others))))
            raise RunRefused(
                f"a step takes {step_s:.3g} s, so {num_steps} steps of {1 + num_others} branches would hold the "
                f"training for {expected:.0f} s; {self._max_s:.0f} s are allowed. Ask for at most {most} steps, or for "
                "fewer candidates"
            )

    def _check_memory(self) -> None:
        # The live state with its gradients: at most twice the state without.
        need = 2 * self._state.num_bytes()
        free = psutil.virtual_memory().available // 2
        device = self._state.device
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0] // 2
        if self._mean([float(need > free)]) != [0.0]:
            raise RunRefused(
                f"a trial copies the state of the training, up to {need / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB "
                "(half of what is free) may be used. mode=apply needs no copy on the device: it saves a snapshot and "
                "watches"
            )


_RANK: dict[str, int] = {"better": 0, "no_difference": 1, "worse": 2, "failed": 3}


def _take_back(undo: Undo) -> None:
    try:
        undo()
    except GradtracerError:
        return  # it has no way back of its own; the state is put back anyway
    except Exception:
        log.exception("the undo of a tried fix failed")


def _record(branch: _Branch, control: _Branch) -> TrialBranch:
    difference = error = None
    if branch.is_finite and control.is_finite:
        pairs = [a - b for a, b in zip(branch.final, control.final, strict=True)]
        difference = statistics.fmean(pairs)
        error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    verdict, note = _verdict(branch, control, difference, error)
    return TrialBranch(
        fix=branch.plan.fix.code if branch.plan else "control",
        parameters=branch.plan.values if branch.plan else (),
        rollback_first=branch.plan.rollback_first if branch.plan else False,
        losses=tuple(map(finite, branch.losses)),
        grad_norms=tuple(map(finite, branch.grad_norms)),
        num_non_finite=sum(
            not math.isfinite(x) or math.isinf(g) for x, g in zip(branch.losses, branch.grad_norms, strict=False)
        ),
        final_loss=statistics.fmean(branch.final) if branch.is_finite else None,
        difference=difference,
        standard_error=error,
        verdict=verdict,
        note=note,
    )


def _verdict(
    branch: _Branch, control: _Branch, difference: float | None, error: float | None
) -> tuple[Literal["control", "better", "worse", "no_difference", "failed"], str]:
    if branch.plan is None:
        return "control", branch.error or ("" if branch.is_finite else "its loss is not finite at the end")
    if branch.error:
        return "failed", branch.error
    if not branch.is_finite:
        both = not control.is_finite
        return ("no_difference" if both else "worse"), "its loss is not finite at the end"
    if difference is None:
        return "better", "its loss is finite at the end, that of the control is not"
    size = abs(statistics.fmean(control.final))
    errors = error or 0.0
    is_large = abs(difference) > max(_SIGNIFICANT_ERRORS * errors, _SIGNIFICANT_SHARE * size)
    is_clear = error is not None and abs(difference) > max(_CLEAR_ERRORS * errors, _CLEAR_SHARE * size)
    if not is_large and not is_clear:
        return "no_difference", ""
    if difference > 0 and branch.plan.fix.loss_may_rise:
        return "no_difference", "its loss is higher, as it may be: what it mends is not in the loss"
    return ("better" if difference < 0 else "worse"), ""


def _conclusion(best: TrialBranch) -> str:
    if best.verdict == "better":
        by = "" if best.difference is None else f": its loss ends {-best.difference:.3g} below the control's"
        return f"{best.fix} helps{by}. mode=apply does it on the run."
    if best.verdict == "failed":
        return f"No candidate could be tried: {best.note}"
    if best.verdict == "no_difference":
        return f"Within these steps {best.fix} makes no difference that stands out from the batches."
    return "Every candidate makes it worse; the run is better left alone, or another cause is at work."
