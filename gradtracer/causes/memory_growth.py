"""Memory rises every step."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, loss_source, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class MemoryGrowth(Cause):
    """Graphs of earlier steps are kept, so memory rises every step.

    What:
        A tensor with history that outlives its step.

    Why:
        The run slows down and dies out of memory.

    Definition:
        Evidence, with its log-likelihood ratio in nats: memory_growth: +6. Onset: 0, since the program is so from the
        start.

    Thresholds:
        That the graphs are alive is seen: 6 = ln 400.

    Fixes:
        In the source.

    References:
        Torch documentation, FAQ, "My model reports out of memory".
    """

    code = "memory_growth"
    title = "Memory rises every step"
    prior = 0.01

    def consider(self, series: Series) -> Case | None:
        """Weigh what was measured."""
        events = warnings_of(series, "memory_growth")
        if not events:
            return None
        return Case(
            evidence=[evidence(events[0].message, 6.0, events=events[:1])],
            onset_step=0,
            explanation="Something holds a tensor of every step together with the graph that made it.",
            event_ids=event_ids(events),
            source=loss_source(series),
            advice="Keep numbers and not tensors: total += loss.item(), outputs.append(out.detach()), hidden = "
            "hidden.detach() between steps, and no retain_graph=True.",
        )
