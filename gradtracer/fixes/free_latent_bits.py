"""Let each latent carry some information before the divergence counts."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._modules import choose, forget_moments, keep_moments
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class FreeLatentBitsParameters(FixParameters):
    """Parameters of `free_latent_bits`."""

    nats: float = Field(
        default=1.0, gt=0, le=20, description="Divergence of one latent, averaged over the batch, that costs nothing."
    )


@FIXES.register
class FreeLatentBits(Fix[FreeLatentBitsParameters]):
    """Take the divergence's gradient off the latents of a variational model that carry less than some nats.

    What:
        Where a layer receives ``z = mu + sigma * noise``, the gradient that reaches mu and sigma by another way than
        through z is that of the divergence. It is left out for each latent whose divergence from the standard normal
        law is below the bound. The loss that the program reports stays as it is.

    Why:
        A divergence that outweighs the reconstruction makes every latent the prior, whence none comes back; with room
        that costs nothing the decoder learns to use the latent first.

    Definition:
        ``g_j <- g_j(through z) + [KL_j > nats] g_j(else)`` for the gradients at mu and at what sigma is made of, with
        ``KL_j = mean (mu_j^2 + sigma_j^2 - 1 - ln sigma_j^2) / 2`` over the batch.

    Safety:
        Guarded: it trains another objective. The reported loss rises by the divergence that is allowed; the watch asks
        only that it stays finite.

    Undo:
        Gradients are used as they are.

    References:
        Kingma et al. 2016, arXiv:1606.04934, section C.8 (free bits). Bowman et al. 2016, arXiv:1511.06349.
    """

    code = "free_latent_bits"
    title = "Give latents free bits"
    safety = Safety.GUARDED
    standing = True
    shows_in_loss = False
    loss_may_rise = True
    mends = ("posterior_collapse",)
    Parameters = FreeLatentBitsParameters

    def preview(self, run: LiveRun, parameters: FreeLatentBitsParameters) -> list[Change]:
        """The nats that come free."""
        _layers(run)
        return [Change(target="free nats of each latent", old=0.0, new=parameters.nats)]

    def apply(self, run: LiveRun, parameters: FreeLatentBitsParameters) -> Undo:
        """Look for latents in every forward pass from now on."""
        finder = LatentFinder(parameters.nats)
        trained = [p for p in run.model.parameters() if p.requires_grad]
        put_back = keep_moments(run, trained)
        forget_moments(run, trained)
        handles = [module.register_forward_pre_hook(finder) for module in _layers(run)]

        def undo() -> None:
            for handle in handles:
                handle.remove()
            put_back()

        return undo


class LatentFinder:
    """Forward pre-hook of layers: where the input is a latent, its graph gets hooks of its own.

    Args:
        nats: Divergence of a latent that costs nothing.
    """

    def __init__(self, nats: float) -> None:
        self.nats = nats

    def __call__(self, module: Any, inputs: Any) -> None:
        """Look at what the layer receives."""
        node = getattr(inputs[0], "grad_fn", None) if inputs else None
        if node is None:
            return
        from gradtracer.training.audits._reading import below_reshaping
        from gradtracer.training.audits.latent import reparameterisation

        drawn = reparameterisation(below_reshaping(node))
        if drawn is None or "gradtracer_free_bits" in drawn.addition.metadata:
            return
        if inputs[0].numel() == drawn.noise.numel():
            drawn.addition.metadata["gradtracer_free_bits"] = True
            _free(drawn, inputs[0].detach().reshape(drawn.noise.shape), self.nats)


def _free(drawn: Any, latent: Any, nats: float) -> None:
    mean, square = latent - drawn.sigma * drawn.noise, drawn.sigma.square()
    divergence = (mean.square() + square - 1 - square.clamp_min(1e-30).log()).mean(dim=0) / 2
    counts = (divergence > nats).to(latent.dtype)
    _leave_out(drawn.addition, drawn.mean, counts)
    above, below = _last_before_layer(drawn.scale)
    _leave_out(above, below, counts)


def _last_before_layer(node: Any) -> tuple[Any, Any]:
    """On the way from the scale toward the input: the last node of one input, and the one that it takes."""
    from gradtracer.training.audits._reading import children

    while True:
        below = list(children(node))
        if len(below) != 1 or len(list(children(below[0]))) != 1 or below[0].name().startswith(("Split", "Chunk")):
            return node, below[0]
        node = below[0]


def _leave_out(above: Any, below: Any, counts: Any) -> None:
    """Of the gradient that `below` receives keep what comes from `above`, and where `counts` is 1 the rest."""
    position = next(i for i, (n, _) in enumerate(above.next_functions) if n is below)
    output = above.next_functions[position][1]
    through: list[Any] = []

    def note(grad_inputs: Any, grad_outputs: Any) -> None:
        through.append(grad_inputs[position])

    def weigh(grad_outputs: Any) -> Any:
        total = grad_outputs[output]
        if not through or through[-1] is None or total is None or total.shape != through[-1].shape:
            return None
        kept = through.pop()
        changed = kept + counts.reshape(counts.shape) * (total - kept)
        return (*grad_outputs[:output], changed, *grad_outputs[output + 1 :])

    above.register_hook(note)
    below.register_prehook(weigh)


def _layers(run: LiveRun) -> list[Any]:
    found = choose(run, None, lambda m: next(m.parameters(recurse=False), None) is not None, "layer with parameters")
    if not found:
        raise BadParameter("the model has no layer with parameters")
    return list(found.values())
