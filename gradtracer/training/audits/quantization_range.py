"""Channels so large that a common scale rounds the others away."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gradtracer.records import AuditFinding, Measure, Severity
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.layers import source_of

_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
_NORM = nn.modules.batchnorm._BatchNorm


@AUDITS.register
class QuantizationRange(Audit):
    """One output channel is so much larger than the rest that 8 bits with one scale lose the rest.

    What:
        Weights of linear and convolutional layers, and factors by channel that may be folded into them: buffers of the
        model, and gamma / sqrt(running variance) of batch normalisation.

    Why:
        Nothing in training suffers; rounding to 8 bits with a scale for the whole tensor sets channels to zero.

    Definition:
        With ``a_c = max |w_c|`` by output channel, ``r = max_c a_c / median_c a_c``. A folded factor
        multiplies ``a_c``.
        Told where r is 64 or more, at steps 100, 1000 and every 1000th after, and at the first.

    Thresholds:
        8 bits hold 127 steps: at r = 64 the largest weight of a usual channel gets 2 of them. The finding is `info`:
        whether it matters is decided by how the model will be quantized, which training does not show.

    Fixes:
        Scales by channel in the compression recipe; equalise the channels before folding.

    References:
        Nagel, van Baalen, Blankevoort, Welling 2019, arXiv:1906.04721 (cross-layer equalisation), section 3.
        Krishnamoorthi 2018, arXiv:1806.08342, section 3.1.
    """

    code = "quantization_range"

    RATIO = 64.0
    MIN_CHANNELS = 8

    def on_step_end(self, context: AuditContext) -> Iterable[AuditFinding]:
        """Look at all channels; rarely, since the host reads them."""
        if context.step not in (0, 100) and context.step % 1000:
            return
        outputs = [(layer.name, layer.module) for layer in context.layers if isinstance(layer.module, _LAYERS)]
        for name, module in outputs:
            ratio = _ratio(module.weight.detach().flatten(1).abs().amax(1), self.MIN_CHANNELS)
            if ratio >= self.RATIO:
                yield self._told(context, name, ratio, "its weights")
        for path, factors in _factors(context.model):
            ratio = _ratio(factors.abs(), self.MIN_CHANNELS)
            if ratio >= self.RATIO:
                owner = path.rpartition(".")[0]
                near = [n for n, m in outputs if m.weight.shape[0] == len(factors) and n.startswith(owner)]
                layer = near[0] if near else owner or None
                yield self._told(context, layer, ratio, f"the factors of {path}, if they are folded into it")

    def _told(self, context: AuditContext, layer: str | None, ratio: float, what: str) -> AuditFinding:
        return finding(
            context,
            "channel_range",
            f"The largest output channel of {layer} is {ratio:.3g} times the usual one, by {what}.",
            layer=layer,
            severity=Severity.INFO,
            measures=(Measure(name="channel_ratio", value=ratio, threshold=self.RATIO),),
            source=source_of(context.model),
        )


def _ratio(sizes: Tensor, min_channels: int) -> float:
    if len(sizes) < min_channels or not bool(torch.isfinite(sizes).all()):
        return 0.0
    middle = float(sizes.float().median())
    return float(sizes.max()) / middle if middle > 0 else 0.0


def _factors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        if isinstance(module, _NORM):
            if module.running_var is not None and module.affine:
                yield path, module.weight.detach() / (module.running_var + module.eps).sqrt()
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dim() == 1 and buffer.is_floating_point():
                yield f"{path}.{name}" if path else name, buffer.detach()
