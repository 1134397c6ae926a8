"""Parameters that the loss depends on and the model does not know."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from gradtracer.records import AuditFinding, Measure, Severity, clean_name
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph
from gradtracer.training.layers import ROOT, source_of
from gradtracer.training.strays import Stray, held_by_any_optimizer, strays


@AUDITS.register
class UnregisteredParameters(Audit):
    """Layers that run but are not in `model.modules()`.

    What:
        Modules or parameters kept in a plain list, tuple, dict or object, or tensors with requires_grad that are no
        nn.Parameter: the model does not see them, so neither do its optimizer, `to()` and `state_dict()`.

    Why:
        They keep their initial values and are missing from every checkpoint.

    Definition:
        A leaf of the loss's graph that is no parameter of the model, that hangs on a module of the model outside of
        its registered parameters and modules (found in the attributes, to a depth of 4), that no optimizer of the
        process holds, and whose values have not been written between two sampled steps. Named after the attribute.

    Thresholds:
        None: it is in the graph or not. Leaves that hang on no module of the model (inputs that require a gradient, a
        loss module with parameters of its own) are not reported.

    Fixes:
        add_missing_parameters. In the source: nn.ModuleList, nn.ModuleDict, nn.ParameterList or nn.Parameter.

    References:
        PyTorch documentation, torch.nn.ModuleList and torch.nn.Parameter. pytorch/pytorch issue 715.
    """

    code = "unregistered_parameters"

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._leaves: dict[int, Tensor] = {}
        self._first_step = 0
        self._done = False

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Look for leaves that are none of the model's."""
        if self._done:
            return
        known = {id(p) for p in context.model.parameters()}
        held = {id(p) for o in context.optimizers for g in o.param_groups for p in g["params"]}
        foreign = {id(p): p for p in graph.parameters() if id(p) not in known and id(p) not in held and p.requires_grad}
        if not foreign:
            return
        still = {key: p for key, p in foreign.items() if self._versions.get(key) == p._version}
        if not self._versions:
            self._first_step = context.step
        self._versions = {key: p._version for key, p in foreign.items()}
        self._leaves = foreign  # keeps ids unique until the next look
        if not still:
            return
        self._done = True
        places: dict[str, list[Stray]] = {}
        for stray in strays(context.model):
            if id(stray.tensor) in still:
                places.setdefault(stray.place, []).append(stray)
        if not places or not held_by_any_optimizer().isdisjoint(still):
            return
        modules = dict(context.model.named_modules())
        for place, found in places.items():
            owner, types = found[0].owner, sorted({stray.holder for stray in found})
            yield finding(
                context, "unregistered_parameters",
                f"{len(found)} parameters in {place} ({', '.join(types[:3])}) are in the loss's graph and "
                f"not in {owner or ROOT}'s parameters, and no optimizer holds them.",
                layer=clean_name(place), severity=Severity.WARNING,
                measures=(Measure(name="num_parameters", value=float(len(found)), unit="tensors"),),
                source=source_of(modules[owner]),
            )  # fmt: skip
