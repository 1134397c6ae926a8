"""The tools that change a live run; ``--read-only`` leaves them out. Their docstrings are what agents read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gradtracer.records import Intervention
from gradtracer.workspace import Workspace
from mcp_server.arguments import InterventionId, Reason, RunId

Scalar = bool | int | float | Annotated[str, Field(max_length=256)] | None


def apply_autofix(
    workspace: Workspace,
    fix: Annotated[
        str, Field(min_length=1, max_length=128, description="Code of a fix.", examples=["set_learning_rate"])
    ],
    run_id: RunId = None,
    parameters: Annotated[
        dict[str, Scalar] | None,
        Field(
            max_length=20,
            description="Parameters of the fix by name, within the bounds that list_fixes shows.",
            examples=[{"learning_rate": 0.01}],
        ),
    ] = None,
    mode: Annotated[
        Literal["dry_run", "trial", "apply"],
        Field(description="dry_run changes nothing; apply acts; trial comes in a later version and is refused."),
    ] = "dry_run",
    reason: Reason = "",
) -> Intervention:
    """Preview (dry_run, the default) or apply a fix to a live run, at its next step boundary.

    Always dry_run first and look at `changes`: old and new values. apply takes a snapshot, acts, and returns an
    intervention whose `id` revert_intervention takes. A state of `pending` means that the step boundary was not
    reached in time: poll get_intervention. A run that is finished or dead cannot be changed.
    Next: wait_for_event or get_metrics to see the effect, then get_intervention.
    """
    return workspace.apply_autofix(run_id, fix=fix, parameters=parameters, mode=mode, reason=reason, requester="agent")


def revert_intervention(
    workspace: Workspace, intervention_id: InterventionId, run_id: RunId = None, reason: Reason = ""
) -> Intervention:
    """Take an applied fix back, at the next step boundary: old values return, a standing fix ends.

    Use it when get_intervention or get_metrics show that the fix did harm or is no longer needed. Steps that were
    trained with the fix stay; control_training with action=rollback undoes those too.
    Next: get_intervention to see that its state is `reverted`.
    """
    return workspace.revert_intervention(run_id, intervention_id, reason=reason, requester="agent")


def control_training(
    workspace: Workspace,
    action: Annotated[
        Literal["pause", "resume", "checkpoint", "rollback", "stop"],
        Field(
            description="pause holds the run at the next step boundary; resume lets it go on; checkpoint saves a "
            "snapshot; rollback puts weights, optimizers and random state back to one; stop ends the training."
        ),
    ],
    run_id: RunId = None,
    snapshot: Annotated[
        str | None,
        Field(max_length=256, description="For rollback: name of a snapshot; the newest healthy one if left out."),
    ] = None,
    reason: Reason = "",
) -> Intervention:
    """Pause, resume, checkpoint, roll back or stop a live run, at its next step boundary.

    pause while you examine a failing run, so that it does not get worse; do not forget to resume. rollback and stop
    lose work: ask the person first. A state of `pending` means that the step boundary was not reached in time: poll
    get_intervention. Next: get_run_status.
    """
    return workspace.control_training(run_id, action=action, snapshot=snapshot, reason=reason, requester="agent")
