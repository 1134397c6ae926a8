"""Which experts of a mixture are trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.records import AuditFinding
from gradtracer.training import statistics
from gradtracer.training.audits._reading import first_tensor
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext
from gradtracer.training.graph import LossGraph
from gradtracer.training.layers import ROOT

_SAMPLES = 8
_LOOK_FOR_STEPS = 10


@dataclass
class _Mixture:
    """Experts of one structure, and what may route between them."""

    owner: str
    experts: list[list[nn.Parameter]]
    gates: tuple[str, ...]
    """Names of modules with one output an expert; empty where a bare parameter routes."""
    firsts: dict[str, int]
    """Modules inside experts, with the expert's number."""
    confirmed: bool = False
    gate: str = ""
    received: dict[int, Tensor] = field(default_factory=dict)
    routed: dict[str, Tensor] = field(default_factory=dict)
    trained: deque[Tensor] = field(default_factory=lambda: deque(maxlen=_SAMPLES))


@AUDITS.register
class RouterAudit(Audit):
    """Which experts of a mixture of experts receive gradients.

    What:
        Finds lists of modules of one structure that receive rows of one input, with a module or parameter beside them
        that has one output for each (a router), and notes which of them train.

    Why:
        An expert that is chosen a little more often learns a little faster and is chosen more often still; without a
        balance one expert ends up with everything.

    Definition:
        Experts are the E >= 2 children of an `nn.ModuleList` or `nn.ModuleDict`, of equal parameter shapes. They form a
        mixture if the owner of the list also holds, outside of it, a module whose weight has E rows or a bare matrix
        with E columns,
        and the rows that experts receive are rows of what the router or the owner receives. Of the gradient norms g_e
        of experts: starved_expert_fraction is the share of experts with ``g_e <= 0.01 max g`` in each of the last 8
        samples (no unit); routing_top_share the largest share of rows whose largest router output is one expert's.

    Thresholds:
        1 %: an expert that gets next to no rows, or a weight of next to nothing. 8 samples, as experts of small batches
        go without rows by chance.

    Fixes:
        See the detector `router_collapse`.

    References:
        Shazeer et al. 2017, arXiv:1701.06538, section 4. Fedus, Zoph, Shazeer 2022, arXiv:2101.03961, section 2.2.
    """

    code = "router"

    NEGLIGIBLE = 0.01

    def __init__(self) -> None:
        self._mixtures: list[_Mixture] | None = None
        self._looks = 0

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """Note what experts and routers receive."""
        if self._mixtures is None:
            self._mixtures = _mixtures(context.model)
        for mixture in self._mixtures:
            if not mixture.confirmed and self._looks < _LOOK_FOR_STEPS:
                received = first_tensor(inputs)
                if received is not None and received.is_floating_point() and received.dim() > 1:
                    expert = mixture.firsts.get(name)
                    if expert is not None:
                        mixture.received.setdefault(expert, received.detach())
                    elif name in mixture.gates or (name or ROOT) == mixture.owner:
                        mixture.routed[name] = received.detach()
            if name and name == mixture.gate:
                logits = first_tensor(output)
                if logits is not None and logits.dim() > 1:
                    chosen = logits.detach().flatten(0, -2).argmax(dim=1)
                    counts = torch.zeros(logits.shape[-1], device=chosen.device)
                    counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=counts.dtype))
                    context.record(mixture.gate, "routing_top_share", counts.max() / len(chosen))
        return ()

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Settle which lists of modules are mixtures."""
        if self._looks < _LOOK_FOR_STEPS:
            self._looks += 1
            for mixture in self._mixtures or ():
                if not mixture.confirmed:
                    _confirm(mixture)
                mixture.received.clear()
                mixture.routed.clear()
        return ()

    def on_gradients(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Record which experts go without a gradient."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for mixture in self._mixtures or ():
            if not mixture.confirmed or id(mixture.experts[0][0]) not in held:
                continue
            norms = torch.stack([_norm(expert) for expert in mixture.experts])
            mixture.trained.append(norms > self.NEGLIGIBLE * norms.max())
            if len(mixture.trained) == _SAMPLES:
                starved = ~torch.stack(list(mixture.trained)).any(dim=0)
                context.record(mixture.gate, "starved_expert_fraction", starved.float().mean())
        return ()


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    gradients = [statistics.gradient_values(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device)
    return statistics.norms(gradients).norm().float().to(parameters[0].device)


def _mixtures(model: nn.Module) -> list[_Mixture]:
    found: list[_Mixture] = []
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or len(module) < 2:
            continue
        experts = [[p for p in child.parameters() if p.requires_grad] for child in module.children()]
        shapes = [[tuple(p.shape) for p in expert] for expert in experts]
        if not shapes[0] or any(s != shapes[0] for s in shapes):
            continue
        owner = path.rpartition(".")[0]
        prefix = f"{owner}." if owner else ""
        gates: list[str] = []
        bare = False
        for name, other in modules.items():
            inside = name == path or name.startswith(f"{path}.")
            if inside or not (name == owner or name.startswith(prefix)):
                continue
            own = dict(other.named_parameters(recurse=False))
            weight = own.get("weight")
            if weight is not None and weight.dim() == 2 and weight.shape[0] == len(module):
                gates.append(name)
            elif not type(other).__module__.startswith("torch.nn"):
                bare |= any(p.dim() == 2 and p.shape[1] == len(module) for p in own.values())
        if gates or bare:
            firsts = {
                f"{path}.{key}{'.' if name else ''}{name}": i
                for i, (key, child) in enumerate(module.named_children())
                for name, inner in child.named_modules()
                if next(inner.children(), None) is None or next(inner.parameters(recurse=False), None) is not None
            }
            found.append(_Mixture(owner or ROOT, experts, tuple(gates), firsts))
    return found


def _confirm(mixture: _Mixture) -> None:
    """Whether experts receive rows of what a router, or the owner, receives."""
    received = [x for x in mixture.received.values() if x.shape[0] > 0]
    if not received:
        return
    for name, whole in mixture.routed.items():
        rows = whole.reshape(-1, whole.shape[-1])
        parts = [x.reshape(-1, x.shape[-1])[:4] for x in received]
        if all(
            part.shape[-1] == rows.shape[-1]
            and bool((part[:, None].to(rows.dtype) == rows[None]).all(dim=-1).any(dim=1).all())
            for part in parts
        ):
            mixture.confirmed = True
            mixture.gate = name if name in mixture.gates else mixture.owner
            return
