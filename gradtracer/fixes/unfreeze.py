"""Let frozen layers train."""

from __future__ import annotations

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._joining import group_to_join, join, refuse_if_replicated
from gradtracer.fixes._updates import named_parameters, parameters_of
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class UnfreezeParameters(FixParameters):
    """Parameters of `unfreeze`."""

    layers: str = Field(
        min_length=1,
        max_length=2000,
        description="Module paths, separated by commas; each with everything below it.",
    )


@FIXES.register
class Unfreeze(Fix[UnfreezeParameters]):
    """Let layers that were frozen train from the next step on.

    What:
        Sets `requires_grad` of their parameters, and lets those that no optimizer holds join the largest group of the
        first one, at that group's rate.

    Why:
        Layers frozen at random values by mistake leave the others a projection of the input that nobody chose.

    Definition:
        ``requires_grad <- True``; ``group.params <- group.params + [p]`` where no optimizer holds p.

    Safety:
        Guarded: layers that were frozen on purpose (pretrained, a teacher) are lost as they train. Refused where
        training runs on several ranks, since DDP does not reduce gradients of what was frozen when it was built.

    Undo:
        The parameters are frozen again at the values they have by then, and leave the optimizer if they had joined.

    References:
        Hoffer, Hubara, Soudry 2018, arXiv:1801.04540 (what a frozen layer costs).
    """

    code = "unfreeze"
    title = "Unfreeze layers"
    safety = Safety.GUARDED
    shows_in_loss = False
    standing = True
    mends = ("frozen_layers",)
    Parameters = UnfreezeParameters

    def preview(self, run: LiveRun, parameters: UnfreezeParameters) -> list[Change]:
        """Which parameters would train."""
        group_to_join(run, 0, None)
        refuse_if_replicated(
            "DDP does not reduce gradients of parameters that were frozen when it was built: unfreeze them in the "
            "source, before the model is wrapped"
        )
        frozen = [
            (name, p)
            for name, p in named_parameters(run, parameters.layers)
            if not p.requires_grad and (p.is_floating_point() or p.is_complex())
        ]
        if not frozen:
            raise BadParameter(f"all parameters of {parameters.layers[:80]!r} train already")
        return [Change(target=f"{name}.requires_grad", old=False, new=True) for name, _ in frozen]

    def apply(self, run: LiveRun, parameters: UnfreezeParameters) -> Undo:
        """Set the flags, and join the optimizer."""
        names = {c.target.removesuffix(".requires_grad") for c in self.preview(run, parameters)}
        frozen = [p for name, p in named_parameters(run, parameters.layers) if name in names]
        held = {id(p) for optimizer in run.optimizers for p in parameters_of(optimizer)}
        leave = join(run, 0, None, [p for p in frozen if id(p) not in held])
        for parameter in frozen:
            parameter.requires_grad_(True)

        def undo() -> None:
            leave()
            for parameter in frozen:
                parameter.requires_grad_(False)
                parameter.grad = None

        return undo
