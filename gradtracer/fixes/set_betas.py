"""Set how long the optimizer remembers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._updates import hold, require_optimizer
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class SetBetasParameters(FixParameters):
    """Parameters of `set_betas`."""

    beta1: float | None = Field(
        default=None, ge=0, le=0.9999, description="Decay of the first moment; the momentum of SGD and RMSprop."
    )
    beta2: float | None = Field(
        default=None, ge=0, le=0.999999, description="Decay of the second moment; the alpha of RMSprop."
    )
    group: int | None = Field(default=None, ge=0, le=10_000, description="Only this parameter group; all by default.")


@FIXES.register
class SetBetas(Fix[SetBetasParameters]):
    """Use these decays of the optimizer's moments for every update until they are reverted.

    What:
        Betas of Adam and its kin, momentum of SGD, momentum and alpha of RMSprop, put in before each update and the
        optimizer's own put back after it.

    Why:
        A second moment that remembers too long underestimates a gradient that grows, and the update spikes; momentum
        that is too high oscillates.

    Definition:
        ``m <- beta1 m + (1 - beta1) g`` and ``v <- beta2 v + (1 - beta2) g^2`` (Adam);
        ``m <- beta1 m + (1 - dampening) g`` (SGD).

    Safety:
        Guarded: less memory is more noise in every update.

    Undo:
        From the next update on the optimizer uses its own values again.

    References:
        Kingma & Ba 2015, arXiv:1412.6980, algorithm 1. Zhai et al. 2023, arXiv:2303.15343, section 4.4 (spikes and
        beta2).
    """

    code = "set_betas"
    title = "Set the decay of the moments"
    safety = Safety.GUARDED
    standing = True
    works_sharded = True
    shows_in_loss = False
    mends = ("exploding_gradient", "warmup_missing")
    Parameters = SetBetasParameters

    def preview(self, run: LiveRun, parameters: SetBetasParameters) -> list[Change]:
        """Old and new values of each group that would change."""
        require_optimizer(run)
        if parameters.beta1 is None and parameters.beta2 is None:
            raise BadParameter("neither beta1 nor beta2 was given; give one or both")
        changes = [
            Change(target=f"optimizers[{o}].param_groups[{g}].{target}", old=old, new=new)
            for o, optimizer in enumerate(run.optimizers)
            for g, hyper in enumerate(optimizer.param_groups)
            if parameters.group is None or g == parameters.group
            for target, old, new in _values(hyper, parameters)
        ]
        if not changes:
            types = ", ".join(type(o).__name__ for o in run.optimizers)
            raise BadParameter(f"{types} has no such moments, or no such group, so they cannot be set")
        return changes

    def apply(self, run: LiveRun, parameters: SetBetasParameters) -> Undo:
        """Hold the values from the next update on."""
        self.preview(run, parameters)
        return hold(run, lambda optimizer: lambda hyper: _wanted(hyper, parameters), parameters.group)


def _values(hyper: Mapping[str, Any], parameters: SetBetasParameters) -> list[tuple[str, float, float]]:
    """Where a group keeps what is set, its own value, and the new one."""
    found: list[tuple[str, float, float]] = []
    betas = hyper.get("betas")
    for i, (name, new) in enumerate((("momentum", parameters.beta1), ("alpha", parameters.beta2))):
        if new is None:
            continue
        if betas is not None:
            found.append((f"betas[{i}]", float(betas[i]), new))
        elif name in hyper:
            found.append((name, float(hyper[name]), new))
    return found


def _wanted(hyper: Mapping[str, Any], parameters: SetBetasParameters) -> dict[str, Any]:
    wanted = {target: new for target, _, new in _values(hyper, parameters)}
    if "betas" in hyper:
        own = hyper["betas"]
        return {"betas": (wanted.get("betas[0]", own[0]), wanted.get("betas[1]", own[1]), *own[2:])}
    return wanted
