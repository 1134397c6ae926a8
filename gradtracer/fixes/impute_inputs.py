"""Fill gaps in what a layer receives."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety, clean_name

_NUM_BATCHES = 8


class ImputeInputsParameters(FixParameters):
    """Parameters of `impute_inputs`."""

    layer: str | None = Field(
        default=None, max_length=500, description="The module whose input is filled in; by default the model."
    )


class Impute:
    """Forward pre-hook: numbers of the first input that are not finite become the usual one of their column.

    Args:
        values: By column, ``[columns]``; None for 0 everywhere.
        axis: The axis of columns.
    """

    def __init__(self, values: Any, axis: int) -> None:
        self.values, self.axis = values, axis

    def __call__(self, module: Any, inputs: Any) -> Any:
        """The inputs with their gaps filled in; None where there is nothing to fill."""
        import torch

        if not _is_numeric(inputs):
            return None
        given = inputs[0]
        filling = torch.zeros((), dtype=given.dtype, device=given.device)
        if self.values is not None and given.dim() > 1 and given.shape[self.axis] == len(self.values):
            shape = [1] * given.dim()
            shape[self.axis] = -1
            filling = self.values.to(given.device, given.dtype).view(shape)
        return (torch.where(torch.isfinite(given), given, filling), *inputs[1:])


@FIXES.register
class ImputeInputs(Fix[ImputeInputsParameters]):
    """Replace NaN and infinities in a module's first input by the mean of their column, until reverted.

    What:
        Means come from captured batches and stay as they are from then on; where no batch could be captured, or a
        column has no finite number, it is 0. Columns are the last axis, of images the second. Only the first
        positional input is looked at, so that masks of infinities stay.

    Why:
        A table with gaps makes the loss NaN in every batch that has one; skipping those batches throws their other rows
        away, and the model can then not be used on rows with a gap either.

    Definition:
        ``x_ij <- mean of the finite x_.j`` where ``x_ij`` is not finite.

    Safety:
        Guarded: the model computes another function on inputs that are not finite, and a saved model needs the hook for
        them; a model saved whole keeps it, in `_forward_pre_hooks`. The state dict stays as it is. It hides a fault of
        the data: mend that in the source.

    Undo:
        Inputs are used as they are.

    References:
        Little & Rubin 2019, "Statistical analysis with missing data", section 4.2.1 (unconditional mean imputation).
    """

    code = "impute_inputs"
    title = "Fill in inputs that are not finite"
    safety = Safety.GUARDED
    standing = True
    changes_function = True
    num_batches = _NUM_BATCHES
    mends = ("nan_in_data",)
    Parameters = ImputeInputsParameters

    def preview(self, run: LiveRun, parameters: ImputeInputsParameters) -> list[Change]:
        """Where the hook would stand."""
        if any(isinstance(hook, Impute) for hook in _module(run, parameters)._forward_pre_hooks.values()):
            raise BadParameter(f"inputs of {parameters.layer or 'the model'} are filled in already")
        return [Change(target=f"{parameters.layer or '(root)'}.input", old="as it comes", new="filled in by its means")]

    def apply(self, run: LiveRun, parameters: ImputeInputsParameters) -> Undo:
        """Observe, and place the hook."""
        self.preview(run, parameters)
        module = _module(run, parameters)
        # Ahead of hooks that compute with the input.
        return module.register_forward_pre_hook(_observe(run, module), prepend=True).remove


def _module(run: LiveRun, parameters: ImputeInputsParameters) -> Any:
    if parameters.layer in (None, "(root)"):
        return run.model
    known = {clean_name(path): module for path, module in run.model.named_modules() if path}
    if parameters.layer not in known:
        raise BadParameter(f"no layer {parameters.layer!r}; there are: {', '.join(list(known)[:12])}")
    return known[parameters.layer]


def _is_numeric(inputs: Any) -> bool:
    return bool(inputs) and hasattr(inputs[0], "is_floating_point") and inputs[0].is_floating_point()


def _observe(run: LiveRun, module: Any) -> Impute:
    import torch

    totals: list[tuple[torch.Tensor, torch.Tensor]] = []
    axes: list[int] = [-1]

    def note(module: Any, inputs: Any) -> None:
        if not _is_numeric(inputs) or inputs[0].dim() < 2:
            return
        axes.append(1 if inputs[0].dim() == 4 else -1)
        rows = inputs[0].detach().double().movedim(axes[-1], -1).flatten(0, -2)
        finite = torch.isfinite(rows)
        totals.append((torch.where(finite, rows, 0.0).sum(0), finite.sum(0)))

    handle = module.register_forward_pre_hook(note, prepend=True)
    try:
        run.rehearse(_NUM_BATCHES)
    except BadParameter:
        totals.clear()  # no batch could be captured
    finally:
        handle.remove()
    if not totals or len({len(total) for total, _ in totals}) > 1:
        return Impute(None, -1)
    total, count = (torch.stack(parts).sum(0) for parts in zip(*totals, strict=True))
    return Impute((total / count.clamp_min(1)).float(), axes[-1])
