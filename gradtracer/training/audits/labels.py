"""What the labels are, batch by batch, and whether what the model puts out depends on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradtracer.records import AuditFinding
from gradtracer.training.audits.base import AUDITS, INPUT, LOSS, Audit, AuditContext
from gradtracer.training.graph import LossGraph
from gradtracer.training.targets import LossTerm, loss_terms, rows_of

_MAX_SCORES = 64
"""Scores that are compared with the labels: a mean over 64 of a vocabulary says what one over all of it does."""
_MAX_ROWS, _MAX_COLUMNS, _MAX_CLASSES = 1024, 1024, 100_000
_BLOCK = 12


@AUDITS.register
class Labels(Audit):
    """Counts of the labels, and their dependence on inputs and outputs.

    What:
        The targets that the loss was given, read from its graph: how often each class came, how alike the labels of one
        batch are, whether the outputs (and inputs) of rows with different labels differ, and how many rows of rare
        classes the model finds.

    Why:
        Labels that are constant, sorted, numbered from one, or that belong to other inputs leave no trace in a
        gradient; they do in these counts.

    Definition:
        With ``n_c`` the counts of a step, ``N`` their sum, and ``P_c`` the shares over all sampled steps:
        ``label_entropy = -sum P_c log P_c`` nats; ``label_collision = sum n_c (n_c - 1) / (N (N - 1))``, the
        chance that two rows of a step have one label, and ``label_collision_pooled = sum P_c^2``;
        ``label_dependence = mean_f R^2_f / ((k - 1) / (N - 1))``, the share of a feature's variance that lies between
        the ``k`` classes of the batch, over its expectation when labels are dealt to rows at random (exact for any
        features, Kendall and Stuart; 1 means independent). Features are the outputs, and, under `(input)`, the columns
        or pixels of the model's input. ``label_dependence_best = max_f sum_t (R^2_f - E) / (sd sqrt(n))`` over the last
        12 to 24 sampled steps, with mean and deviation of Beta((k-1)/2, (N-k)/2). For values in place of classes:
        variance of the targets of a step and of all, and ``R^2 (N - 1)`` of prediction and target.

    Thresholds:
        None here; 4096 rows and 1024 columns of a batch are read.

    Fixes:
        None; see the causes that read these signals.

    References:
        Fisher 1925, Statistical Methods for Research Workers, chapter VII (intraclass correlation). Wright 1951, Annals
        of Eugenics 15 (F statistics).
    """

    code = "labels"
    reads_parts = True

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._step_counts: Tensor | None = None
        self._values: list[Tensor] = []
        self._moments: Tensor | None = None
        self._rows = 0
        self._input: Tensor | None = None
        self._has_two_values: bool | None = None
        self._per_row = self._first_counts = True
        self._excess: Tensor | None = None
        self._num_excess = 0

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """Note the number of rows, and the input."""
        if module is context.model or self._rows == 0:
            tensors = [x for x in inputs if isinstance(x, Tensor) and x.dim() > 0]
            if tensors:
                first = tensors[0]
                self._rows = first.shape[0]
                # Columns of tables and pixels; a sequence may hide its label in the interplay of two of its steps.
                is_table = len(tensors) == 1 and first.dim() in (2, 4) and first.is_floating_point()
                if is_table and self._has_two_values is None:
                    # Of bits the label may be an interplay that no column shows (a parity): nothing is read of them.
                    self._has_two_values = bool(((first == first.min()) | (first == first.max())).all())
                is_table &= not self._has_two_values
                self._input = first.detach() if is_table and module is context.model else None
        return ()

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Count the labels of each loss term."""
        if not context.sampled:
            return ()
        for term in loss_terms(graph):
            prediction, target = rows_of(term)
            if prediction.shape[0] != target.shape[0] or target.shape[0] < 2:
                continue
            self._per_row &= target.shape[0] == self._rows
            if target.shape[0] > _MAX_ROWS:
                stride = -(-target.shape[0] // _MAX_ROWS)
                prediction, target = prediction[::stride], target[::stride]
            if term.kind == "values":
                self._read_values(context, term, prediction, target)
            elif term.num_outputs <= _MAX_CLASSES:
                self._read_classes(context, graph, term, prediction, target)
        return ()

    def on_step_end(self, context: AuditContext) -> Iterable[AuditFinding]:
        """Record the step, over all its backward calls: a loop may give a discriminator true and false apart."""
        if self._step_counts is not None:
            self._record_counts(context, self._step_counts)
        if self._values and self._per_row:
            self._record_values(context, torch.cat(self._values))
        self._rows, self._input, self._step_counts, self._per_row = 0, None, None, True
        self._values = []
        return ()

    def _read_classes(
        self, context: AuditContext, graph: LossGraph, term: LossTerm, prediction: Tensor, target: Tensor
    ) -> None:
        num_classes = term.num_outputs
        valid = (target >= 0) & (target < num_classes) & (target != term.ignore_index)
        bucket = torch.where(valid, target, num_classes)
        counts = torch.zeros(num_classes + 1, dtype=torch.float64, device=target.device)
        counts.scatter_add_(0, bucket, torch.ones_like(bucket, dtype=torch.float64))
        counts = counts[:num_classes]
        if self._step_counts is not None and self._step_counts.shape == counts.shape:
            counts = counts + self._step_counts
        self._step_counts = counts
        self._first_counts &= term.ignore_index != 0
        context.record(LOSS, "label_is_free", float(_has_own_bias(graph, term)))
        context.record(LOSS, "labels_per_row", target.shape[0] / self._rows if self._rows else 0.0)
        if term.weights:
            spread = torch.stack([w.detach().double().amax().clamp_min(1.0) for w in term.weights])
            lowest = torch.stack([w.detach().double().amin().clamp_max(1.0) for w in term.weights])
            context.record(LOSS, "label_weight_spread", spread.amax() / lowest.amin().clamp_min(1e-12))
        if not term.is_objective:
            return
        loss = _mean_loss(term, prediction, target, valid)
        if loss is not None:
            context.record(LOSS, "label_loss", loss)
        scores = prediction[:, :: -(-prediction.shape[1] // _MAX_SCORES)]
        context.record(LOSS, "label_dependence", dependence(scores, bucket, num_classes))
        columns = self._columns(len(target))
        if columns is not None:
            shares = between_shares(columns, bucket, num_classes)
            context.record(INPUT, "label_dependence", _over_chance(*shares))
            self._take_features(context, *shares)
        if self._per_row:
            self._read_rare(context, term, prediction, target, valid)

    def _read_rare(
        self, context: AuditContext, term: LossTerm, prediction: Tensor, target: Tensor, valid: Tensor
    ) -> None:
        known = self._counts if self._counts is not None else self._step_counts
        assert known is not None
        if term.kind == "classes":
            chosen = prediction.argmax(dim=1)
        else:
            middle = 0.5 if term.node.name() == "BinaryCrossEntropyBackward0" else 0.0
            chosen = (prediction[:, 0] > middle).long()
        if known.shape[0] <= int(term.num_outputs) - 1:
            return
        rare = (target != known.argmax()) & valid
        context.record(LOSS, "num_rare_labels", rare.sum())
        context.record(LOSS, "num_rare_labels_found", (rare & (chosen == target)).sum())

    def _columns(self, num_rows: int) -> Tensor | None:
        if self._input is None or self._input.shape[0] != num_rows:
            return None
        columns = self._input.reshape(num_rows, -1)
        return columns[:, :: -(-columns.shape[1] // _MAX_COLUMNS)]

    def _take_features(
        self, context: AuditContext, shares: Tensor, told: Tensor, present: Tensor, number: Tensor
    ) -> None:
        """The most telling feature over the last steps, in standard deviations of chance."""
        # Of groups dealt at random a share is Beta((k-1)/2, (N-k)/2), for normal features.
        a, b = (present - 1) / 2, (number - present) / 2
        expected = a / (a + b)
        deviation = (a * b / ((a + b).square() * (a + b + 1))).sqrt()
        usable = (present > 1) & (2 * present <= number)
        excess = torch.where(told & usable, (shares - expected) / deviation.clamp_min(1e-12), 0.0)
        if self._excess is None or self._excess.shape != excess.shape or self._num_excess == 2 * _BLOCK:
            self._excess, self._num_excess = torch.zeros_like(excess), 0
        self._excess = self._excess + excess
        self._num_excess += 1
        if self._num_excess >= _BLOCK:
            context.record(INPUT, "label_dependence_best", self._excess.amax() / self._num_excess**0.5)

    def _record_counts(self, context: AuditContext, counts: Tensor) -> None:
        pooled = counts if self._counts is None or self._counts.shape != counts.shape else self._counts + counts
        self._counts = pooled
        total = pooled.sum().clamp_min(1.0)
        shares = pooled / total
        context.record(LOSS, "label_entropy", -torch.special.xlogy(shares, shares).sum())
        context.record(LOSS, "num_labels", pooled.sum())
        context.record(LOSS, "num_label_outputs", float(len(pooled)))
        context.record(LOSS, "num_label_classes", (pooled > 0).sum())
        context.record(LOSS, "label_top_share", shares.max())
        if self._first_counts:
            context.record(LOSS, "label_first_share", shares[0])
            context.record(LOSS, "label_least_count", pooled[1:].min())
        if self._per_row:
            number = counts.sum()
            context.record(
                LOSS, "label_collision", (counts * (counts - 1)).sum() / (number * (number - 1)).clamp_min(1.0)
            )
            context.record(LOSS, "label_collision_pooled", shares.square().sum())
            context.record(LOSS, "label_top_class", counts.argmax())

    def _read_values(self, context: AuditContext, term: LossTerm, prediction: Tensor, target: Tensor) -> None:
        if not term.is_objective:
            return
        target = target.double()
        self._values.append(target)
        centred = target - target.mean()
        moved = prediction[:, 0].double() - prediction[:, 0].double().mean()
        context.record(LOSS, "label_loss", (prediction[:, 0].double() - target).square().mean())
        columns = self._columns(len(target))
        if columns is not None and self._per_row:
            columns = columns.double() - columns.double().mean(0)
            squares = columns.square().sum(0)
            shares = (centred @ columns).square() / (squares * centred.square().sum()).clamp_min(1e-300)
            told = squares > 0
            context.record(INPUT, "value_dependence", shares.sum() / told.sum().clamp_min(1) * (len(target) - 1))
            self._take_features(context, shares, told, torch.full((), 2.0), torch.full((), float(len(target))))
        scale = (centred.square().sum() * moved.square().sum()).clamp_min(1e-300)
        context.record(LOSS, "value_dependence", (centred @ moved).square() / scale * (len(target) - 1))

    def _record_values(self, context: AuditContext, target: Tensor) -> None:
        now = torch.stack([torch.ones_like(target).sum(), target.sum(), target.square().sum()])
        self._moments = now if self._moments is None else self._moments + now
        mean = self._moments[1] / self._moments[0]
        context.record(LOSS, "target_variance", target.var(unbiased=True))
        context.record(LOSS, "target_variance_pooled", (self._moments[2] / self._moments[0] - mean * mean).clamp_min(0))


def between_shares(features: Tensor, groups: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Share of each feature's variance that lies between groups (R^2, the correlation ratio).

    Args:
        features: `[rows, features]`.
        groups: `[rows]` integers below `num_groups`; rows with others are left out.
        num_groups: How many groups there are.

    Returns:
        The shares `[features]`, which features vary `[features]`, and, as scalars, how many groups are present and how
        many rows count.
    """
    kept = (groups >= 0) & (groups < num_groups)
    weight = kept.double()
    number = weight.sum()
    values = torch.where(kept[:, None], features.double(), 0.0)
    values = (values - values.sum(0) / number.clamp_min(1.0)) * weight[:, None]
    index = torch.where(kept, groups, num_groups)
    sums = torch.zeros(num_groups + 1, values.shape[1], dtype=torch.float64, device=values.device)
    sums.index_add_(0, index, values)
    counts = torch.zeros(num_groups + 1, dtype=torch.float64, device=values.device).index_add_(0, index, weight)
    between = (sums.square() / counts.clamp_min(1.0)[:, None])[:num_groups].sum(0)
    total = values.square().sum(0)
    # Below the resolution of the features' own type a variance is rounding.
    floor = (features.double().abs().amax(0) * 1e-5).square() * number
    told = total > floor
    shares = torch.where(told, between / total.clamp_min(1e-300), 0.0)
    return shares, told, (counts[:num_groups] > 0).sum().double(), number


def dependence(features: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Mean share of the features' variance between groups, over its expectation for groups dealt at random.

    Args:
        features: `[rows, features]`.
        groups: `[rows]` integers below `num_groups`; rows with others are left out.
        num_groups: How many groups there are.

    Returns:
        Scalar on the device; 1 in expectation for independent groups, -1 where a batch cannot tell.
    """
    return _over_chance(*between_shares(features, groups, num_groups))


def _over_chance(shares: Tensor, told: Tensor, present: Tensor, number: Tensor) -> Tensor:
    share = shares.sum() / told.sum().clamp_min(1)
    expected = (present - 1) / (number - 1).clamp_min(1.0)
    usable = (present > 1) & (2 * present <= number) & told.any() & torch.isfinite(share)
    return torch.where(usable, share / expected.clamp_min(1e-12), -1.0)


def _mean_loss(term: LossTerm, prediction: Tensor, target: Tensor, valid: Tensor) -> Tensor | None:
    """Mean negative log-likelihood of a label, without weights, whatever the loss makes of it; None for a margin."""
    name = term.node.name()
    if name == "BinaryCrossEntropyWithLogitsBackward0":
        logits = prediction[:, 0].double()
        return torch.nn.functional.softplus(torch.where(target > 0, -logits, logits)).mean()
    if name == "BinaryCrossEntropyBackward0":
        p = prediction[:, 0].double()
        return -torch.where(target > 0, p, 1 - p).clamp_min(1e-43).log().mean()
    if not name.startswith("NllLoss"):
        return None
    chosen = prediction.gather(1, torch.where(valid, target, 0)[:, None])[:, 0].double()
    return -torch.where(valid, chosen, 0.0).sum() / valid.sum().clamp_min(1)


def _has_own_bias(graph: LossGraph, term: LossTerm) -> bool:
    """Whether a layer's own parameters make each class's score, so that a constant answer can be learned.

    Scores that are similarities between two embeddings (contrastive losses, pairwise rankings) have no such layer, and
    their labels are constant by construction.
    """
    node = term.node.next_functions[0][0] if term.node.next_functions else None
    for _ in range(8):
        if node is None:
            return False
        if graph.own_layer(node) is not None:
            return True
        parents = [n for n, _ in node.next_functions if n is not None]
        if len(parents) != 1:
            return False
        node = parents[0]
    return False
