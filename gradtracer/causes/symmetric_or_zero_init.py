"""Units begin equal and stay equal."""

from __future__ import annotations

from gradtracer.causes._audited import SeenAsFact
from gradtracer.causes._reading import fix, joined
from gradtracer.causes.base import CAUSES
from gradtracer.records import AuditFinding, FixSuggestion
from gradtracer.series import Series


@CAUSES.register
class SymmetricOrZeroInit(SeenAsFact):
    """All units of a layer have the same weights, so they get the same gradient and never differ.

    What:
        Layers initialised with a constant, or with zeros on both sides of a product.

    Why:
        Whatever its width, the layer computes one feature.

    Definition:
        Evidence, with its log-likelihood ratio in nats: all rows of a weight are equal at the start and after 12
        sampled updates: +9. Root: the first such layer in forward order. Onset: step 0.

    Thresholds:
        ln 8000 = 9: the fact is read from the training and not inferred; what is left is a loop that wants it so.

    Fixes:
        reinitialize_layer.

    References:
        Goodfellow, Bengio, Courville 2016, Deep Learning, section 8.4.
    """

    code = "symmetric_or_zero_init"
    title = "Units are identical and stay so"
    prior = 0.01

    findings = ("units_identical",)
    ratio = 9.0
    what_to_do = (
        "Initialise the weights with random numbers (nn.init.kaiming_uniform_); zeros are for biases, and for the"
        " last layer of a residual branch only."
    )
    source_is_the_layers = True

    def fixes(self, series: Series, root: AuditFinding) -> tuple[FixSuggestion, ...]:
        """Draw different numbers for different units."""
        layers = joined(dict.fromkeys(f.layer for f in series.audit(*self.findings) if f.layer))
        return (fix("reinitialize_layer", "Units begin apart, so that they can learn apart.", layers=layers),)
