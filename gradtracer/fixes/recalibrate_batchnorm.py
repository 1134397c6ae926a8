"""Take the running statistics of batch normalisation anew."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._modules import all_of, choose, keep
from gradtracer.fixes._ranks import over_ranks
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety

_NUM_BATCHES = 16


class RecalibrateBatchnormParameters(FixParameters):
    """Parameters of `recalibrate_batchnorm`."""

    layers: str | None = Field(
        default=None, max_length=2000, description="Normalisations, or modules that contain them; all by default."
    )
    momentum: float | None = Field(
        default=None, gt=0, le=0.5, description="Share of a new batch in the running statistics from now on."
    )


@FIXES.register
class RecalibrateBatchnorm(Fix[RecalibrateBatchnormParameters]):
    """Compute running means and variances from captured batches, and set the momentum with which they go on.

    What:
        Each batch is normalised by itself while statistics are read, as in training; nothing that training uses
        changes but the momentum.

    Why:
        Evaluation normalises by the running statistics: where they are not those of the batches, it sees another model
        than the one that was trained.

    Definition:
        ``running_mean = mean_b(mean of batch b)``, ``running_var = mean_b(unbiased variance of batch b)`` over up to 16
        batches, each over all axes but that of channels; then ``running <- (1 - momentum) running + momentum batch`` as
        training goes on.

    Safety:
        Guarded: statistics of a few batches are noisier than good running ones.

    Undo:
        Statistics and momentum are put back.

    References:
        Ioffe & Szegedy 2015, arXiv:1502.03167, algorithm 2. Wu & Johnson 2021, arXiv:2105.07576, section 3 (PreciseBN).
    """

    code = "recalibrate_batchnorm"
    title = "Recalibrate batch normalisation"
    safety = Safety.GUARDED
    shows_in_loss = False
    num_batches = _NUM_BATCHES
    mends = ("batchnorm_train_eval_gap",)
    Parameters = RecalibrateBatchnormParameters

    def preview(self, run: LiveRun, parameters: RecalibrateBatchnormParameters) -> list[Change]:
        """The normalisations, and old and new momentum."""
        changes: list[Change] = []
        for name, module in _chosen(run, parameters).items():
            changes.append(Change(target=f"{name}.running_mean", old="as it is", new="of captured batches"))
            if parameters.momentum is not None:
                changes.append(Change(target=f"{name}.momentum", old=module.momentum, new=parameters.momentum))
        return changes

    def apply(self, run: LiveRun, parameters: RecalibrateBatchnormParameters) -> Undo:
        """Read, and set."""
        import torch

        chosen = _chosen(run, parameters)
        seen: dict[Any, list[tuple[Any, Any]]] = {m: [] for m in chosen.values()}

        def note(module: Any, inputs: Any) -> None:
            values = inputs[0].detach().float().movedim(1, 0).flatten(1)
            if values.shape[1] > 1:
                seen[module].append((values.mean(dim=1), values.var(dim=1)))

        handles = [m.register_forward_pre_hook(note) for m in seen]
        modes = [(m, m.training) for m in seen]
        try:
            for module in seen:
                module.training = True
            run.rehearse(_NUM_BATCHES)
        finally:
            for handle in handles:
                handle.remove()
            for module, training in modes:
                module.training = training
        read = {m: found for m, found in seen.items() if found}
        if not read:
            raise BadParameter(f"none of {', '.join(chosen)[:200]} ran in a captured batch of more than one value")
        undos = [keep(run, (b for m in read for b in m.buffers(recurse=False)))]
        undos.extend(_restore_momentum(m) for m in read)
        with torch.no_grad():
            for module, found in read.items():
                module.running_mean.copy_(over_ranks(torch.stack([mean for mean, _ in found]).mean(dim=0), "mean"))
                module.running_var.copy_(over_ranks(torch.stack([var for _, var in found]).mean(dim=0), "mean"))
                if parameters.momentum is not None:
                    module.momentum = parameters.momentum
        return all_of(undos)


def _restore_momentum(module: Any) -> Undo:
    momentum = module.momentum

    def undo() -> None:
        module.momentum = momentum

    return undo


def _chosen(run: LiveRun, parameters: RecalibrateBatchnormParameters) -> dict[str, Any]:
    import torch

    kind = torch.nn.modules.batchnorm._BatchNorm
    return choose(
        run,
        parameters.layers,
        lambda m: isinstance(m, kind) and m.running_mean is not None,
        "batch normalisation with running statistics",
    )
