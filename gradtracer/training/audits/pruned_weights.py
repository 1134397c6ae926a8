"""Weights that were set to zero and come back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, Measure
from gradtracer.training.audits._sampling import THIN, Later, spread, thin
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding

_NUM_WEIGHTS = 32


@dataclass
class _Watched:
    usual: float | None = None
    """Share of zeros before anything was pruned."""
    pruned_at: int = -1
    share: float = 0.0
    num_dense_since: int = 0


@AUDITS.register
class PrunedWeights(Audit):
    """Whether weights that were pruned stay pruned.

    What:
        Layers of which a large part was set to exactly zero in the middle of training and is filled in again by the
        updates that follow, because no mask holds it.

    Why:
        The sparsity is gone after one step, and with it what the pruning was for; only its damage stays.

    Definition:
        z, the share of exact zeros in 256 evenly spaced elements of each weight of two or more axes, before every
        update. Pruned: z has risen by at least 0.2, to less than 1, after at least one update without. Lost: in the 20
        updates after that z is below half of it. No unit. The step is that of the pruning.

    Thresholds:
        0.2: below a fifth nothing is gained by sparsity; weights that train are exactly 0 by chance in no layer. A
        whole tensor of zeros is a layer that begins anew. A mask that is applied again within 20 updates is a scheme
        that lets weights grow back on purpose.

    Fixes:
        None that is live: apply the mask after every update, or use torch.nn.utils.prune.

    References:
        Zhu & Gupta 2017, arXiv:1710.01878. PyTorch documentation, "Pruning tutorial".
    """

    code = "pruned_weights"
    every_step = True

    RISE = 0.2
    PATIENCE = 20

    def __init__(self) -> None:
        self._weights: list[tuple[str, nn.Parameter]] | None = None
        self._watched: dict[str, _Watched] = {}
        self._shares: Later[tuple[int, tuple[str, ...]]] = Later()
        self._last_step = -1
        self.places: dict[str, Tensor] = {}
        """By layer, which weights were zero when it was pruned, boolean; on a device, where the zeros are counted only
        after the update, there are none."""

    def on_gradients(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Count zeros before the update."""
        if context.step == self._last_step:
            return
        self._last_step = context.step
        if self._weights is None:
            self._weights = spread(
                [
                    (layer.name, p)
                    for layer in context.layers
                    for _, p in layer.parameters
                    if p.dim() > 1 and p.numel() >= THIN and p.requires_grad
                ],
                _NUM_WEIGHTS,
            )
        if not self._weights:
            return
        # Every weight has at least THIN elements, so all samples are of one length.
        samples = [thin(p) for _, p in self._weights]
        device = samples[0].device
        zeros = (torch.stack([s.to(device) for s in samples]) == 0).float().mean(dim=1)
        self._shares.put((context.step, tuple(name for name, _ in self._weights)), zeros)
        for (step, names), shares in self._shares.take():
            yield from self._judge(context, step, names, shares)
            if step == context.step:
                self._remember(step)

    def _remember(self, step: int) -> None:
        """Keep where the zeros are of what has just been pruned."""
        for name, parameter in self._weights or ():
            pruned_at = self._watched[name].pruned_at
            if pruned_at == step:
                self.places[name] = parameter.detach() == 0
            elif pruned_at < 0:
                self.places.pop(name, None)

    def _judge(
        self, context: AuditContext, step: int, names: tuple[str, ...], shares: Tensor
    ) -> Iterable[AuditFinding]:
        for name, share in zip(names, shares.tolist(), strict=True):
            watched = self._watched.setdefault(name, _Watched())
            if watched.pruned_at >= 0:
                if share >= watched.share / 2:
                    watched.num_dense_since = 0
                    if step - watched.pruned_at > 1:
                        watched.pruned_at = -1  # the mask holds
                        watched.usual = None
                    continue
                watched.num_dense_since += 1
                if watched.num_dense_since == self.PATIENCE:
                    yield self._lost(context, name, watched, share)
                continue
            if watched.usual is not None and share - watched.usual >= self.RISE and share < 1.0:
                watched.pruned_at, watched.share, watched.num_dense_since = step, share, 0
            watched.usual = share

    def _lost(self, context: AuditContext, name: str, watched: _Watched, share: float) -> AuditFinding:
        return finding(
            context,
            "pruned_weights_returned",
            f"At step {watched.pruned_at} {watched.share:.0%} of the weights of {name} were zero; "
            f"{share:.0%} are {self.PATIENCE} updates later.",
            layer=name,
            measures=[Measure(name="zero_share", value=share, baseline=watched.share)],
        ).model_copy(update={"step": watched.pruned_at})
