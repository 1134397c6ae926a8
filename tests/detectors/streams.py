"""Synthetic runs: samples with the numbers that a test needs, and what the detectors make of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from gradtracer.detectors import Detector, Episodes
from gradtracer.records import LayerInfo, ModelDescription, Observation, SemanticEvent, Severity
from gradtracer.samples import LayerTable, Layout, Sample

Layers = Mapping[str, Mapping[str, float]]


def table(layers: Layers) -> LayerTable:
    """A layer table; infinity codes what is not finite."""
    columns = tuple((layer, signal) for layer, signals in layers.items() for signal in signals)
    values = np.asarray([v for signals in layers.values() for v in signals.values()], dtype=np.float32)
    return LayerTable(Layout(columns), values)


def sample(step: int, layers: Layers | None = None, **numbers: float) -> Sample:
    """A step; without layers it is an unsampled one."""
    return Sample(step=step, time_s=float(step), layers=table(layers) if layers is not None else None, **numbers)


def model(*layers: tuple[str, str] | tuple[str, str, str | None]) -> ModelDescription:
    """A model of (name, type) or (name, type, fed by), in forward order."""
    infos = [
        LayerInfo(
            name=name,
            type=kind,
            num_parameters=0 if kind in ("ReLU", "Sigmoid", "Tanh") else 100,
            trainable=True,
            in_optimizer=True,
            fed_by=fed_by[0] if fed_by else None,
        )
        for name, kind, *fed_by in layers
    ]
    return ModelDescription(
        step=0, type="Net", num_parameters=100, num_bytes=400, forward_order_known=True, layers=tuple(infos)
    )


def events(detector: Detector, stream: Iterable[Sample | Observation]) -> list[SemanticEvent]:
    """The episodes that one rule finds, as they stand at the end."""
    episodes = Episodes([detector])
    found: dict[str, SemanticEvent] = {}
    for item in stream:
        if isinstance(item, Sample):
            found.update({change.event.id: change.event for change in episodes.assess(item)})
        else:
            episodes.observe(item)
    return list(found.values())


def announcements(detector: Detector, stream: Iterable[Sample | Observation]) -> list[tuple[int, Severity]]:
    """Steps and severities at which a reader is told something new."""
    episodes = Episodes([detector])
    told: list[tuple[int, Severity]] = []
    for item in stream:
        if isinstance(item, Sample):
            changes = episodes.assess(item)
            told.extend((item.step, change.event.severity) for change in changes if change.announce)
        else:
            episodes.observe(item)
    return told


def costly(found: Sequence[SemanticEvent]) -> list[SemanticEvent]:
    """Events of severity warning or above."""
    return [event for event in found if event.severity.rank >= Severity.WARNING.rank]


def noisy_losses(num: int, *, first: float = 2.3, last: float = 0.3, noise: float = 0.1, seed: int = 0) -> list[float]:
    """A loss that falls exponentially under multiplicative noise."""
    rng = random.Random(seed)
    return [
        last
        + (first - last) * math.exp(-4.0 * i / num) * math.exp(rng.gauss(0.0, noise))
        + rng.gauss(0.0, noise * last)
        for i in range(num)
    ]
