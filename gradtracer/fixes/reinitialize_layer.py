"""Draw the weights of layers anew."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.fixes._modules import draw_anew, trained_layers
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class ReinitializeLayerParameters(FixParameters):
    """Parameters of `reinitialize_layer`."""

    layers: str | None = Field(
        default=None, max_length=2000, description="Layers, or modules that contain them, with commas; all by default."
    )
    scheme: str = Field(
        default="auto",
        pattern="^(auto|kaiming|xavier|orthogonal)$",
        description="auto: by what follows each layer; or kaiming, xavier, orthogonal for all of them.",
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of the random numbers.")


@FIXES.register
class ReinitializeLayer(Fix[ReinitializeLayerParameters]):
    """Draw the weights of some layers, or of all, from a law that suits what follows them, and forget their moments.

    What:
        Linear, convolutional, recurrent, attention and embedding layers and normalisations begin anew; the optimizer
        forgets what it knew of them. Parameters that are not trained stay.

    Why:
        Weights that are equal, far from a useful scale, or thrown away by one update seldom come back by training.

    Definition:
        W ~ N(0, s^2): before a rectifier and its kin ``s = sqrt(2 / fan_in)``; before tanh and sigmoid ``s = g sqrt(2 /
        (fan_in + fan_out))`` with g = 5/3 and 4; before no activation ``s = sqrt(1 / fan_in)``. Recurrent matrices are
        orthogonal by gate, with a rectifier the identity. Embeddings are N(0, 1), biases 0, that of an LSTM's forget
        gate 1. What follows is read from a captured batch; where none can run again, a rectifier is assumed.

    Safety:
        Guarded: what the layers had learned is lost.

    Undo:
        The old weights, buffers and moments are put back.

    References:
        He et al. 2015, arXiv:1502.01852, equation 10. Glorot & Bengio 2010, AISTATS, equation 12. Saxe, McClelland,
        Ganguli 2014, arXiv:1312.6120. Le, Jaitly, Hinton 2015, arXiv:1504.00941 (identity). Jozefowicz, Zaremba,
        Sutskever 2015, ICML (forget gate).
    """

    code = "reinitialize_layer"
    title = "Draw the weights of layers anew"
    safety = Safety.GUARDED
    num_batches = 1
    mends = (
        "bad_initialisation", "symmetric_or_zero_init", "vanishing_gradient", "dead_relu", "exploding_gradient",
        "embedding_collapse", "input_scale",
    )  # fmt: skip
    Parameters = ReinitializeLayerParameters

    def preview(self, run: LiveRun, parameters: ReinitializeLayerParameters) -> list[Change]:
        """The layers, and the norms of the weights that would go."""
        return [
            Change(target=name, old=f"norm {_norm(module):.4g}", new=f"drawn anew ({parameters.scheme})")
            for name, module in trained_layers(run, parameters.layers).items()
        ]

    def apply(self, run: LiveRun, parameters: ReinitializeLayerParameters) -> Undo:
        """Draw."""
        return draw_anew(run, trained_layers(run, parameters.layers), parameters.seed, parameters.scheme)


def _norm(module: Any) -> float:
    return sum(float(p.detach().float().norm()) ** 2 for p in module.parameters(recurse=False)) ** 0.5
