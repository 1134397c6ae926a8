"""Labels that do not belong to the inputs."""

from __future__ import annotations

import numpy as np

from gradtracer.causes._reading import event_ids, evidence, loss_source, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence, Severity
from gradtracer.series import Series


@CAUSES.register
class LabelMisalignment(Cause):
    """The labels are those of other rows, or are numbered differently from how they are read.

    What:
        Inputs and labels in different orders, joined by the wrong key, shifted in time, or counted from 1.

    Why:
        Gradients and updates look healthy; what is learned is noise, or the right thing under the wrong name.

    Definition:
        Evidence, with its log-likelihood ratio in nats: independent_labels: +6, or +2.5 where the inputs could not be
        read, less 5 if the outputs have come to tell the labels since; unused_first_class: +5; tokens that are asked
        for at another place than the next (token_shift): +5; without any of these the cause is not considered. Onset:
        0, or where the labels had told something before, the largest rise of the loss before they no longer did.

    Thresholds:
        Shuffled labels are the usual reason for independence in a model that moves: 6 = ln 400 leaves room for a task
        without any signal. A first class without labels has other reasons in about one of a hundred classifiers.

    Fixes:
        In the source.

    References:
        Northcutt, Athalye, Mueller 2021, arXiv:2103.14749 (label errors). Zhang et al. 2017, arXiv:1611.03530.
    """

    code = "label_misalignment"
    title = "Labels do not belong to the inputs"
    prior = 0.03

    def consider(self, series: Series) -> Case | None:
        """Weigh what the labels told."""
        independent = series.events_of("independent_labels")
        unused = warnings_of(series, "unused_first_class")
        shifted = [e for e in warnings_of(series, "audit") if e.to_state == "token_shift"]
        found: list[Evidence] = []
        explanation = advice = ""
        if independent:
            sure = any(e.severity is not Severity.INFO for e in independent)
            found.append(evidence(independent[0].message, 6.0 if sure else 2.5, events=independent[:1]))
            if not sure:
                found += self._learned_since(series)
            explanation = (
                "The weights move and the gradients are healthy, yet what the model is asked for has nothing to do "
                "with what it is shown."
            )
            advice = (
                "Check that inputs and targets are shuffled, sorted and filtered together: print some pairs as the "
                "loss gets them, and compare with the files. Is the model able to fit ten pairs that you checked by "
                "hand?"
            )
        elif unused:
            found.append(evidence(unused[0].message, 5.0, events=unused[:1]))
            explanation = "The labels fill every class but the first, as labels do that are counted from 1."
            advice = (
                "Print the smallest and largest label of the training and of the evaluation data: if they differ by "
                "one, subtract 1 from the training labels (or leave it if class 0 is meant to be empty)."
            )
        elif shifted:
            found.append(evidence(shifted[0].message, 5.0, events=shifted[:1]))
            explanation = "The target is the input at another offset than the next token."
            advice = "Shift labels once only: where the model or the loss shifts already, pass the labels unshifted."
        else:
            return None
        onset = self._onset(series, independent[0].step) if independent else 0
        return Case(
            evidence=found,
            onset_step=onset,
            explanation=explanation,
            event_ids=event_ids([*independent, *unused, *shifted]),
            source=loss_source(series),
            advice=advice,
        )

    def _learned_since(self, series: Series) -> list[Evidence]:
        _, told = series.layer("(loss)", "label_dependence")
        told = told[-5:][told[-5:] >= 0]
        if len(told) and float(np.median(told)) >= 2.0:
            return [evidence("The outputs tell the labels by now.", -5.0)]
        return []

    def _onset(self, series: Series, reported: int) -> int:
        steps, told = series.layer("(loss)", "label_dependence")
        before = steps[(steps < reported) & (told >= 2.0) & np.isfinite(told)]
        if len(before) < 5:
            return 0
        last = int(before[-1])
        losses, at = series.run("loss"), series.steps
        rises = np.diff(losses, prepend=losses[:1])
        window = (at > last) & (at <= reported) & np.isfinite(rises)
        return int(at[window][np.argmax(rises[window])]) if window.any() else last + 1
