"""Make replicas equal again."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._modules import ROOT, all_modules, keep
from gradtracer.fixes._ranks import num_ranks
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety

_REPLICA_NAME = re.compile(r"^(.*?)s?[_.]?\d+$")


class BroadcastParametersParameters(FixParameters):
    """Parameters of `broadcast_parameters`."""

    layer: str | None = Field(
        default=None,
        max_length=500,
        description="Replicas within one process: the one that drifted. By default the model over all ranks.",
    )


@FIXES.register
class BroadcastParameters(Fix[BroadcastParametersParameters]):
    """Copy one replica's parameters, buffers and moments to the others, and average gradients before every update.

    What:
        Over torch.distributed rank 0 is the source and all ranks take part. Within one process it is the first sibling
        module of the same structure; siblings that are numbered alike are replicas too.

    Why:
        Replicas drift apart because their gradients are not averaged, so equal weights alone would drift again. To
        average gradients that are averaged already changes nothing.

    Definition:
        Once: ``w_r <- w_0`` for every replica r, with buffers and moments. Before every update: ``g_r <- sum_s g_s /
        R``.

    Safety:
        Guarded: what the other replicas had learned by themselves is lost, and the loss may rise, since each had come
        to fit its own part of the data; the watch asks only that it stays finite.

    Undo:
        The replicas have their own weights and moments again, and gradients are used as they are.

    References:
        Li et al. 2020, arXiv:2006.15704, section 3. PyTorch documentation, "Distributed Data Parallel".
    """

    code = "broadcast_parameters"
    title = "Make replicas equal again"
    safety = Safety.GUARDED
    standing = True
    shows_in_loss = False
    loss_may_rise = True
    mends = ("ddp_desync",)
    Parameters = BroadcastParametersParameters

    def preview(self, run: LiveRun, parameters: BroadcastParametersParameters) -> list[Change]:
        """Source and replicas."""
        if parameters.layer is None:
            return [Change(target=ROOT, old="as on each rank", new=f"as on rank 0 of {_several_ranks()}")]
        source, *others = _replicas(run, parameters.layer)
        return [Change(target=name, old="its own weights", new=f"those of {source[0]}") for name, _ in others]

    def apply(self, run: LiveRun, parameters: BroadcastParametersParameters) -> Undo:
        """Copy, and average from now on."""
        if parameters.layer is None:
            return _over_ranks(run)
        return _within_process(run, [m for _, m in _replicas(run, parameters.layer)])


def _within_process(run: LiveRun, replicas: list[Any]) -> Undo:
    import torch

    source, *others = replicas
    put_back = keep(run, (t for m in others for t in (*m.parameters(), *m.buffers())))
    together = list(zip(*(list(m.parameters()) for m in replicas), strict=True))
    with torch.no_grad():
        for other in others:
            for mine, theirs in zip(
                (*source.parameters(), *source.buffers()), (*other.parameters(), *other.buffers()), strict=True
            ):
                theirs.copy_(mine)
        for optimizer in run.optimizers:
            for first, *rest in together:
                for parameter in rest:
                    if first in optimizer.state and parameter in optimizer.state:
                        for name, value in optimizer.state[first].items():
                            copied = value.detach().clone() if isinstance(value, torch.Tensor) else value
                            optimizer.state[parameter][name] = copied

    def average(optimizer: Any) -> None:
        for copies in together:
            gradients = [p.grad for p in copies if p.grad is not None]
            if len(gradients) == len(copies):
                mean = torch.stack(gradients).mean(dim=0)
                for gradient in gradients:
                    gradient.copy_(mean)

    end = run.around_update(average)

    def undo() -> None:
        end()
        put_back()

    return undo


def _over_ranks(run: LiveRun) -> Undo:
    import torch
    from torch import distributed

    size = _several_ranks()
    tensors = [*run.model.parameters(), *run.model.buffers()]
    put_back = keep(run, tensors)
    held = [p for o in run.optimizers for group in o.param_groups for p in group["params"]]
    moments = [
        value
        for o in run.optimizers
        for p in held
        if p in o.state
        for value in o.state[p].values()
        if isinstance(value, torch.Tensor) and value.shape == p.shape
    ]
    with torch.no_grad():
        for tensor in (*tensors, *moments):
            distributed.broadcast(tensor.detach(), src=0)

    def average(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    distributed.all_reduce(parameter.grad)
                    parameter.grad.div_(size)

    end = run.around_update(average)

    def undo() -> None:
        end()
        put_back()

    return undo


def _several_ranks() -> int:
    if num_ranks() < 2:
        raise BadParameter("this training has one rank; for replicas within one process name the one that drifted")
    return num_ranks()


def _replicas(run: LiveRun, name: str) -> list[tuple[str, Any]]:
    """The source and its copies, in order of registration."""
    known = all_modules(run)
    if name not in known:
        raise BadParameter(f"no layer {name[:80]!r}; there are: {', '.join(list(known)[:12])}")
    parent, _, own = name.rpartition(".")
    siblings = {n: m for n, m in known.items() if n != ROOT and n.rpartition(".")[0] == parent}
    structure = [(n, p.shape) for n, p in known[name].named_parameters()]
    alike = [(n, m) for n, m in siblings.items() if [(k, p.shape) for k, p in m.named_parameters()] == structure]
    if not structure or alike[0][0] == name:
        raise BadParameter(f"{name} has no sibling before it with the same parameters, of which it could be a copy")
    stem = _REPLICA_NAME.match(own)
    numbered = [
        (n, m) for n, m in alike[1:]
        if stem and (other := _REPLICA_NAME.match(n.rpartition(".")[2])) and other[1] and other[1] == stem[1]
    ]  # fmt: skip
    return [alike[0], *(numbered or [(name, known[name])])]
