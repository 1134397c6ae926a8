"""Give rectifiers a slope below zero."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._modules import all_modules, all_of, choose, rehearse_if_possible
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class LeakySlopeParameters(FixParameters):
    """Parameters of `leaky_slope`."""

    layers: str | None = Field(
        default=None,
        max_length=2000,
        description="nn.ReLU modules, or modules that contain or call rectifiers, with commas; all by default.",
    )
    slope: float = Field(default=0.01, gt=0, le=0.5, description="Slope for negative inputs.")


@FIXES.register
class LeakySlope(Fix[LeakySlopeParameters]):
    """Let rectifiers pass a part of negative inputs, so that their units get a gradient wherever they are.

    What:
        `nn.ReLU` and `nn.ReLU6` modules become leaky rectifiers in place. Where a module calls `relu` as a function in
        its own forward pass, the call is answered by the leaky one; this is found on a captured batch. The state dict
        stays as it is.

    Why:
        With a slope dead units come back by training, and those at risk cannot die.

    Definition:
        ``y = max(x, 0) + slope * min(x, 0)``.

    Safety:
        Guarded: the model computes another function, and the saved model needs the slope too: use nn.LeakyReLU(slope)
        where its state dict is loaded.

    Undo:
        The rectifiers are plain ones again.

    References:
        Maas, Hannun, Ng 2013, ICML workshop, equation 2.
    """

    code = "leaky_slope"
    title = "Give rectifiers a slope below zero"
    safety = Safety.GUARDED
    standing = True
    changes_function = True
    num_batches = 1
    mends = ("dead_relu",)
    Parameters = LeakySlopeParameters

    def preview(self, run: LiveRun, parameters: LeakySlopeParameters) -> list[Change]:
        """The modules and the slope."""
        modules = _rectifiers(run, parameters)
        targets = list(modules) or [parameters.layers or "functional relu"]
        return [Change(target=f"{name}.negative_slope", old=0.0, new=parameters.slope) for name in targets]

    def apply(self, run: LiveRun, parameters: LeakySlopeParameters) -> Undo:
        """Swap."""
        from gradtracer.training.flow import RECTIFIERS, reading_flow
        from gradtracer.training.function_swap import FunctionSwap, leaky_relu

        modules = _rectifiers(run, parameters)
        with reading_flow(run.model) as flow:
            rehearse_if_possible(run, 1)
        known = all_modules(run)
        callers = {name for f in RECTIFIERS for name in flow.callers.get(f, ())} - set(_rectifiers(run, None))
        if parameters.layers is not None:
            inside = choose(run, parameters.layers, lambda m: True, "module")
            callers &= set(inside)
        functional = {name: known[name] for name in callers if name in known}
        if not modules and not functional:
            raise BadParameter("no rectifier was found, neither as a module nor, in a captured batch, as a function")
        swaps = [FunctionSwap(m, dict.fromkeys(RECTIFIERS, leaky_relu(parameters.slope))) for m in functional.values()]
        return all_of([*(swap.remove for swap in swaps), *(_make_leaky(m, parameters.slope) for m in modules.values())])


def _rectifiers(run: LiveRun, parameters: LeakySlopeParameters | None) -> dict[str, Any]:
    import torch

    kinds = (torch.nn.ReLU, torch.nn.ReLU6)
    found = {name: m for name, m in all_modules(run).items() if type(m) in kinds}
    if parameters is None or parameters.layers is None:
        return found
    wanted = choose(run, parameters.layers, lambda m: True, "module")
    return {name: m for name, m in found.items() if name in wanted}


def _make_leaky(module: Any, slope: float) -> Undo:
    """Change the class: the module stays the same object, with its hooks."""
    import torch

    own = type(module)
    module.__class__ = torch.nn.LeakyReLU
    module.negative_slope = slope

    def undo() -> None:
        module.__class__ = own
        del module.negative_slope

    return undo
