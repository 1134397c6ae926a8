"""Replicas drift apart."""

from __future__ import annotations

from gradtracer.causes._audited import SeenAsFact
from gradtracer.causes.base import CAUSES


@CAUSES.register
class DdpDesync(SeenAsFact):
    """Replicas that had the same weights no longer do, because their gradients are not averaged.

    What:
        Copies of a model that were trained in step and then follow their own data.

    Why:
        What is saved is one replica, trained on its share of the data.

    Definition:
        Evidence, with its log-likelihood ratio in nats: two submodules with the same weights, trained in step, differ:
        +8. Root: the second of them. Onset: the first update after which they differ.

    Thresholds:
        ln 3000 = 8: copies that are meant to differ do so from their first update on.

    Fixes:
        None that is live: average the gradients, broadcast the weights of one replica.

    References:
        Li et al. 2020, arXiv:2006.15704. PyTorch documentation, "Distributed Data Parallel".
    """

    code = "ddp_desync"
    title = "Replicas drift apart"
    prior = 0.01

    findings = ("replicas_diverged",)
    ratio = 8.0
    what_to_do = (
        "Average the gradients over all replicas before every optimizer.step() (DistributedDataParallel does it "
        "in backward: call the wrapped module, not .module, and don't leave no_sync on), and broadcast the "
        "weights of rank 0."
    )
