"""The first weights have the wrong scale."""

from __future__ import annotations

from gradtracer.causes._audited import SeenAsFact
from gradtracer.causes._reading import fix, joined, layer_info
from gradtracer.causes.base import CAUSES
from gradtracer.records import AuditFinding, FixSuggestion
from gradtracer.series import Series


@CAUSES.register
class BadInitialisation(SeenAsFact):
    """Weights are drawn far too large or too small, which shows before the first update.

    What:
        Logits in the hundreds and a first loss far above that of guessing, saturated activations, or outputs that do
        not depend on the input.

    Why:
        The run first has to undo its weights; it often ends at a worse place, or never leaves the start.

    Definition:
        Evidence, with its log-likelihood ratio in nats: weights far from the usual scale, with the effect on the first
        loss or the activations: +8; the input is far from unit scale: -2 (then that may be the cause). Root: the first
        such layer in forward order, whose scale all others build on. Onset: step 0.

    Thresholds:
        ln 3000 = 8: scale and effect are both read before the first update, so no rate and no gradient can have made
        them.

    Fixes:
        layer_scale_init, from the first weights where there is a snapshot of them; reinitialize_layer, which also mends
        recurrent layers.

    References:
        Glorot & Bengio 2010, AISTATS. He, Zhang, Ren, Sun 2015, arXiv:1502.01852. Mishkin & Matas 2016,
        arXiv:1511.06422.
    """

    code = "bad_initialisation"
    title = "The initialisation has the wrong scale"
    prior = 0.02

    findings = ("weights_too_large", "weights_too_small")
    ratio = 8.0
    what_to_do = (
        "Leave out the custom initialisation of this layer, or use nn.init.kaiming_normal_ (rectifiers) or "
        "nn.init.xavier_normal_ (tanh, sigmoid, attention); recurrent matrices nn.init.orthogonal_."
    )
    source_is_the_layers = True

    def fixes(self, series: Series, root: AuditFinding) -> tuple[FixSuggestion, ...]:
        """Give the layers another scale, or other weights."""
        layers = list(dict.fromkeys(f.layer for f in series.audit(*self.findings) if f.layer))
        anew = fix("reinitialize_layer", "The layers begin with weights of a usual scale.", layers=joined(layers))
        types = [info.type for layer in layers if (info := layer_info(series, layer))]
        if any(word in t for t in types for word in ("RNN", "LSTM", "GRU")):
            return (anew,)
        rescaled = fix("layer_scale_init", "Every layer puts out unit variance.", rollback_first=True)
        return (rescaled, anew)
