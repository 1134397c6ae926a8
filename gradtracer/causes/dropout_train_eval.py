"""The wrong mode, in training or in evaluation."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class DropoutTrainEval(Cause):
    """Dropout stays on in evaluation, or training goes on in evaluation mode.

    What:
        F.dropout without training=self.training, dropout that `eval()` does not reach, or `eval()` without the
        `train()` that takes it back.

    Why:
        Answers are random where they should not be, or regularisation and batch statistics are off.

    Definition:
        Evidence, with its log-likelihood ratio in nats: dropout_in_evaluation (a copy in evaluation mode called
        dropout): +6.5; training_in_evaluation_mode: +6 as a warning, +2 as info. Onset: 0 for dropout, the first step
        in evaluation mode for the mode.

    Thresholds:
        Both are seen, not inferred. Dropout that stays on is meant in models that estimate their uncertainty so (Gal
        and Ghahramani 2016): 6.5 = ln 665.

    Fixes:
        In the source.

    References:
        Srivastava et al. 2014, JMLR 15. Gal, Ghahramani 2016, arXiv:1506.02142.
    """

    code = "dropout_train_eval"
    title = "Wrong mode at training or evaluation"
    prior = 0.015

    def consider(self, series: Series) -> Case | None:
        """Weigh what the audit of modes found."""
        active = series.audit("dropout_in_evaluation")
        mode = series.audit("training_in_evaluation_mode")
        if not active and not mode:
            return None
        events = [
            e
            for e in warnings_of(series, "audit")
            if e.to_state in ("dropout_in_evaluation", "training_in_evaluation_mode")
        ]
        found = []
        if active:
            found.append(evidence(active[0].detail, 6.5, events=events, measures=active[0].measures))
        if mode:
            found.append(evidence(mode[0].detail, 6.0 if events else 2.0, events=events, measures=mode[0].measures))
        onset = 0 if active else int(mode[0].measures[0].value or 0)
        return Case(
            evidence=found,
            layer=active[0].layer if active else None,
            onset_step=onset,
            explanation=(active or mode)[0].detail,
            event_ids=event_ids(events),
            source=(active or mode)[0].source,
            advice="Pass training=self.training to the dropout function (for attention dropout_p=self.p if "
            "self.training else 0.0), or use nn.Dropout in a registered module."
            if active
            else "Call model.train() at the start of every training epoch, or right after validation.",
        )
