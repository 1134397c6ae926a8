"""Bring units back that put out zero for every input."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._modules import all_modules, choose, forget_moments_at, keep, seeded
from gradtracer.fixes._ranks import over_ranks
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety

_NUM_BATCHES = 4


class ReviveDeadUnitsParameters(FixParameters):
    """Parameters of `revive_dead_units`."""

    layers: str | None = Field(
        default=None, max_length=2000, description="Layers that feed the rectifiers, with commas; all by default."
    )
    incoming: str = Field(
        default="shift",
        pattern="^(shift|draw)$",
        description="shift: keep the weights of a unit and move its bias so that half of the inputs pass; draw: new "
        "weights and a bias of 0.",
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of the random numbers.")


@FIXES.register
class ReviveDeadUnits(Fix[ReviveDeadUnitsParameters]):
    """Give units whose rectifier is zero for every input weights with which they pass some of them again.

    What:
        The units are looked for on captured batches, layer by layer in forward order, so that what a dead layer fed
        with constants is looked at once it gets inputs again. Live units are not touched.

    Why:
        A dead unit receives no gradient, so no later step brings it back.

    Definition:
        Dead: the rectifier's input is at most 0 in every row of 4 batches. shift: ``b <- b - mean(input)``, and where
        the deviation s of the input over rows is above 1, ``(w, b) <- (w, b) / s``. draw: ``w ~ N(0, 2 / fan_in)``,
        ``b = 0``, and in a layer that is not dead as a whole the weights going out of the unit become 0, so that the
        output stays as it is (ReDo). A unit whose input is the same for all rows, or that has no bias, is always drawn.
        Moments of all these weights become 0.

    Safety:
        Guarded: by design the output changes where weights go on being used.

    Undo:
        Weights and moments are put back.

    References:
        Sokar, Agarwal, Castro, Evci 2023, arXiv:2302.12902, algorithm 1. Salimans & Kingma 2016, arXiv:1602.07868,
        equation 6 (data-dependent bias).
    """

    code = "revive_dead_units"
    title = "Revive dead units"
    safety = Safety.GUARDED
    num_batches = _NUM_BATCHES
    mends = ("dead_relu",)
    Parameters = ReviveDeadUnitsParameters

    def preview(self, run: LiveRun, parameters: ReviveDeadUnitsParameters) -> list[Change]:
        """The layers in which dead units are looked for."""
        return [
            Change(target=f"{name}.weight", old="as trained", new=f"dead units: {parameters.incoming}")
            for name in _chosen(run, parameters)
        ]

    def apply(self, run: LiveRun, parameters: ReviveDeadUnitsParameters) -> Undo:
        """Look, and revive."""
        import torch

        from gradtracer.training.flow import RECTIFIERS, by_unit, reading_flow

        chosen = _chosen(run, parameters)
        generator = seeded(run, parameters.seed)
        known = all_modules(run)
        with reading_flow(run.model) as flow:
            run.rehearse(1)
        order = [name for name in flow.order if name in chosen and flow.activation.get(name) in RECTIFIERS]
        if not order:
            raise BadParameter(f"no rectifier takes the output of {', '.join(chosen)[:200]}")
        after = {n: [known[m] for m in flow.next_layers.get(n, ()) if m in known] for n in order}
        undo = keep(run, (p for n in order for m in (chosen[n], *after[n]) for p in m.parameters(recurse=False)))
        num_revived = 0
        with torch.no_grad():
            for name in order:
                module = chosen[name]
                received: list[Any] = []

                def note(layer: str, function: str, given: Any, caller: str) -> None:
                    if layer == name and function in RECTIFIERS:  # noqa: B023
                        received.append(by_unit(given))  # noqa: B023

                with reading_flow(run.model, note):
                    run.rehearse(_NUM_BATCHES)
                rows = torch.cat(received) if received else torch.zeros(1, 0)
                if rows.shape[1] != module.weight.shape[0] or not bool(torch.isfinite(rows).all()):
                    continue
                dead = (over_ranks(rows.amax(dim=0), "max") <= 0).nonzero().flatten()
                if len(dead):
                    whole = len(dead) == rows.shape[1]
                    mean, square = over_ranks(torch.stack([rows.mean(dim=0), rows.square().mean(dim=0)]), "mean")
                    deviation = (square - mean.square()).clamp_min(0).sqrt()
                    inputs = mean[dead], deviation[dead]
                    _revive(run, module, inputs, dead, parameters.incoming, whole, after[name], generator)
                    num_revived += len(dead)
        if not num_revived:
            undo()
            raise BadParameter(
                f"no unit of {', '.join(order)[:200]} is dead on {run.num_held_batches} captured batches"
            )
        return undo


def _revive(
    run: LiveRun,
    module: Any,
    inputs: tuple[Any, Any],
    dead: Any,
    incoming: str,
    whole: bool,
    after: list[Any],
    generator: Any,
) -> None:
    import torch

    mean, deviation = inputs
    varies = deviation > 1e-3 * (1.0 + mean.abs())
    shifted = varies if incoming == "shift" and module.bias is not None else torch.zeros_like(varies)
    kept, drawn = dead[shifted], dead[~shifted]
    if len(kept) and module.bias is not None:
        scale = deviation[shifted].clamp_min(1.0).to(module.weight.dtype)
        bias = module.bias[kept] - mean[shifted].to(module.bias.dtype)
        module.bias[kept] = bias / scale
        module.weight[kept] = module.weight[kept] / scale.view(-1, *[1] * (module.weight.dim() - 1))
    if len(drawn):
        shape = module.weight[drawn].shape
        new = math.sqrt(2.0 / math.prod(shape[1:])) * torch.randn(shape, generator=generator)
        module.weight[drawn] = new.to(module.weight)
        if module.bias is not None:
            module.bias[drawn] = 0
        if not whole:
            for following in after:
                columns = _columns(module, following, drawn)
                if columns is not None:
                    following.weight[:, columns] = 0
                    forget_moments_at(run, following.weight, columns, dim=1)
    for parameter in (module.weight, module.bias):
        if parameter is not None:
            forget_moments_at(run, parameter, dead)


def _columns(module: Any, following: Any, units: Any) -> Any:
    """The inputs of the following layer that the units make; flattened images give each channel a block of them."""
    import torch

    width, num_units = following.weight.shape[1], module.weight.shape[0]
    if width % num_units:
        return None
    block = width // num_units
    return (units[:, None] * block + torch.arange(block, device=units.device)).flatten()


def _chosen(run: LiveRun, parameters: ReviveDeadUnitsParameters) -> dict[str, Any]:
    import torch

    kinds = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    return choose(run, parameters.layers, lambda m: isinstance(m, kinds), "linear or convolutional layer")
