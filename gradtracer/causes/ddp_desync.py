"""Replicas drift apart."""

from __future__ import annotations

from gradtracer.causes._audited import SeenAsFact
from gradtracer.causes._reading import fix
from gradtracer.causes.base import CAUSES
from gradtracer.records import AuditFinding, FixSuggestion
from gradtracer.series import Series


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
        broadcast_parameters: the weights of one replica for all, and gradients averaged from then on.

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

    def fixes(self, series: Series, root: AuditFinding) -> tuple[FixSuggestion, ...]:
        """Make them equal, and keep them so."""
        effect = "The replicas have the weights of one, and follow the data of all."
        return (fix("broadcast_parameters", effect, layer=root.layer),) if root.layer else ()
