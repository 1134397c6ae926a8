"""Health rules, one a file: samples in, events out. Importing the package registers them all."""

from gradtracer.detectors.base import DETECTORS, Detector, Episodes, EventChange, Finding

DETECTORS.load(__name__)

__all__ = ["DETECTORS", "Detector", "Episodes", "EventChange", "Finding", "all_detectors"]


def all_detectors() -> list[Detector]:
    """A fresh instance of every rule, for one run."""
    return [cls() for cls in DETECTORS]
