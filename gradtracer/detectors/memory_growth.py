"""Memory that every step takes and none gives back."""

from __future__ import annotations

from collections.abc import Sequence

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class MemoryGrowth(Detector):
    """The graphs of all earlier steps are still held.

    What:
        A loss that is summed up or stored as a tensor, an output kept in a list, a hidden state that is carried on
        without detach().

    Why:
        Each step adds its graph; the run slows down, and ends out of memory.

    Definition:
        In two sampled steps in a row, with counts of graphs: of those of at least 40 steps ago that are watched, at
        least 8, all are alive.

    Thresholds:
        A loop that keeps some graphs for a while (accumulation, truncated backpropagation, a window of losses) lets go
        of the oldest; one that lets go of none for 40 steps and more will not. 8 graphs are a series, and no
        coincidence of single tensors that somebody holds.

    Fixes:
        In the source: loss.item() or loss.detach() for what is kept; hidden.detach() between steps.

    References:
        Torch documentation, FAQ, "My model reports out of memory".
    """

    code = "memory_growth"
    signal = "num_retained_graphs"
    enter_after = 2

    MIN_GRAPHS = 8

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The graphs that are alive at a sampled step."""
        if sample.layers is None:
            return None
        watched = sample.layers.get("(loss)", "num_watched_graphs")
        retained = sample.layers.get("(loss)", "num_retained_graphs")
        if not watched >= self.MIN_GRAPHS:
            return None
        if retained < watched:
            return []
        return [
            Finding(
                state="retained",
                severity=Severity.WARNING,
                confidence=0.95,
                evidence=(
                    Measure(name="num_retained_graphs", value=retained, baseline=0.0, threshold=float(self.MIN_GRAPHS)),
                    Measure(name="resident_bytes", value=sample.layers.get("(loss)", "resident_bytes"), unit="bytes"),
                ),
                message=f"All {watched:.0f} graphs watched, of steps up to {sample.step - 40}, are still held.",
            )
        ]
