"""Bring the balance of a mixture's router into its gradient."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._modules import choose_one
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class BalanceExpertsParameters(FixParameters):
    """Parameters of `balance_experts`."""

    layer: str = Field(min_length=1, max_length=500, description="The router: its output has one logit by expert.")
    weight: float = Field(
        default=1.0, gt=0, le=100, description="Norm of the added gradient, relative to that of the loss, at collapse."
    )


@FIXES.register
class BalanceExperts(Fix[BalanceExpertsParameters]):
    """Add the gradient of a balance term to that at the router's logits, as strong as the routing is uneven.

    What:
        The load-balancing loss of mixtures of experts, as if it stood in the program's loss. The loss that the program
        reports stays as it is.

    Why:
        Only chosen experts learn, and only those that learn are chosen; without a term for balance nothing stops that.

    Definition:
        For E experts, f_e the share of rows whose largest logit is that of e, P_e the mean probability of e:
        ``A = E sum_e f_e P_e``, 1 at balance and E at collapse. At the logits:
        ``g <- g + weight (A - 1) / (E - 1) ||g|| / ||a|| a`` with a the gradient of A; where g is 0, its running norm
        stands for it. Being relative to g, it needs no account of loss scales.

    Safety:
        Guarded: it trains another objective, and a router that is rightly uneven is made even.

    Undo:
        Gradients are used as they are.

    References:
        Fedus, Zoph, Shazeer 2022, arXiv:2101.03961, equation 4. Shazeer et al. 2017, arXiv:1701.06538, section 4.
    """

    code = "balance_experts"
    title = "Balance the experts"
    safety = Safety.GUARDED
    standing = True
    shows_in_loss = False
    loss_may_rise = True
    mends = ("router_collapse",)
    Parameters = BalanceExpertsParameters

    def preview(self, run: LiveRun, parameters: BalanceExpertsParameters) -> list[Change]:
        """The router and the weight."""
        router = choose_one(run, parameters.layer)
        if any(isinstance(hook, RouterBalance) for hook in router._forward_hooks.values()):
            raise BadParameter(f"the router {parameters.layer} is balanced already")
        return [Change(target=f"{parameters.layer}: weight of the balance term", old=0.0, new=parameters.weight)]

    def apply(self, run: LiveRun, parameters: BalanceExpertsParameters) -> Undo:
        """Balance from the next backward pass on."""
        self.preview(run, parameters)
        return choose_one(run, parameters.layer).register_forward_hook(RouterBalance(parameters.weight)).remove


class RouterBalance:
    """Forward hook of a router.

    Args:
        weight: Relative norm of what is added at collapse.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.norm: Any = None
        """Running norm of the gradient at the logits."""

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        """Add to the gradient that will come to the logits."""
        if not hasattr(output, "requires_grad") or not output.requires_grad or output.dim() < 2 or output.shape[-1] < 2:
            return
        logits = output.detach()
        output.register_hook(lambda gradient: gradient + self.added(logits, gradient))

    def added(self, logits: Any, gradient: Any) -> Any:
        """What is added to the gradient at logits, ``[..., experts]``."""
        balance, direction = balance_term(logits)
        norm = gradient.float().norm()
        self.norm = norm if self.norm is None else 0.9 * self.norm + 0.1 * norm
        unevenness = (balance - 1) / (logits.shape[-1] - 1)
        length = self.weight * unevenness.clamp_min(0) * self.norm / direction.norm().clamp_min(1e-30)
        return (length * direction).to(gradient.dtype)


def balance_term(logits: Any) -> tuple[Any, Any]:
    """``E sum_e f_e P_e``, scalar, and its gradient at the logits, of their shape; f counts as constant.

    Args:
        logits: ``[..., experts]``.
    """
    import torch

    rows = logits.detach().float().reshape(-1, logits.shape[-1])
    num_experts = rows.shape[1]
    shares = torch.bincount(rows.argmax(dim=1), minlength=num_experts).float() / len(rows)
    probabilities = rows.softmax(dim=1)
    balance = num_experts * (shares * probabilities.mean(dim=0)).sum()
    expected = (probabilities * shares).sum(dim=1, keepdim=True)
    gradient = num_experts / len(rows) * probabilities * (shares - expected)
    return balance, gradient.reshape(logits.shape)
