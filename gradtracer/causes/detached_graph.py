"""The graph is cut."""

from __future__ import annotations

from gradtracer.causes._reading import evidence, in_forward_order
from gradtracer.causes._wiring import SEEN, audit_case
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence
from gradtracer.series import Series


@CAUSES.register
class DetachedGraph(Cause):
    """A part of the network gets no gradient, because the graph is cut between it and the loss.

    What:
        detach(), .data, no_grad, .item(), numpy or an argmax between a part that is to train and the loss.

    Why:
        The part keeps its initial values while the rest learns around it, so the loss falls a little.

    Definition:
        Evidence, with its log-likelihood ratio in nats: a part runs at every step, an optimizer holds it, and no loss
        depends on its output, while it is fed by the data or its values go on without their history: +6.5; the same
        of a part whose output nobody is seen to use, or that looks pretrained: 0; its gradient is missing or 0 at all
        sampled steps: +0.5. Root: the part. Onset: step 0.

    Thresholds:
        Who keeps a part fixed on purpose gives it to no optimizer; a graph that is cut above parameters that an
        optimizer holds is on purpose in one healthy run of some six hundred: ln 650 = 6.5.

    Fixes:
        None that is live: the cut must go from the source.

    References:
        PyTorch documentation, Autograd mechanics. speechbrain issue 1396.
    """

    code = "detached_graph"
    title = "The graph is cut before a part that should train"
    prior = 0.04

    def consider(self, series: Series) -> Case | None:
        """Weigh parts that no loss depends on."""
        found = series.audit("unreached_layers")
        if not found:
            return None
        names = in_forward_order(series, (f.layer for f in found if f.layer))
        found = sorted(found, key=lambda f: (-f.severity.rank, names.index(f.layer) if f.layer in names else 0))
        is_cut = found[0].severity.rank > 0
        root = found[0].layer or ""
        more: list[Evidence] = []
        norms = [
            value
            for _, table in series.tables
            for layer, value in table.signal("grad_norm").items()
            if layer == root or layer.startswith(f"{root}.")
        ]
        if all(value == 0.0 for value in norms):
            more.append(evidence(f"{root} has had no gradient other than 0 at any sampled step.", 0.5))
        return audit_case(
            series,
            found,
            "It keeps what it was initialised with, and the layers behind it learn around that.",
            f"Look between {root} and the loss for detach(), .data, torch.no_grad(), .item(), .numpy(), argmax or a "
            "tensor built anew from values, and pass on the output itself; if it is meant to stay as it is, do not "
            "give it to the optimizer.",
            ratio=SEEN if is_cut else 0.0,
            more=more,
        )
