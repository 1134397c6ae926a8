"""Weigh the classes of a classifier by how rare they are."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._modules import ROOT, all_modules, choose_one, rehearse_if_possible
from gradtracer.fixes._ranks import over_ranks
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety

_MIN_ROWS = 8
"""Rows of the rarest class before shares are believed: their relative error is then a third."""
_MAX_WAIT = 50


class WeighClassesParameters(FixParameters):
    """Parameters of `weigh_classes`."""

    layer: str | None = Field(
        default=None, max_length=500, description="The layer that puts out the logits; by default the last that runs."
    )
    max_weight: float = Field(default=100.0, gt=1, le=10_000, description="Largest ratio of two classes' weights.")


@FIXES.register
class WeighClasses(Fix[WeighClassesParameters]):
    """Give every class the same say: gradients of a row are weighted by how rare its label is.

    What:
        For cross-entropy, of logits or of one logit: the gradient at the logits tells the label of each row, by its
        sign. Labels are counted, and rows are weighted as `weight=` or `pos_weight=` of the loss would do it. Once
        shares are known the bias of the layer is moved to where the weighted loss wants it. The loss that the program
        reports stays the unweighted one.

    Why:
        To answer with the majority is nearly optimal for an unweighted loss over rare labels, and useless.

    Definition:
        With shares p_c of C classes: the gradient of a row with label c is multiplied by ``w_c = 1 / (C p_c)``, ratios
        capped at `max_weight`; once, ``b_c <- b_c + ln w_c`` (of one logit ``b <- b + ln(w_1 / w_0)``), and the
        optimizer forgets its moments of the bias.

    Safety:
        Guarded: probabilities are no longer those of the data, and the reported loss rises; the watch asks only that it
        stays finite. A model that is used for its ranking or its probabilities needs none of it.

    Undo:
        Gradients are used as they are, and the bias loses what it was given.

    References:
        King & Zeng 2001, Political Analysis 9, section 4 (weights and prior correction). Menon et al. 2021,
        arXiv:2007.07314, equation 4.
    """

    code = "weigh_classes"
    title = "Weigh rare classes up"
    safety = Safety.GUARDED
    standing = True
    shows_in_loss = False
    loss_may_rise = True
    num_batches = 1
    mends = ("class_imbalance",)
    Parameters = WeighClassesParameters

    def preview(self, run: LiveRun, parameters: WeighClassesParameters) -> list[Change]:
        """The layer."""
        if parameters.layer is not None:
            choose_one(run, parameters.layer)
        return [
            Change(target=f"{parameters.layer or 'last layer'}: weights of classes", old=1.0, new="1 / (C * share)")
        ]

    def apply(self, run: LiveRun, parameters: WeighClassesParameters) -> Undo:
        """Weigh from the next backward pass on."""
        layer = choose_one(run, parameters.layer) if parameters.layer is not None else _last_layer(run)
        weigher = ClassWeigher(parameters.max_weight)
        handle = layer.register_forward_hook(weigher)
        shift: list[tuple[Any, Any]] = []
        num_updates = 0

        def after(optimizer: Any) -> None:
            nonlocal num_updates
            bias = getattr(layer, "bias", None)
            if shift or bias is None or weigher.counts is None:
                return
            num_updates += 1
            if over_ranks(weigher.counts, "sum").min() >= _MIN_ROWS or num_updates == _MAX_WAIT:
                shift.append((bias, over_ranks(weigher.shift(), "mean").to(bias)))
                bias.detach().add_(shift[0][1])
                for each in run.optimizers:
                    if bias in each.state:
                        each.state[bias].clear()

        end = run.around_update(lambda optimizer: None, after)

        def undo() -> None:
            end()
            handle.remove()
            for bias, by in shift:
                bias.detach().sub_(by)

        return undo


class ClassWeigher:
    """Forward hook of the layer of logits: weighs the gradient of each row by its label.

    Args:
        max_weight: Largest ratio of two weights.
    """

    def __init__(self, max_weight: float) -> None:
        self.max_weight = max_weight
        self.counts: Any = None
        """Rows by label so far, ``[classes]``; of one logit negatives and positives."""
        self.single = False
        """Whether there is one logit."""

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        """Weigh the gradient that will come to the logits."""
        if hasattr(output, "requires_grad") and output.requires_grad:
            output.register_hook(self.weigh)

    def weigh(self, gradient: Any) -> Any:
        """Count the labels in a gradient at the logits, ``[..., classes]``, and weigh its rows."""
        import torch

        rows = gradient.reshape(-1, gradient.shape[-1] if gradient.dim() > 1 else 1)
        self.single = single = rows.shape[1] == 1
        counted = (rows != 0).any(dim=1)
        labels = (rows[:, 0] < 0).long() if single else rows.argmin(dim=1)
        if not single and not bool((rows.sum(dim=1).abs() <= 1e-3 * rows.abs().sum(dim=1) + 1e-30).all()):
            return None  # no cross-entropy over one label a row
        counts = torch.bincount(labels[counted], minlength=max(2, rows.shape[1])).double()
        self.counts = counts if self.counts is None else self.counts + counts
        weights = self.weights().to(rows)
        return gradient * (weights[labels] if gradient.dim() < 2 else weights[labels].reshape(*gradient.shape[:-1], 1))

    def weights(self) -> Any:
        """By class, with mean 1 over rows, ``[classes]``."""
        raw = 1.0 / self.counts.clamp_min(1.0)
        raw = raw.clamp_max(float(raw.min()) * self.max_weight)
        return raw * self.counts.sum() / (raw * self.counts).sum()

    def shift(self) -> Any:
        """What the bias gets, ``[classes]`` or ``[1]``."""
        logs = self.weights().log()
        return (logs[1:] - logs[:1]) if self.single else logs - logs.mean()


def _last_layer(run: LiveRun) -> Any:
    from gradtracer.training.flow import reading_flow

    with reading_flow(run.model) as flow:
        rehearse_if_possible(run, 1)
    known = all_modules(run)
    if flow.order and flow.order[-1] in known:
        return known[flow.order[-1]]
    leaves = [m for n, m in known.items() if n != ROOT and getattr(m, "out_features", None) is not None]
    if not leaves:
        raise BadParameter("the layer that puts out the logits could not be found; name it with layer=")
    return leaves[-1]
