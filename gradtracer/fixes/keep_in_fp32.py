"""Run a module in full precision."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._modules import choose_one
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class KeepInFp32Parameters(FixParameters):
    """Parameters of `keep_in_fp32`."""

    layer: str = Field(min_length=1, max_length=500, description="The module to run in float32.")


class EnterFp32:
    """Forward pre-hook: inputs become float32 and autocast ends until the module is done."""

    def __init__(self) -> None:
        self.open: list[Any] = []

    def __call__(self, module: Any, inputs: Any, keywords: Any) -> Any:
        """Cast, and leave autocast."""
        import torch

        tensors = [t for t in (*inputs, *keywords.values(), *module.parameters()) if isinstance(t, torch.Tensor)]
        kind = tensors[0].device.type if tensors else "cpu"
        outside = torch.autocast(kind, enabled=False)
        outside.__enter__()
        self.open.append(outside)
        return tuple(_full(x) for x in inputs), {name: _full(x) for name, x in keywords.items()}


class LeaveFp32:
    """Forward hook: what was before holds again, also where the module raised an error."""

    def __init__(self, entered: EnterFp32) -> None:
        self.entered = entered

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        """Go back."""
        if self.entered.open:
            self.entered.open.pop().__exit__(None, None, None)


@FIXES.register
class KeepInFp32(Fix[KeepInFp32Parameters]):
    """Run one module outside of autocast, with its inputs cast to float32.

    What:
        Half-precision inputs of the module, in lists and dictionaries too, are cast; its output is float32, and what
        comes after casts it again by autocast's own rules.

    Why:
        Values above 65,504 are infinite in float16: attention logits, squares and sums that float32 holds easily.

    Definition:
        ``y = module(float32(x))`` with autocast off. Its parameters must be float32, as they are under autocast.

    Safety:
        Guarded: the model computes the function in another precision, slower and with more memory, and the saved model
        needs the same at inference in half precision. The state dict stays as it is.

    Undo:
        The module runs under autocast again.

    References:
        Micikevicius et al. 2018, arXiv:1710.03740, section 3.3. PyTorch documentation, "Automatic Mixed Precision".
    """

    code = "keep_in_fp32"
    title = "Keep a module in full precision"
    safety = Safety.GUARDED
    standing = True
    changes_function = True
    mends = ("fp16_overflow",)
    Parameters = KeepInFp32Parameters

    def preview(self, run: LiveRun, parameters: KeepInFp32Parameters) -> list[Change]:
        """The module."""
        module = choose_one(run, parameters.layer)
        if any(isinstance(hook, EnterFp32) for hook in module._forward_pre_hooks.values()):
            raise BadParameter(f"{parameters.layer} is kept in float32 already")
        half = [name for name, p in module.named_parameters() if p.is_floating_point() and p.element_size() < 4]
        if half:
            raise BadParameter(
                f"{parameters.layer}.{half[0]} is in half precision itself, so float32 inputs do not fit it; "
                "train float32 weights under torch.autocast"
            )
        return [Change(target=parameters.layer, old="autocast", new="float32")]

    def apply(self, run: LiveRun, parameters: KeepInFp32Parameters) -> Undo:
        """Place the hooks."""
        self.preview(run, parameters)
        module = choose_one(run, parameters.layer)
        enter = EnterFp32()
        first = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        second = module.register_forward_hook(LeaveFp32(enter), always_call=True)

        def undo() -> None:
            first.remove()
            second.remove()

        return undo


def _full(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _full(x) for name, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_full(x) for x in value)
    if hasattr(value, "is_floating_point") and value.is_floating_point() and value.element_size() < 4:
        return value.float()
    return value
