"""The run mends itself, within its policy: it diagnoses, tries what fits on a fork, applies the best, and watches it.

It is a requester like any other: its trials and fixes go through the same queue as an agent's, are recorded with their
reasons, watched, and taken back the same way.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from gradtracer.control import Candidate, FixRequest, InterventionReply, Reply
from gradtracer.diagnosis import HEALTHY, UNKNOWN
from gradtracer.errors import BadParameter, GradtracerError
from gradtracer.fixes import FIXES
from gradtracer.records import (
    AutofixPolicy,
    CausalHypothesis,
    FixSuggestion,
    Intervention,
    InterventionState,
    PolicyMode,
    Safety,
    SemanticEvent,
    Severity,
    TrialBranch,
)
from gradtracer.training.trial import Plan

log = logging.getLogger("gradtracer")

REQUESTER = "policy"
PROTECTION = "skip_nonfinite_step"
"""In force from the first step on under every policy but `off`: it touches no update with a finite gradient."""
TRIAL_STEPS, LONG_TRIAL_STEPS = 16, 64
"""The longer one where the cause is sure and the shorter one speaks for nothing: to start again from a snapshot takes
longer to pay."""
_MIN_PROBABILITY = 0.5
"""A cause is acted on where it is more probable than all others together."""
_MIN_ALTERNATIVE = 0.15
_SURE = 0.9
_MAX_CANDIDATES = 6
_FIRST_PATIENCE, _MAX_PATIENCE = 2, 500
"""Steps to the next diagnosis where one led to nothing: doubled each time, since it costs up to a second."""


@dataclass(frozen=True)
class _Option:
    cause: str
    probability: float
    suggestion: FixSuggestion
    plan: Plan

    @property
    def rollback_first(self) -> bool:
        return self.plan.rollback_first

    @property
    def candidate(self) -> Candidate:
        return Candidate(
            fix=self.suggestion.fix,
            parameters={p.name: p.value for p in self.suggestion.parameters},
            rollback_first=self.rollback_first,
        )

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it another fix."""
        return (self.suggestion.fix, self.rollback_first, self.plan.values)


class Autofix:
    """Decides, at step boundaries.

    Args:
        submit: Queues a request, as for any requester.
        diagnose: What the run shows now, hypotheses most probable first.
        events: All events so far.
        is_watched: Whether the watch of an intervention is still going on.
        is_damaged: Whether a weight is not finite, or the loss no longer is.
        can_roll_back: Whether there is a snapshot from before the trouble.
    """

    def __init__(
        self,
        submit: Callable[[FixRequest], Future[Reply]],
        diagnose: Callable[[], Sequence[CausalHypothesis]],
        events: Callable[[], Sequence[SemanticEvent]],
        is_watched: Callable[[str], bool],
        is_damaged: Callable[[], bool],
        can_roll_back: Callable[[], bool],
    ) -> None:
        self._submit, self._diagnose, self._events, self._is_watched = submit, diagnose, events, is_watched
        self._is_damaged, self._can_roll_back = is_damaged, can_roll_back
        self._options: list[_Option] = []
        self._pending: Future[Reply] | None = None
        self._asked_for_trial = False
        self._is_long = False
        self._watched: str | None = None
        self._is_protected = False
        self._tried: set[tuple[object, ...]] = set()
        """Fixes with their parameters that were applied, or made it worse: not tried again in this run."""
        self._num_applied: Counter[str] = Counter()
        self._applied_at: deque[int] = deque()
        self._seen: set[str] = set()
        self._settled_at = -1
        """Step up to which what was seen has been acted on."""
        self._patience = _FIRST_PATIENCE
        self._next_look = 0

    def at_boundary(self, step: int, policy: AutofixPolicy) -> None:
        """A step is over.

        Args:
            step: Its number.
            policy: What is allowed now.
        """
        if policy.mode is PolicyMode.OFF:
            return
        if self._pending is not None:
            if self._pending.done():
                pending, self._pending = self._pending, None
                self._answered(step, policy, pending)
            return
        if not self._is_protected:
            self._is_protected = True
            self._ask(FixRequest(fix=PROTECTION, mode="apply", requester=REQUESTER,
                                 reason="standing protection of the policy"))  # fmt: skip
            return
        if self._watched is not None:
            self._look_at_watched(step)
            return
        if step >= self._next_look and self._is_allowed(step, policy) and self._is_troubled():
            self._act(step, policy)

    # ------------------------------------------------------------------ inside

    def _is_allowed(self, step: int, policy: AutofixPolicy) -> bool:
        while self._applied_at and self._applied_at[0] <= step - policy.within_steps:
            self._applied_at.popleft()
        rested = not self._applied_at or step - self._applied_at[-1] >= policy.cooldown_steps
        return rested and len(self._applied_at) < policy.max_interventions

    def _is_troubled(self) -> bool:
        """Whether there is a warning that was not there, or goes on, since what was last done."""
        warnings = [e for e in self._events() if e.severity is not Severity.INFO]
        return any(e.id not in self._seen or (e.open and e.last_step > self._settled_at) for e in warnings)

    def _act(self, step: int, policy: AutofixPolicy) -> None:
        self._options = self._choose(self._diagnose(), policy)
        if not self._options:
            self._wait(step)
            return
        self._is_long = False
        if self._is_damaged():
            # A trial from a state that is not finite would only cost steps.
            self._options.sort(key=lambda o: not (o.rollback_first or o.suggestion.fix == "rollback"))
            self._apply(self._options[0])
            return
        first, *others = self._options
        if first.probability >= _SURE and not first.plan.fix.shows_in_loss:
            self._apply(first)  # a trial could not speak for it, and every step that it waits is lost
            return
        self._try(first, others, TRIAL_STEPS)

    def _try(self, first: _Option, others: Sequence[_Option], num_steps: int) -> None:
        self._ask(
            FixRequest(
                **first.candidate.model_dump(),
                mode="trial",
                alternatives=tuple(o.candidate for o in others),
                trial_steps=num_steps,
                requester=REQUESTER,
                reason=_reason(first),
            )
        )

    def _choose(self, hypotheses: Sequence[CausalHypothesis], policy: AutofixPolicy) -> list[_Option]:
        if not hypotheses or hypotheses[0].code in (HEALTHY, UNKNOWN) or hypotheses[0].probability < _MIN_PROBABILITY:
            return []
        allowed = {Safety.SAFE} if policy.mode is PolicyMode.SAFE else {Safety.SAFE, Safety.GUARDED}
        options: list[_Option] = []
        for hypothesis in hypotheses:
            if hypothesis.code in (HEALTHY, UNKNOWN) or hypothesis.probability < _MIN_ALTERNATIVE:
                continue
            for suggestion in hypothesis.fixes:
                if (
                    suggestion.fix == PROTECTION
                    or FIXES[suggestion.fix].safety not in allowed
                    or self._num_applied[suggestion.fix] >= policy.max_per_fix
                ):
                    continue
                parameters = {p.name: p.value for p in suggestion.parameters}
                for rollback_first in self._ways(suggestion):
                    try:
                        plan = Plan.parse(suggestion.fix, parameters, rollback_first)
                    except BadParameter:
                        continue  # what would mend it lies outside the bounds of the fix
                    option = _Option(hypothesis.code, hypothesis.probability, suggestion, plan)
                    if option.key not in self._tried | {o.key for o in options}:
                        options.append(option)
        return options[:_MAX_CANDIDATES]

    def _ways(self, suggestion: FixSuggestion) -> tuple[bool, ...]:
        """Going on from the weights as they are, and from those before the trouble: a trial tells which is better."""
        fix = FIXES[suggestion.fix]
        if not self._can_roll_back():
            return (False,)
        if suggestion.fix == "rollback" or not fix.shows_in_loss:
            return (suggestion.rollback_first,)
        return (suggestion.rollback_first, not suggestion.rollback_first)

    def _answered(self, step: int, policy: AutofixPolicy, answer: Future[Reply]) -> None:
        try:
            reply = answer.result()
        except GradtracerError as error:
            log.debug("a request of the policy was refused: %s", error)
            if self._asked_for_trial:
                self._apply(self._options[0])  # the watch has to do
            else:
                self._next_best(step)
            return
        assert isinstance(reply, InterventionReply)
        done = reply.intervention
        if done.mode == "trial":
            self._decide(step, done)
        elif done.state is InterventionState.APPLIED and done.fix == PROTECTION:
            return
        elif done.state is InterventionState.APPLIED:
            option = self._options[0]
            fix, _, values = option.key
            self._tried |= {(fix, False, values), (fix, True, values)}  # in force now: not once more from a snapshot
            self._num_applied[done.fix] += 1
            self._applied_at.append(step)
            self._watched = done.id
            self._patience = _FIRST_PATIENCE
        else:
            self._next_best(step)

    def _decide(self, step: int, tried: Intervention) -> None:
        """Apply what the trial speaks for: the most probable cause's fix that helped.

        A fix whose effect does not show in the loss of a few steps need only do no harm there.
        """
        if tried.trial is None:
            self._next_best(step)
            return
        verdicts = {_key_of(b): b for b in tried.trial.branches[1:]}
        found = [(o, verdicts[o.key]) for o in self._options if o.key in verdicts]
        for cause in dict.fromkeys(o.cause for o, _ in found):
            better = [(b.difference if b.difference is not None else -math.inf, b.final_loss or 0.0, i, o)
                      for i, (o, b) in enumerate(found) if o.cause == cause and b.verdict == "better"]  # fmt: skip
            if better:
                self._apply(min(better)[-1])
                return
        harmless = [
            o
            for o, b in found
            if b.verdict == "no_difference" and not o.plan.fix.shows_in_loss and o.probability >= _MIN_PROBABILITY
        ]
        promising = [o for o, b in found if b.verdict != "failed" and o.plan.fix.shows_in_loss]
        if harmless:
            self._apply(harmless[0])
        elif not self._is_long and promising and promising[0].probability >= _SURE:
            self._is_long = True
            self._options = [o for o in promising if o.cause == promising[0].cause]
            self._try(self._options[0], self._options[1:], LONG_TRIAL_STEPS)
        else:
            self._tried.update(o.key for o, b in found if b.verdict in ("worse", "failed"))
            self._wait(step)

    def _apply(self, option: _Option) -> None:
        self._options = [option, *(o for o in self._options if o is not option)]
        self._ask(FixRequest(**option.candidate.model_dump(), mode="apply", requester=REQUESTER,
                             reason=_reason(option)))  # fmt: skip

    def _next_best(self, step: int) -> None:
        """What was asked for was refused or failed."""
        self._tried.update(o.key for o in self._options[:1])
        self._options = [o for o in self._options[1:] if o.probability >= _MIN_PROBABILITY]
        if self._options:
            self._apply(self._options[0])
        else:
            self._wait(step)

    def _look_at_watched(self, step: int) -> None:
        if self._watched is not None and self._is_watched(self._watched):
            return
        self._watched = None
        self._seen = {e.id for e in self._events()}
        self._settled_at = step
        self._next_look = step + 1

    def _wait(self, step: int) -> None:
        self._seen = {e.id for e in self._events()}
        self._next_look = step + self._patience
        self._patience = min(2 * self._patience, _MAX_PATIENCE)

    def _ask(self, request: FixRequest) -> None:
        self._asked_for_trial = request.mode == "trial"
        try:
            self._pending = self._submit(request)
        except GradtracerError as error:  # answered at the next boundary, as any refusal
            self._pending = Future()
            self._pending.set_exception(error)


def _reason(option: _Option) -> str:
    return f"{option.cause} at {option.probability:.0%}: {option.suggestion.expected_effect}".rstrip(": ")


def _key_of(branch: TrialBranch) -> tuple[object, ...]:
    return (branch.fix, branch.rollback_first, branch.parameters)
