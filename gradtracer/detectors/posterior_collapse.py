"""A sampled latent that carries nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class PosteriorCollapseDetector(Detector):
    """The posterior of a latent has become its prior.

    What:
        A latent drawn around a layer's output that is the standard normal law for every input.

    Why:
        The decoder sees noise, learns to do without, and nothing pulls the latent back: its gradient from the
        reconstruction is gone, the one from the divergence is at rest.

    Definition:
        latent_kl below 0.05, latent_information below 0.02 and below a fifth of its largest value so far, for 60 steps
        and 3 samples at least. The unit of both is the nat, natural logarithm.

    Thresholds:
        A latent that tells two equally likely classes apart carries ln 2 = 0.69 nats; 0.02 is 3 % of that. A
        reconstruction that uses the latent raises its information from the first steps on, so a fall to a fifth that
        lasts for 60 steps is no slow start. A divergence of 0.05 with mu and sigma of the prior keeps latents out that
        are noisy on purpose (a policy, an injected noise): these are not the standard normal law.

    Fixes:
        In the source: sum the reconstruction over the data's dimensions if the divergence is summed over latents, warm
        up the weight of the divergence, or free bits.

    References:
        Bowman et al. 2016, arXiv:1511.06349, section 3.1. Kingma et al. 2016, arXiv:1606.04934, appendix C.8. Lucas,
        Tucker, Grosse, Norouzi 2019, arXiv:1911.02469.
    """

    code = "posterior_collapse"
    signal = "latent_information"

    MAX_KL, MAX_INFORMATION, FALL = 0.05, 0.02, 5.0
    MIN_STEPS, MIN_SAMPLES = 60, 3

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}
        self._since: dict[str, int] = {}
        self._num: dict[str, int] = {}

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """What each latent carries at this sample."""
        carried = sample.layers.signal(self.signal) if sample.layers is not None else {}
        if sample.layers is None or not carried:
            return None
        found: list[Finding] = []
        for layer, information in carried.items():
            divergence = sample.layers.get(layer, "latent_kl")
            if not math.isfinite(information) or not math.isfinite(divergence):
                continue
            largest = self._largest[layer] = max(self._largest.get(layer, 0.0), information)
            if divergence >= self.MAX_KL or information >= self.MAX_INFORMATION or self.FALL * information >= largest:
                self._since.pop(layer, None)
                self._num.pop(layer, None)
                continue
            began = self._since.setdefault(layer, sample.step)
            self._num[layer] = self._num.get(layer, 0) + 1
            if sample.step - began >= self.MIN_STEPS and self._num[layer] >= self.MIN_SAMPLES:
                found.append(self._finding(layer, information, largest, divergence, began))
        return found

    def _finding(self, layer: str, information: float, largest: float, divergence: float, began: int) -> Finding:
        return Finding(
            state="collapsed",
            severity=Severity.WARNING,
            layer=layer,
            evidence=(
                Measure(
                    name="latent_information", value=information, baseline=largest, threshold=self.MAX_INFORMATION,
                    unit="nats",
                ),
                Measure(name="latent_kl", value=divergence, threshold=self.MAX_KL, unit="nats"),
                Measure(name="first_step", value=float(began), unit="step"),
            ),
            message=f"Since step {began} the latent around {layer} is the standard normal law for every input: it "
            f"carries {information:.2g} nats, and its divergence from the prior is {divergence:.2g} nats.",
        )  # fmt: skip
