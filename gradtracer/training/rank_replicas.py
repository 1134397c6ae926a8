"""Replicas of the ranks that drift apart."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, Measure
from gradtracer.training.audits import Audit, AuditContext, finding
from gradtracer.training.audits._sampling import Later, spread, thin
from gradtracer.training.ranks import Ranks
from gradtracer.training.sharding import is_sharded

_TOPIC = "replicas"
_AT_START = -1
_NUM_SAMPLED = 8


class RankReplicas(Audit):
    """Whether the ranks of a data-parallel training still hold the same weights.

    What:
        Replicas in several processes whose gradients are not averaged any more, or never were, or of which one has had
        its weights changed.

    Why:
        There is no longer one model: what is saved is the replica of rank 0, trained on its share of the data.

    Definition:
        Per parameter a checksum ``s = sum w`` and the norm ``||w||``, in float64, at the steps 0, 1, 2, 4, .. 64, at 10
        and 50, and at every multiple of the interval: a pure function of the step, so that all ranks look at the same
        ones. ``d = max over ranks and parameters |s_r - s_0| / ||w_0||``; no unit. replicas_diverged (`warning`):
        d > 1e-6 at one such step under DistributedDataParallel. Without it: the ranks began with equal weights,
        d > 1e-6 at the first such step from 100 on, and ``||w_r - w_0|| / ||w_0||`` over thin samples of 8 parameters
        has never been under half of what it was before. Layer: the one with the largest d. Parameters that are
        sharded, or that DistributedDataParallel is told to ignore, are left out.

    Thresholds:
        Replicas that get equal gradients stay equal to the bit; 1e-6 allows for devices that round differently. A
        difference of n independent elements changes the sum by about its own norm. Without DistributedDataParallel
        ranks may train different things, or average their weights now and then (local SGD), after which the distance is
        under a half of its largest for a quarter of the way to the next average, if it grows as a random walk does: so
        equal starts and no such fall are asked for. Averages more than 100 steps apart look like none.

    Fixes:
        broadcast_parameters; and gradients averaged before every update.

    References:
        Li et al. 2020, arXiv:2006.15704, section 3. PyTorch documentation, "Distributed Data Parallel".
    """

    code = "rank_replicas"
    every_step = True
    reads_parts = True

    TOLERANCE = 1e-6
    EARLY_STEPS = (0, 1, 2, 4, 8, 10, 16, 32, 50, 64)
    JUDGED_FROM = 100

    def __init__(self, ranks: Ranks, interval: int) -> None:
        self._ranks, self._interval = ranks, interval
        self._parameters: list[tuple[str, nn.Parameter]] | None = None
        self._is_wrapped = False
        self._sums: Later[int] = Later()
        self._largest = 0.0
        self._over = False

    def on_gradients(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """What the ranks begin with, ahead of the first update."""
        if self._parameters is None:
            self._is_wrapped, self._parameters = _replicated(context, self._ranks.size)
            self._over = not self._parameters
            self._read(_AT_START)
        return ()

    def on_update(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Read what is looked at after this step, and judge what has come from all ranks."""
        if self._over or self._parameters is None:
            return
        if context.step in self.EARLY_STEPS or context.step % self._interval == 0:
            self._read(context.step)
        for step, sums in self._sums.take():
            self._ranks.mail.post(_TOPIC, step, sums.numpy())
        if not self._ranks.is_main:
            return
        for step, parts in self._ranks.mail.take(_TOPIC):
            if parts is not None and not self._over:
                yield from self._judge(context, step, parts)

    def _read(self, step: int) -> None:
        if self._parameters:
            weights = [p.detach() for _, p in self._parameters]
            sums = torch.stack([w.sum(dtype=torch.float64) for w in weights])
            norms = torch.stack([torch.linalg.vector_norm(w, dtype=torch.float64) for w in weights])
            samples = [] if self._is_wrapped else [thin(w).double() for w in spread(weights, _NUM_SAMPLED)]
            self._sums.put(step, torch.cat([sums, norms, *samples]))

    def _judge(self, context: AuditContext, step: int, parts: Sequence[np.ndarray]) -> Iterable[AuditFinding]:
        assert self._parameters is not None
        num = len(self._parameters)
        if any(len(part) != len(parts[0]) for part in parts):
            self._over = True  # the ranks train different things
            return
        with np.errstate(invalid="ignore"):
            apart = np.max([np.abs(part[:num] - parts[0][:num]) for part in parts], axis=0)
        scale = np.maximum(parts[0][num : 2 * num], 1e-30)
        distances = np.where(np.isfinite(apart) & np.isfinite(scale), apart / scale, 0.0)
        worst = int(np.argmax(distances))
        distance = float(distances[worst])
        if not self._is_wrapped and not self._stays_apart(step, [part[2 * num :] for part in parts]):
            return
        if distance <= self.TOLERANCE:
            return
        self._over = True
        rank = int(np.argmax([abs(part[worst] - parts[0][worst]) for part in parts]))
        name, parameter = self._parameters[worst]
        why = (
            ""
            if self._is_wrapped
            else ", and have moved apart from equal weights: the model is in no DistributedDataParallel"
        )
        yield finding(
            context,
            "replicas_diverged",
            f"After step {step} the weights of rank {rank} differ from those of rank 0, most in {name}{why}.",
            layer=context.layer_of.get(id(parameter)),
            measures=[Measure(name="relative_distance", value=distance, threshold=self.TOLERANCE)],
        ).model_copy(update={"step": max(step, 0)})

    def _stays_apart(self, step: int, samples: Sequence[np.ndarray]) -> bool:
        """Without a wrapper: whether the ranks began equal and have not come closer since."""
        with np.errstate(all="ignore"):
            apart = max(float(np.linalg.norm(sample - samples[0])) for sample in samples)
            distance = apart / max(float(np.linalg.norm(samples[0])), 1e-30)
        if not math.isfinite(distance):
            return False
        self._over = distance > self.TOLERANCE if step == _AT_START else distance < self._largest / 2
        self._largest = max(self._largest, distance)
        return not self._over and step >= self.JUDGED_FROM


def _replicated(context: AuditContext, size: int) -> tuple[bool, list[tuple[str, nn.Parameter]]]:
    """Whether DistributedDataParallel holds the model, and the parameters that all ranks are to have alike, by name."""
    named = [(n, p) for layer in context.layers for n, p in layer.parameters if p.requires_grad and not is_sharded(p)]
    ours = {id(p) for _, p in named}
    wrapper = next((m for m in context.model.modules() if isinstance(m, DistributedDataParallel)), None)
    if wrapper is None:
        # The user may have given the module inside; isinstance would ask objects for their __class__.
        wrapper = next(
            (
                thing
                for thing in gc.get_objects()
                if issubclass(type(thing), DistributedDataParallel) and any(id(p) in ours for p in thing.parameters())
            ),
            None,
        )
    if wrapper is None:
        return False, named
    if torch.distributed.get_world_size(wrapper.process_group) != size or _averages_weights(wrapper):
        return True, []
    ignored = {id(p) for n, p in wrapper.module.named_parameters() if n in wrapper.parameters_to_ignore}
    held = {id(p) for p in wrapper.parameters()} - ignored
    return True, [(n, p) for n, p in named if id(p) in held]


def _averages_weights(wrapper: DistributedDataParallel) -> bool:
    """Whether a communication hook lets replicas differ on purpose (local SGD)."""
    hooks = getattr(wrapper, "_comm_hooks", ())
    return any("localsgd" in getattr(hook, "__qualname__", "").lower() for hook, *_ in hooks)
