"""What a sampled latent carries: mean and scale of a reparameterised normal law, found in the loss's graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer.records import AuditFinding
from gradtracer.training.audits._reading import below_reshaping, children, facing, first_tensor
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext
from gradtracer.training.graph import LossGraph, saved

_TAKES_WHOLE = {"AddmmBackward0": "mat1", "MmBackward0": "self", "ConvolutionBackward0": "input"}
_FLOORS = ("AddBackward0", "ClampBackward0", "ClampMinBackward0")
_MAX_ROWS = 1_024


@AUDITS.register
class LatentAudit(Audit):
    """What the latent of a variational model carries about its input.

    What:
        Latents drawn as ``z = mu + sigma * noise`` with mu and sigma from layers (the reparameterisation of a
        variational autoencoder or an information bottleneck).

    Why:
        When mu and sigma are the same for every input the latent carries nothing, and what comes after it learns to do
        without: posterior collapse.

    Definition:
        latent_information: ``sum_j ln(1 + Var(mu_j) / mean(sigma_j^2)) / 2`` in nats, the capacity of parallel Gaussian
        channels (Cover & Thomas 2006, section 9.4) at the observed powers. latent_kl: mean over examples of
        ``sum_j (mu_j^2 + sigma_j^2 - 1 - ln sigma_j^2) / 2`` in nats (Kingma & Welling 2014, appendix B). Both are
        recorded under the layer that makes mu. The pattern is an addition of which one side is a product of noise
        (a tensor without history) and an exp, softplus, sqrt or sigmoid of a layer's output.

    Thresholds:
        None here; see the detector `posterior_collapse`.

    Fixes:
        See the detector.

    References:
        Kingma & Welling 2014, arXiv:1312.6114. Burda, Grosse, Salakhutdinov 2016, arXiv:1509.00519 (active units).
    """

    code = "latent"

    def __init__(self) -> None:
        self._mean_layers: set[str] = set()
        self._outputs: dict[str, Tensor] = {}

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """Keep what the layers of means put out, until the loss is known."""
        tensor = first_tensor(output) if name in self._mean_layers else None
        if tensor is not None:
            self._outputs[name] = tensor.detach()
        return ()

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Record what each sampled latent carries."""
        for drawn in _sampled(graph):
            layers = sorted(set(facing(graph, [drawn.mean]).values()))
            if not layers:
                continue
            self._mean_layers.update(layers)
            mean = self._mean(graph, drawn, layers)
            if mean is None:
                continue
            information, divergence = latent_numbers(mean, drawn.sigma)
            context.record(layers[0], "latent_information", information)
            context.record(layers[0], "latent_kl", divergence)
        self._outputs.clear()
        return ()

    def _mean(self, graph: LossGraph, drawn: Reparameterisation, layers: Sequence[str]) -> Tensor | None:
        """The means: from the sum, which the next layer keeps, or from the output of their own layer."""
        addition, start, noise, sigma = drawn.addition, drawn.mean, drawn.noise, drawn.sigma
        for node in graph.nodes:
            kept = _TAKES_WHOLE.get(node.name())
            if kept is None or not any(below_reshaping(child) is addition for child in children(node)):
                continue
            value = saved(node, kept)
            if isinstance(value, Tensor) and value.numel() == noise.numel():
                return value.detach().reshape(noise.shape) - sigma * noise
        output = self._outputs.get(layers[0]) if len(layers) == 1 else None
        if output is None:
            return None
        if output.shape == noise.shape:
            return output
        if output.dim() >= 2 and output.numel() == 2 * noise.numel() and start.name().startswith("Split"):
            # Halves: which one is told by the number of the output that the addition takes.
            dim = 1 if output.dim() == 4 else -1
            index = next((i for n, i in addition.next_functions if n is start), 0)
            return output.chunk(2, dim=dim)[index]
        return None


def latent_numbers(mean: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Information and divergence from the standard normal law, both in nats and scalar.

    Args:
        mean: ``[examples, ...]``.
        sigma: Standard deviations, likewise.
    """
    mean, sigma = _rows(mean), _rows(sigma)
    signal, noise = mean.var(dim=0, unbiased=False), sigma.square().mean(dim=0)
    tiny = torch.finfo(torch.float32).tiny
    information = (signal / noise.clamp_min(tiny)).log1p().sum() / 2
    squares = sigma.square().clamp_min(tiny)
    divergence = (mean.square() + squares - 1 - squares.log()).sum(dim=1).mean() / 2
    return information, divergence


def _rows(values: Tensor) -> Tensor:
    rows = values.detach()
    rows = rows.flatten(1) if rows.dim() > 3 or rows.dim() == 2 else rows.flatten(0, -2)
    return rows[:: max(1, math.ceil(rows.shape[0] / _MAX_ROWS))].float()


@dataclass(frozen=True)
class Reparameterisation:
    """An addition ``z = mu + sigma * noise`` in a graph."""

    addition: Any
    mean: Any
    """The node that made mu."""
    scale: Any
    """The node that made sigma."""
    noise: Tensor
    sigma: Tensor


def reparameterisation(node: Any) -> Reparameterisation | None:
    """What an addition takes part in; None where it is another one, or no addition."""
    sides = list(children(node)) if node.name() == "AddBackward0" else []
    if len(sides) != 2:
        return None
    for side, other in (sides, sides[::-1]):
        product = below_reshaping(side)
        if product.name() != "MulBackward0" or len(list(children(product))) != 1:
            continue
        noise = saved(product, "other")
        if noise is None:
            noise = saved(product, "self")
        # A floor under the scale (an addition of a constant, a clamp) is passed over.
        scale = below_reshaping(next(children(product)), _FLOORS)
        sigma = _sigma(scale)
        if (
            noise is not None
            and sigma is not None
            and noise.dim() >= 2
            and noise.shape == sigma.shape
            and noise.shape[0] > 1
        ):
            return Reparameterisation(node, other, scale, noise.detach(), sigma)
    return None


def _sampled(graph: LossGraph) -> Iterator[Reparameterisation]:
    found = (reparameterisation(node) for node in graph.nodes)
    return (one for one in found if one is not None and facing(graph, [one.scale]))


def _sigma(node: Any) -> Tensor | None:
    """The result of a node that makes a number positive; None for other nodes."""
    if node.name() in ("ExpBackward0", "SqrtBackward0", "SigmoidBackward0"):
        result = saved(node, "result")
        return None if result is None else result.detach()
    given = saved(node, "self") if node.name() == "SoftplusBackward0" else None
    if given is None:
        return None
    return F.softplus(given.detach(), node._saved_beta, node._saved_threshold)
