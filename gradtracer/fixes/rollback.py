"""Go back to a saved state."""

from __future__ import annotations

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, SnapshotInfo, Undo
from gradtracer.records import Change, Safety


class RollbackParameters(FixParameters):
    """Parameters of `rollback`."""

    snapshot: str | None = Field(
        default=None, max_length=80, description="Name of a snapshot; by default the newest taken while all was well."
    )


@FIXES.register
class Rollback(Fix[RollbackParameters]):
    """Put weights, optimizers and random states back to a snapshot, bit for bit.

    What:
        The training goes on from the restored state with the batches that come next; step numbers go on too.

    Why:
        Weights that a bad update has damaged often do not recover by a better rate alone.

    Definition:
        Parameters, buffers, optimizer states and the random states of torch, Python and numpy are those of the
        snapshot afterwards. Schedulers and data loaders are the user's, and go on.

    Safety:
        Guarded: what was learned since the snapshot is lost.

    Undo:
        The state before the rollback is a snapshot too, and is restored.
    """

    code = "rollback"
    title = "Roll back to a snapshot"
    safety = Safety.GUARDED
    works_sharded = True
    mends = ("learning_rate_too_high", "exploding_gradient", "nan_in_data", "dead_relu")
    Parameters = RollbackParameters

    def preview(self, run: LiveRun, parameters: RollbackParameters) -> list[Change]:
        """From which step to which it would go back."""
        return [Change(target="training.step_of_weights", old=run.step, new=_choose(run, parameters).step)]

    def apply(self, run: LiveRun, parameters: RollbackParameters) -> Undo:
        """Restore the snapshot."""
        chosen = _choose(run, parameters)
        before = run.take_snapshot()
        run.restore(chosen.name)

        def undo() -> None:
            if before is None:
                raise BadParameter(
                    "the state before the rollback was not finite, so it was not kept: no way back to it"
                )
            run.restore(before.name)

        return undo


def _choose(run: LiveRun, parameters: RollbackParameters) -> SnapshotInfo:
    snapshots = run.snapshots()
    if parameters.snapshot is not None:
        found = next((s for s in snapshots if s.name == parameters.snapshot), None)
        if found is None:
            names = ", ".join(s.name for s in snapshots) or "none yet"
            raise BadParameter(f"no snapshot {parameters.snapshot!r}; there are: {names}")
        return found
    before = run.snapshot_before_trouble()
    if before is None:
        names = ", ".join(s.name for s in snapshots) or "none"
        raise BadParameter(f"no snapshot was taken before the trouble began; name one to use it all the same: {names}")
    return before
