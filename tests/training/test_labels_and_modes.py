"""Faults of data, labels and modes in small real trainings: found where they are, and not in the healthy twin."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer import FlowTracker
from gradtracer.records import CausalHypothesis, SemanticEvent, Severity
from gradtracer.training.audits.labels import dependence
from tests.families import family


@dataclass
class Outcome:
    """What was said about a run."""

    top: CausalHypothesis
    alarms: list[SemanticEvent]
    codes: list[str]


def train(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    *,
    steps: int = 120,
    rate: float = 1e-2,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
) -> Outcome:
    """Train a model, and ask for the cause."""
    updates = optimizer(model.parameters(), lr=rate)
    with FlowTracker(model, updates, serve=False) as tracker:
        for i in range(steps):
            updates.zero_grad()
            loss = loss_of(i)
            loss.backward()
            updates.step()
            tracker.step(loss=loss.item())
    hypotheses = tracker.explain_failure()
    assert not tracker.broken_reason
    alarms = [e for e in tracker.events if e.severity is not Severity.INFO]
    return Outcome(hypotheses[0], alarms, [h.code for h in hypotheses[:3]])


def table(seed: int, num_classes: int = 4, rows: int = 600, columns: int = 12) -> tuple[Tensor, Tensor]:
    """Rows around a centre for each class."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, num_classes, (rows,), generator=g)
    centres = torch.randn(num_classes, columns, generator=g)
    return centres[y] + 0.7 * torch.randn(rows, columns, generator=g), y


def rows(num_rows: int, batch: int, i: int) -> Tensor:
    return torch.randint(0, num_rows, (batch,), generator=torch.Generator().manual_seed(i))


def classifier(num_outputs: int, columns: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, 24), nn.GELU(), nn.Linear(24, num_outputs))


@pytest.mark.slow
def test_labels_of_other_rows_are_told_from_their_own() -> None:
    x, y = table(0)
    shuffled = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(5))]
    for labels, code in ((shuffled, "label_misalignment"), (y, "healthy")):
        net = classifier(4)

        def loss(i: int, net: nn.Module = net, labels: Tensor = labels) -> Tensor:
            b = rows(600, 48, i)
            return F.cross_entropy(net(x[b]), labels[b])

        found = train(net, loss, steps=80, rate=1e-3)
        assert found.top.code == code
        assert bool(found.alarms) == (code != "healthy")


@pytest.mark.slow
def test_labels_that_are_shuffled_from_some_step_on_are_dated_to_it() -> None:
    x, y = table(1)
    net = classifier(4)

    def loss(i: int) -> Tensor:
        b = rows(600, 64, i)
        g = torch.Generator().manual_seed(i)
        return F.cross_entropy(net(x[b]), y[b][torch.randperm(64, generator=g)] if i >= 70 else y[b])

    found = train(net, loss, steps=400, rate=1e-2)
    misaligned = next(e for e in found.alarms if e.kind == "independent_labels")
    assert misaligned.step >= 70
    assert "label_misalignment" in found.codes


@pytest.mark.parametrize("binary", family([False, True], True))
def test_constant_labels_are_named_and_pairwise_rankings_are_left_alone(binary: bool) -> None:
    x, y = table(2, num_classes=2)
    net = classifier(1 if binary else 3)

    def constant(i: int) -> Tensor:
        b = rows(600, 48, i)
        if binary:
            return F.binary_cross_entropy_with_logits(net(x[b])[:, 0], torch.ones(48))
        return F.cross_entropy(net(x[b]), torch.full((48,), 2))

    found = train(net, constant, steps=80)
    assert (found.top.code, found.top.onset_step) == ("constant_labels", 0)

    scorer = classifier(1)

    def ranking(i: int) -> Tensor:
        b = rows(600, 48, i)
        better, worse = x[b] + y[b][:, None], x[b]
        return F.binary_cross_entropy_with_logits((scorer(better) - scorer(worse))[:, 0], torch.ones(48))

    assert not train(scorer, ranking, steps=80).alarms


@pytest.mark.slow
def test_contrastive_labels_are_constant_by_construction() -> None:
    x, _ = table(3)
    encoder = classifier(8)

    def loss(i: int) -> Tensor:
        b = rows(600, 32, i)
        g = torch.Generator().manual_seed(i)
        one = F.normalize(encoder(x[b]), dim=1)
        other = F.normalize(encoder(x[b] + 0.1 * torch.randn(32, 12, generator=g)), dim=1)
        negatives = other[torch.randperm(32, generator=g)[:8]].T
        scores = torch.cat([(one * other).sum(1, keepdim=True), one @ negatives], 1) / 0.2
        return F.cross_entropy(scores, torch.zeros(32, dtype=torch.long))

    assert not train(encoder, loss, rate=1e-3).alarms


def test_labels_counted_from_one_are_named() -> None:
    x, y = table(4, num_classes=5)
    for shift, code in ((1, "label_misalignment"), (0, "healthy")):
        net = classifier(6)

        def loss(i: int, net: nn.Module = net, shift: int = shift) -> Tensor:
            b = rows(600, 40, i)
            return F.nll_loss(net(x[b]).log_softmax(1), y[b] + shift)

        assert train(net, loss).top.code == code


@pytest.mark.parametrize("batch", [30, 60])
@pytest.mark.slow
def test_sorted_batches_are_named_and_shuffled_ones_are_not(batch: int) -> None:
    x, y = table(5, num_classes=6)
    order = y.argsort(stable=True)
    for is_sorted, code in ((True, "data_order"), (False, "healthy")):
        net = classifier(6)

        def loss(i: int, net: nn.Module = net, is_sorted: bool = is_sorted) -> Tensor:
            first = i * batch % 600
            b = order[first : first + batch] if is_sorted else rows(600, batch, i)
            return F.cross_entropy(net(x[b]), y[b])

        found = train(net, loss, steps=150, rate=0.3, optimizer=torch.optim.SGD)
        assert found.top.code == code


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.slow
def test_a_drowned_class_is_named_and_a_rare_one_that_is_learned_is_not(classes: int) -> None:
    g = torch.Generator().manual_seed(6)
    rare = torch.rand(4000, generator=g) < 0.04
    noise = torch.randn(4000, 8, generator=g)
    for shift, code in ((0.6, "class_imbalance"), (6.0, "healthy")):
        x = noise + shift * rare[:, None] * (torch.arange(8) < 2)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, classes))

        def loss(i: int, net: nn.Module = net, x: Tensor = x) -> Tensor:
            b = rows(4000, 128, i)
            if classes == 1:
                return F.binary_cross_entropy_with_logits(net(x[b])[:, 0], rare[b].float())
            return F.cross_entropy(net(x[b]), rare[b].long() * 2)

        found = train(net, loss, steps=320, rate=1e-2)
        assert found.top.code == code


class Dropping(nn.Module):
    def __init__(self, how: str, faulty: bool) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 4)
        self.how, self.faulty = how, faulty
        self.hidden = [nn.Dropout(0.5)]

    def forward(self, x: Tensor) -> Tensor:
        on = self.training or self.faulty
        h = self.second(self.first(x).relu()).relu()
        if self.how == "function":
            h = F.dropout(h, 0.5, training=on)
        elif self.how == "list" and self.faulty:
            h = self.hidden[0](h)
        elif self.how == "mask" and on:
            h = h * (torch.rand_like(h) > 0.5).float() * 2
        elif self.how == "bernoulli" and on:
            h = h * torch.bernoulli(torch.full_like(h, 0.5)) * 2
        return self.out(h)


@pytest.mark.parametrize("how", family(["function", "list", "mask", "bernoulli"], "mask"))
def test_dropout_that_ignores_evaluation_mode_is_named_with_the_layer_that_feeds_it(how: str) -> None:
    x, y = table(7)
    for faulty in (True, False):
        torch.manual_seed(0)
        net = Dropping(how, faulty)

        def loss(i: int, net: nn.Module = net) -> Tensor:
            b = rows(600, 48, i)
            return F.cross_entropy(net(x[b]), y[b])

        found = train(net, loss, steps=30)
        if faulty:
            assert (found.top.code, found.top.layer) == ("dropout_train_eval", "second")
            assert found.top.source is not None
        else:
            assert not found.alarms


class Sampling(nn.Module):
    """A variational autoencoder: it draws in evaluation too, and is meant to."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 8), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


def test_a_model_that_samples_is_not_called_random_by_mistake() -> None:
    x, _ = table(8)
    torch.manual_seed(0)
    net = Sampling()

    def loss(i: int) -> Tensor:
        out, mean, log_variance = net(x[rows(600, 48, i)])
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return F.mse_loss(out, x[rows(600, 48, i)]) + 0.01 * kl

    assert not train(net, loss, steps=120, rate=1e-3).alarms


@pytest.mark.slow
def test_training_that_goes_on_in_evaluation_mode_is_dated_to_the_validation() -> None:
    x, y = table(9)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4))

    def loss(i: int) -> Tensor:
        if i == 50:
            net.eval()
            net(x[:10])
        b = rows(600, 48, i)
        return F.cross_entropy(net(x[b]), y[b])

    found = train(net, loss, steps=120)
    assert found.top.code == "dropout_train_eval"
    assert found.top.onset_step == 50


@pytest.mark.parametrize("momentum", family([0.002, 0.1], 0.002))
def test_running_statistics_that_lag_are_named_and_default_ones_are_not(momentum: float) -> None:
    g = torch.Generator().manual_seed(10)
    x = torch.randn(400, 1, 8, 8, generator=g) * 3 + 20
    y = (x.mean((1, 2, 3)) > 20).long()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2)
    )

    def loss(i: int) -> Tensor:
        b = rows(400, 32, i)
        return F.cross_entropy(net(x[b]), y[b])

    found = train(net, loss, rate=1e-3)
    if momentum == 0.1:
        assert not found.alarms
    else:
        assert (found.top.code, found.top.layer, found.top.onset_step) == ("batchnorm_train_eval_gap", "1", 0)


class Language(nn.Module):
    """A next-token model around one layer that mixes times."""

    def __init__(self, how: str, leaks: bool) -> None:
        super().__init__()
        self.how, self.leaks = how, leaks
        self.embed = nn.Embedding(11, 16)
        self.mix: nn.Module
        if how == "gru":
            self.mix = nn.GRU(16, 16, batch_first=True, bidirectional=leaks)
        elif how == "conv":
            self.mix = nn.Conv1d(16, 16, 3, padding=1 if leaks else 0)
        else:
            self.mix = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32 if how == "gru" and leaks else 16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        if self.how == "gru":
            h = self.mix(h)[0]
        elif self.how == "conv":
            h = h.transpose(1, 2)
            h = self.mix(h if self.leaks else F.pad(h, (2, 0))).transpose(1, 2)
        else:
            mask = None if self.leaks else nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            h = self.mix(h, src_mask=mask)
        return self.head(h)


@pytest.mark.parametrize("how", family(["gru", "conv", "transformer"], "conv"))
def test_a_language_model_that_looks_ahead_is_named_with_the_layer_that_does(how: str) -> None:
    text = (torch.arange(3000) * 7 + torch.arange(3000) ** 2 // 5) % 11
    for leaks in (True, False):
        torch.manual_seed(0)
        net = Language(how, leaks)

        def loss(i: int, net: nn.Module = net) -> Tensor:
            start = rows(2900, 12, i)
            x = torch.stack([text[s : s + 21] for s in start.tolist()])
            return F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

        found = train(net, loss, steps=25)
        if leaks:
            assert found.top.code == "target_leak"
            assert found.top.layer is not None
            assert found.top.layer.startswith("mix")
        else:
            assert not found.alarms


class SequenceAutoencoder(nn.Module):
    """Looks ahead on purpose, through one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.encoder, self.decoder = nn.GRU(16, 8, batch_first=True), nn.GRU(24, 16, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        code = self.encoder(h)[1][0]
        return self.head(self.decoder(torch.cat([h, code[:, None].expand(-1, h.shape[1], -1)], 2))[0])


@pytest.mark.slow
def test_an_autoencoder_of_sequences_may_look_ahead() -> None:
    text = (torch.arange(3000) * 7 + torch.arange(3000) ** 2 // 5) % 11
    torch.manual_seed(0)
    net = SequenceAutoencoder()

    def loss(i: int) -> Tensor:
        x = torch.stack([text[s : s + 21] for s in rows(2900, 12, i).tolist()])
        return F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    assert not train(net, loss, steps=25).alarms


@pytest.mark.slow
def test_the_target_among_the_features_is_named() -> None:
    g = torch.Generator().manual_seed(11)
    x = torch.randn(500, 6, generator=g)
    y = x[:, :3].sum(1) + 0.3 * torch.randn(500, generator=g)
    leaked = torch.cat([x, 3 * y[:, None] + 1], 1)
    for features, code in ((leaked, "target_leak"), (torch.cat([x, y.flip(0)[:, None]], 1), "healthy")):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1))

        def loss(i: int, net: nn.Module = net, features: Tensor = features) -> Tensor:
            b = rows(500, 32, i)
            return F.mse_loss(net(features[b])[:, 0], y[b])

        assert train(net, loss, steps=60).top.code == code


@pytest.mark.parametrize("scale", [300.0, 1.0])
@pytest.mark.slow
def test_inputs_in_raw_units_that_blow_up_the_first_steps_are_named(scale: float) -> None:
    g = torch.Generator().manual_seed(12)
    x = torch.randn(500, 6, generator=g)
    y = x[:, 0] - x[:, 1]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(i: int) -> Tensor:
        b = rows(500, 32, i)
        return F.mse_loss(net(scale * x[b])[:, 0], y[b])

    found = train(net, loss, steps=100, rate=5e-3, optimizer=torch.optim.SGD)
    if scale == 1.0:
        assert not found.alarms
    else:
        assert found.top.code == "input_scale"


@pytest.mark.parametrize("kept", family(["loss", "hidden", None], "loss"))
def test_graphs_that_nobody_lets_go_are_named(kept: str | None) -> None:
    x, y = table(13)
    net = classifier(4)
    total: list[Tensor] = []

    def loss(i: int) -> Tensor:
        b = rows(600, 48, i)
        scores = net(x[b])
        value = F.cross_entropy(scores, y[b])
        if kept == "loss":
            total[:] = [total[0] + value if total else value]
        elif kept == "hidden":
            total.append(scores)
        else:
            total.append(scores.detach())
        return value

    found = train(net, loss, steps=130)
    assert found.top.code == ("memory_growth" if kept else "healthy")


@pytest.mark.slow
@pytest.mark.parametrize("wait_s", [0.02, 0.0])
def test_steps_that_wait_for_data_are_named(wait_s: float) -> None:
    x, y = table(14)
    net = classifier(4)

    def loss(i: int) -> Tensor:
        time.sleep(wait_s)  # stands for a slow loader
        b = rows(600, 48, i)
        return F.cross_entropy(net(x[b]), y[b])

    found = train(net, loss, steps=101)
    assert found.top.code == ("data_starvation" if wait_s else "healthy")


def test_one_huge_channel_is_told_without_an_alarm() -> None:
    x, y = table(15)
    net = classifier(4)
    with torch.no_grad():
        net[0].weight[3] *= 300  # type: ignore[index]
        x = x / 300

    def loss(i: int) -> Tensor:
        b = rows(600, 48, i)
        return F.cross_entropy(net(x[b]), y[b])

    found = train(net, loss, steps=60, rate=1e-3)
    assert not found.alarms
    assert "quantization_range" in found.codes


def test_dependence_is_the_mean_correlation_ratio_over_its_expectation_under_permutation() -> None:
    g = torch.Generator().manual_seed(16)
    features, groups = torch.randn(40, 5, generator=g), torch.randint(0, 4, (40,), generator=g)
    features[:, 0] += groups

    def slow(labels: Tensor) -> float:
        shares = []
        for column in features.double().T:
            total = sum((v - column.mean()) ** 2 for v in column)
            means = [column[labels == c].mean() for c in labels.tolist()]
            shares.append(float(sum((m - column.mean()) ** 2 for m in means) / total))
        return sum(shares) / len(shares) / (3 / 39)

    assert float(dependence(features, groups, 4)) == pytest.approx(slow(groups), rel=1e-9)
    shuffled = [float(dependence(features, groups[torch.randperm(40, generator=g)], 4)) for _ in range(400)]
    assert sum(shuffled) / 400 == pytest.approx(1.0, abs=0.1)
