"""How far the running statistics of batch normalisation are from those of the batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradtracer.records import AuditFinding
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext

_NORM = nn.modules.batchnorm._BatchNorm
_NUM_BATCHES = 4
_MIN_VALUES = 8
_CLIP = 3.0
_MAX_VALUES = 131_072


@AUDITS.register
class RunningStatistics(Audit):
    """The gap between what a batch normalisation uses in training and what it will use in evaluation.

    What:
        Mean and variance of the batches that a normalisation gets, against its running mean and variance.

    Why:
        Running statistics that lag behind (a momentum in another framework's convention) or follow the last batch make
        a model that trains well and answers at random.

    Definition:
        Over the last 4 batches read, per channel c with batch mean ``m_k`` and variance ``v_k``:
        ``shift_c = min_k |running_mean - m_k| / sqrt(mean v + eps)`` where all differences have one sign, else 0;
        ``scale_c`` likewise with ``log(running_var / v_k) / 2``. ``running_mean_gap`` and ``running_var_gap`` are the
        root mean squares over channels, each clipped at 3. ``running_mean_noise`` is the standard deviation of ``m_k``
        over ``sqrt(mean v)``, root mean square. Batches with fewer than 8 values a channel are left out; of large
        ones every n-th place is read.

    Thresholds:
        None here. One sign in all batches tells a lag from batches that differ (two domains in turn); the smallest
        difference tells it from a drift that the running mean follows.

    Fixes:
        None; see the cause.

    References:
        Ioffe, Szegedy 2015, arXiv:1502.03167, section 3.1. Torch documentation of BatchNorm (its momentum is 1 minus
        that of other frameworks).
    """

    code = "running_statistics"

    def __init__(self) -> None:
        self._batches: dict[str, deque[tuple[Tensor, Tensor]]] = {}

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """Compare a batch normalisation with its batch."""
        if not name or not isinstance(module, _NORM) or not module.training or module.running_mean is None:
            return ()
        x = inputs[0] if inputs else None
        if not isinstance(x, Tensor) or x.dim() < 2 or x.numel() < _MIN_VALUES * x.shape[1]:
            return ()
        assert module.running_var is not None
        values = x.detach().reshape(x.shape[0], x.shape[1], -1)
        values = values[:, :, :: max(1, values.numel() // _MAX_VALUES)]
        variance, mean = torch.var_mean(values.double(), dim=(0, 2), correction=0)
        batches = self._batches.setdefault(name, deque(maxlen=_NUM_BATCHES))
        batches.append((mean, variance))
        if module.num_batches_tracked is not None:
            context.record(name, "num_batches_tracked", module.num_batches_tracked.double())
        context.record(name, "norm_momentum", -1.0 if module.momentum is None else float(module.momentum))
        if len(batches) < _NUM_BATCHES:
            return ()
        means, variances = torch.stack([m for m, _ in batches]), torch.stack([v for _, v in batches])
        scale = (variances.mean(0) + module.eps).sqrt()
        shift = _one_sided((module.running_mean.double() - means) / scale)
        width = _one_sided(0.5 * ((module.running_var.double() + module.eps) / (variances + module.eps)).log())
        context.record(name, "running_mean_gap", _rms(shift))
        context.record(name, "running_var_gap", _rms(width))
        context.record(name, "running_mean_noise", _rms(means.std(0) / scale))
        return ()


def _one_sided(differences: Tensor) -> Tensor:
    """Per channel the smallest of the differences `[batches, channels]` if all have one sign, else 0."""
    same = (differences > 0).all(0) | (differences < 0).all(0)
    return torch.where(same, differences.abs().amin(0), 0.0)


def _rms(values: Tensor) -> Tensor:
    return values.clamp(max=_CLIP).square().mean().sqrt()
