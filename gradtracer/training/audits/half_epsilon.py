"""An epsilon that is zero in the precision of the parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, Measure, Severity
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding


@AUDITS.register
class HalfEpsilon(Audit):
    """Whether the epsilon of an adaptive optimizer survives in the precision in which it divides.

    What:
        Optimizers such as Adam over float16 parameters, whose epsilon rounds to 0 there.

    Why:
        The second moment of a small gradient rounds to 0 in float16 as well, and the update is then 0/0 or x/0: NaN or
        infinity, while the gradient is finite.

    Definition:
        epsilon_underflows: ``eps > 0`` and ``float16(eps) = 0`` for parameters of that type. `warning`; `info` where a
        fused kernel computes in float32.

    Thresholds:
        float16 rounds everything below 2^-25 = 3e-8 to 0; Adam's default epsilon is 1e-8. bfloat16 and float32 hold it.

    Fixes:
        None that is live: keep float32 parameters and use autocast, or set eps to 1e-4 or more.

    References:
        IEEE 754-2019, binary16. Kingma & Ba 2015, arXiv:1412.6980, algorithm 1.
    """

    code = "half_epsilon"

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def on_gradients(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Compare epsilon with what the parameters can hold."""
        if id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        for group in optimizer.param_groups:
            eps = group.get("eps")
            half = [p for p in group["params"] if p.dtype is torch.float16 and p.requires_grad]
            if not half or not isinstance(eps, float) or eps <= 0 or float(torch.tensor(eps).half()) > 0:
                continue
            fused = bool(group.get("fused"))
            yield finding(
                context,
                "epsilon_underflows",
                f"{type(optimizer).__name__} divides by sqrt(v) + {eps:g} in float16, where {eps:g} is 0: for "
                f"{len(half)} float16 parameter tensors a small gradient gives 0/0.",
                severity=Severity.INFO if fused else Severity.WARNING,
                measures=[Measure(name="eps", value=eps, threshold=2.0**-25)],
            )
