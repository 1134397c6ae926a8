"""Which steps are sampled: often at first, then at the interval, densely for a while when something looks wrong."""

from __future__ import annotations

import math

_EVERY_STEP_UNTIL, _EVERY_TENTH_UNTIL = 10, 100
"""A run shows what is wrong with its start in its first steps; 20 samples in the first 100 cost little once."""

DENSE_STEPS = 20
_DENSE_CREDIT, _DENSE_GAIN = 60.0, 0.02
"""Dense steps are paid from a credit that grows by 0.02 a step: a run that is always suspicious is sampled at 2 % of
its steps on top of the interval, no more."""

_LOSS_JUMP, _NORM_JUMP = 6.0, 10.0
"""A loss 6 mean absolute deviations above its running mean, or a gradient norm 10 times its running geometric mean,
is looked at. This only decides where to look: a false alarm here costs a few samples, and is no event."""
_MEMORY = 0.05
_SETTLED_AFTER = 10


class Schedule:
    """Decides step by step; works in the training thread, so it costs a few float operations.

    Args:
        interval: Steps between samples once the run is under way, at least 1.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._dense_until = -1
        self._credit = _DENSE_CREDIT
        self._step = 0
        self._loss = self._deviation = self._log_norm = math.nan
        self._num_seen = 0

    def is_due(self, step: int) -> bool:
        """Whether this step is sampled, as far as is known now."""
        return (
            step % self.interval == 0
            or step < _EVERY_STEP_UNTIL
            or (step < _EVERY_TENTH_UNTIL and step % 10 == 0)
            or step <= self._dense_until
        )

    def end_step(self) -> None:
        """A step is over."""
        self._step += 1
        if self._step <= self._dense_until:
            self._credit -= 1.0
        else:
            self._credit = min(_DENSE_CREDIT, self._credit + _DENSE_GAIN)

    def look_closely(self) -> None:
        """Sample densely from the next step on, as far as the credit goes."""
        self._dense_until = max(self._dense_until, self._step + min(DENSE_STEPS, int(self._credit)))

    def suspects(self, loss: float, grad_norm: float) -> bool:
        """Whether this step's numbers ask for a closer look; asks for it itself.

        Args:
            loss: NaN where it is missing, infinity where it is not finite.
            grad_norm: Likewise.
        """
        suspicious = math.isinf(loss) or math.isinf(grad_norm)
        settled = self._num_seen >= _SETTLED_AFTER
        if math.isfinite(loss):
            if math.isnan(self._loss):
                self._loss, self._deviation = loss, abs(loss)
            deviation = abs(loss - self._loss)
            suspicious |= settled and loss - self._loss > _LOSS_JUMP * self._deviation
            self._loss += _MEMORY * (loss - self._loss)
            self._deviation += _MEMORY * (deviation - self._deviation)
        if math.isfinite(grad_norm) and grad_norm > 0:
            log_norm = math.log(grad_norm)
            if math.isnan(self._log_norm):
                self._log_norm = log_norm
            suspicious |= settled and log_norm - self._log_norm > math.log(_NORM_JUMP)
            self._log_norm += _MEMORY * (log_norm - self._log_norm)
        self._num_seen += 1
        if suspicious:
            self.look_closely()
        return suspicious
