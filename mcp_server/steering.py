"""The tools that change a live run; ``--read-only`` leaves them out. Their docstrings are what agents read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gradtracer.control import DEFAULT_TRIAL_STEPS, MAX_ALTERNATIVES, MAX_TRIAL_STEPS, Candidate
from gradtracer.records import Intervention, PolicyMode
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
        Field(
            description="dry_run shows what would change; trial trains on with and without the fix, compares and puts "
            "everything back; apply acts."
        ),
    ] = "dry_run",
    rollback_first: Annotated[
        bool, Field(description="Restore the newest snapshot from before the trouble, then apply.")
    ] = False,
    alternatives: Annotated[
        list[Candidate] | None,
        Field(
            max_length=MAX_ALTERNATIVES,
            description="For trial: further fixes with their parameters, ranked with the first.",
            examples=[[{"fix": "clip_grad_norm", "parameters": {"max_norm": 1.0}}]],
        ),
    ] = None,
    trial_steps: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_TRIAL_STEPS,
            description=f"For trial: steps of each branch, {DEFAULT_TRIAL_STEPS} by default.",
        ),
    ] = None,
    reason: Reason = "",
) -> Intervention:
    """Preview (dry_run, the default), try or apply a fix on a live run, at its next step boundary.

    dry_run first: `changes` holds old and new values. trial then proves it: `trial` holds the loss curves of all
    branches and a verdict for each. It can take minutes: it returns `pending`, so poll get_intervention. apply
    takes a snapshot, acts, and is watched; revert_intervention takes its `id`. A refusal that says that the run has
    changed means that another acted: call get_run_status first.
    Next: wait_for_event or get_metrics to see the effect, then get_intervention.
    """
    return workspace.apply_autofix(
        run_id,
        fix=fix,
        parameters=parameters,
        mode=mode,
        rollback_first=rollback_first,
        alternatives=alternatives or (),
        trial_steps=trial_steps,
        reason=reason,
    )


def revert_intervention(
    workspace: Workspace, intervention_id: InterventionId, run_id: RunId = None, reason: Reason = ""
) -> Intervention:
    """Take an applied fix back, at the next step boundary: old values return, a standing fix ends.

    Use it when get_intervention or get_metrics show that the fix did harm or is no longer needed. Steps that were
    trained with the fix stay; control_training with action=rollback undoes those too.
    Next: get_intervention to see that its state is `reverted`.
    """
    return workspace.revert_intervention(run_id, intervention_id, reason=reason)


def set_autofix_policy(
    workspace: Workspace,
    mode: Annotated[
        PolicyMode,
        Field(
            description="off: only what is asked for; safe: also fixes that cannot hurt a healthy run; guarded: also "
            "those that are tried first, watched, and taken back where they do harm."
        ),
    ],
    run_id: RunId = None,
    max_interventions: Annotated[
        int | None, Field(ge=0, le=1000, description="At most this many within `within_steps`.")
    ] = None,
    within_steps: Annotated[int | None, Field(ge=1, le=10_000_000, description="See `max_interventions`.")] = None,
    cooldown_steps: Annotated[
        int | None, Field(ge=0, le=1_000_000, description="Steps between two interventions.")
    ] = None,
    max_per_fix: Annotated[
        int | None, Field(ge=1, le=1000, description="At most this many of one fix in the run.")
    ] = None,
    reason: Reason = "",
) -> Intervention:
    """Say what a live run may mend by itself, and how often: off, safe or guarded, with a budget.

    What is left out stays as it is; get_run_status shows the policy in force. Ask the person before you allow more
    than they did. What the run then does by itself has the requester `policy`; get_report lists it.
    Next: wait_for_event to watch the run.
    """
    return workspace.set_autofix_policy(
        run_id,
        mode=mode,
        max_interventions=max_interventions,
        within_steps=within_steps,
        cooldown_steps=cooldown_steps,
        max_per_fix=max_per_fix,
        reason=reason,
    )


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
    return workspace.control_training(run_id, action=action, snapshot=snapshot, reason=reason)
