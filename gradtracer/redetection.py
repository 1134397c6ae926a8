"""Runs the rules of today over a run of yesterday."""

from __future__ import annotations

from dataclasses import replace

from gradtracer.detectors import Episodes, all_detectors
from gradtracer.records import SemanticEvent
from gradtracer.series import Series


def redetect(series: Series) -> Series:
    """The same run with the events that the detectors of this version find in it.

    Samples and observations are handed to fresh detectors in the order in which they were recorded, so that a better
    rule can be tried on runs that are over. What detectors cannot see again is what was not recorded then.

    Args:
        series: A whole run, from its first step.
    """
    episodes = Episodes(all_detectors())
    events: dict[str, SemanticEvent] = {}
    waiting = list(series.observations)
    for sample in series.samples():
        while waiting and waiting[0].step <= sample.step:
            episodes.observe(waiting.pop(0))
        for change in episodes.assess(sample):
            events[change.event.id] = change.event
    return replace(series, events=tuple(events.values()))
