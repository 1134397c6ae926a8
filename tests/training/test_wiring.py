"""Faults of graph, wiring, shapes and axes, each with programs of the same kind that are healthy."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer import FlowTracker
from gradtracer.records import CausalHypothesis
from tests.families import family

torch.set_num_threads(1)

X = torch.randn(512, 20, generator=torch.Generator().manual_seed(1))
W = torch.randn(20, 4, generator=torch.Generator().manual_seed(2))
Y = (X @ W).argmax(1)
Step = Callable[[int], Tensor]


def _batch(step: int) -> tuple[Tensor, Tensor]:
    chosen = torch.randint(0, 512, (32,), generator=torch.Generator().manual_seed(step))
    return X[chosen], Y[chosen]


def _score(x: Tensor) -> Tensor:
    return (x @ W)[:, 0]


def _ask(
    model: nn.Module, loss_of: Step, parameters: list[nn.Parameter] | None = None, steps: int = 60
) -> tuple[CausalHypothesis, list[str]]:
    optimizer = torch.optim.Adam(parameters or list(model.parameters()), 1e-2)
    with FlowTracker(model, optimizer, serve=False) as tracker:
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(step)
            loss.backward()
            optimizer.step()
            tracker.step(loss=loss.item())
    assert not tracker.broken_reason
    return tracker.explain_failure()[0], [e.to_state for e in tracker.events if e.severity.value != "info"]


class Parts(nn.Module):
    def __init__(self, cut: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 4)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cut(self.encoder(x)))


def _classify(model: nn.Module) -> Step:
    return lambda step: F.cross_entropy(model(_batch(step)[0]), _batch(step)[1])


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(torch.detach, id="detach"),
        pytest.param(lambda h: torch.tanh(h).detach(), id="behind a function", marks=pytest.mark.slow),
        pytest.param(lambda h: torch.tensor(h.tolist()), id="built anew", marks=pytest.mark.slow),
    ],
)
def test_a_part_that_no_loss_reaches_is_named(cut: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Parts(cut)
    first, _ = _ask(model, _classify(model))
    assert (first.code, first.layer, first.onset_step) == ("detached_graph", "encoder", 0)


def test_a_part_that_runs_without_gradients_is_named() -> None:
    torch.manual_seed(0)
    model = Parts()

    def loss_of(step: int) -> Tensor:
        x, y = _batch(step)
        with torch.no_grad():
            h = model.encoder(x)
        return F.cross_entropy(model.head(h), y)

    first, _ = _ask(model, loss_of)
    assert (first.code, first.layer) == ("detached_graph", "encoder")


@pytest.mark.slow
def test_a_pretrained_part_that_is_cut_off_is_no_alarm() -> None:
    torch.manual_seed(0)
    model = Parts()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(300):
        optimizer.zero_grad()
        _classify(model)(step).backward()
        optimizer.step()
    model.cut = torch.detach
    model.head.reset_parameters()
    first, alarms = _ask(model, _classify(model))
    assert (first.code, alarms) == ("healthy", [])


@pytest.mark.slow
def test_an_output_that_nobody_uses_is_no_alarm() -> None:
    torch.manual_seed(0)

    class Pooled(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.pooler = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.encoder(x)
            self.pooler(h)
            return self.head(h)

    model = Pooled()
    assert _ask(model, _classify(model))[1] == []


@pytest.mark.slow
def test_a_target_network_that_is_written_by_hand_is_no_alarm() -> None:
    torch.manual_seed(0)
    online = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
    model = nn.ModuleDict({"online": online, "target": copy.deepcopy(online).requires_grad_(False)})

    def loss_of(step: int) -> Tensor:
        x, y = _batch(step)
        wanted = torch.randn(32, generator=torch.Generator().manual_seed(step)) + 0.9 * model["target"](x).amax(1)
        return F.smooth_l1_loss(model["online"](x)[torch.arange(32), y], wanted)

    first, alarms = _ask(model, loss_of, steps=80)
    assert (first.code, alarms) == ("healthy", [])


class Kept(nn.Module):
    def __init__(self, kept: object) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 16), nn.Linear(16, 4)
        self.hidden = kept

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden
        h = torch.relu(self.first(x))
        if isinstance(hidden, Tensor):
            return self.last(h @ hidden)
        inner = next(iter(hidden.values())) if isinstance(hidden, dict) else hidden[0]  # type: ignore[index]
        return self.last(inner(h))


@pytest.mark.parametrize("how", family(["list", "dict", "tensor"], "list"))
def test_layers_that_the_model_does_not_know_are_named_by_their_attribute(how: str) -> None:
    torch.manual_seed(0)
    kept = {
        "list": [nn.Linear(16, 16)],
        "dict": {"a": nn.Linear(16, 16)},
        "tensor": (0.2 * torch.randn(16, 16)).requires_grad_(),
    }[how]
    model = Kept(kept)
    first, _ = _ask(model, _classify(model))
    assert (first.code, first.layer) == ("unregistered_module", "hidden")
    assert first.source is not None
    assert first.source.file == __file__


@pytest.mark.slow
def test_layers_that_are_registered_or_held_by_the_optimizer_are_no_alarm() -> None:
    torch.manual_seed(0)
    model = Kept(nn.ModuleList([nn.Linear(16, 16)]))
    assert _ask(model, _classify(model))[1] == []
    hidden = nn.Linear(16, 16)
    model = Kept([hidden])
    assert _ask(model, _classify(model), [*model.parameters(), *hidden.parameters()])[1] == []


@pytest.mark.slow
def test_random_layers_frozen_between_trained_ones_are_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    model[2].requires_grad_(False)
    first, _ = _ask(model, _classify(model))
    assert (first.code, first.layer) == ("frozen_layers", "2")


@pytest.mark.slow
def test_a_frozen_output_layer_behind_which_the_loss_stalls_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 10))
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)

    def loss_of(step: int) -> Tensor:
        return F.cross_entropy(model(_batch(step)[0]), _batch(step)[0][:, :10].argmax(1))

    optimizer_holds = [p for p in model.parameters() if p.requires_grad]
    for p in optimizer_holds:
        p.register_hook(lambda g: g * 1e-3)
    with torch.no_grad():
        model[3].weight.mul_(0.01)
    first, _ = _ask(model, loss_of, optimizer_holds, steps=80)
    assert (first.code, first.layer) == ("frozen_layers", "0")


def test_random_features_and_pretrained_layers_that_are_frozen_are_no_alarm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 4))
    model[0].requires_grad_(False)
    assert _ask(model, _classify(model), [p for p in model.parameters() if p.requires_grad])[1] == []


def _mlp(
    loss_of: Callable[[Tensor, Tensor, Tensor], Tensor], out: int, last: nn.Module | None
) -> tuple[str, list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, out), *([last] if last else []))
    first, alarms = _ask(model, lambda step: loss_of(model(_batch(step)[0]), *_batch(step)))
    return first.code, alarms


LOSSES: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor], int, nn.Module | None]] = {
    "sigmoid into cross_entropy": (
        "loss_activation_mismatch", lambda z, x, y: F.cross_entropy(torch.sigmoid(z), y), 4, None
    ),
    "sigmoid into bce_with_logits": (
        "loss_activation_mismatch",
        lambda z, x, y: F.binary_cross_entropy_with_logits(z.squeeze(1), (_score(x) > 0).float()), 1, nn.Sigmoid(),
    ),
    "scores into nll": ("loss_activation_mismatch", lambda z, x, y: F.nll_loss(z, y), 4, None),
    "softmax into nll": ("loss_activation_mismatch", lambda z, x, y: F.nll_loss(z, y), 4, nn.Softmax(1)),
    "scores into kl_div": (
        "loss_activation_mismatch", lambda z, x, y: F.kl_div(z, (x @ W).softmax(1), reduction="sum"), 4, None
    ),
    "sigmoid for unbounded targets": (
        "loss_activation_mismatch", lambda z, x, y: F.mse_loss(z[:, 0], 3 * _score(x)), 1, nn.Sigmoid()
    ),
    "mask in 0 and 255": (
        "target_range",
        lambda z, x, y: F.binary_cross_entropy_with_logits(z[:, 0], 255 * (_score(x) > 0).float()), 1, None,
    ),
    "counts below 0": ("target_range", lambda z, x, y: F.poisson_nll_loss(z[:, 0], _score(x)), 1, None),
    "classes 0 and 1 in a soft margin": (
        "target_range", lambda z, x, y: F.soft_margin_loss(z[:, 0], (_score(x) > 0).float()), 1, None
    ),
    "absolute difference of a column and a row": (
        "shape_broadcast", lambda z, x, y: (z - _score(x)).abs().mean(), 1, None
    ),
    "weights in a column": (
        "shape_broadcast", lambda z, x, y: (F.cross_entropy(z, y, reduction="none") * torch.ones(32, 1)).mean(), 4, None
    ),
    "softmax over the batch": (
        "wrong_dimension", lambda z, x, y: F.nll_loss(torch.log(z + 1e-9), y), 4, nn.Softmax(0)
    ),
    "log_softmax over the batch": ("wrong_dimension", lambda z, x, y: F.nll_loss(F.log_softmax(z, 0), y), 4, None),
    "nll of log_softmax": ("healthy", lambda z, x, y: F.nll_loss(z, y), 4, nn.LogSoftmax(1)),
    "kl_div of log_softmax": (
        "healthy", lambda z, x, y: F.kl_div(z.log_softmax(1), (x @ W).softmax(1), reduction="batchmean"), 4, None
    ),
    "soft labels": ("healthy", lambda z, x, y: F.cross_entropy(z, (x @ W).softmax(1)), 4, None),
    "squared error of probabilities": (
        "healthy", lambda z, x, y: F.mse_loss(z, F.one_hot(y, 4).float()), 4, nn.Softmax(1)
    ),
    "noisy labels of a discriminator": (
        "healthy",
        lambda z, x, y: F.binary_cross_entropy_with_logits(z[:, 0], 1.1 * (_score(x) > 0).float()), 1, None,
    ),
    "pairwise ranking": (
        "healthy",
        lambda z, x, y: F.softplus(-(z - z.t()) * torch.sign(_score(x)[:, None] - _score(x)[None])).mean(), 1, None,
    ),
    "quantiles": (
        "healthy",
        lambda z, x, y: torch.maximum(0.1 * (_score(x)[:, None] - z), -0.9 * (_score(x)[:, None] - z)).mean(), 3, None,
    ),
    "contrastive": (
        "healthy",
        lambda z, x, y: F.cross_entropy((F.normalize(z) @ F.normalize(x @ W).t()).t() / 0.1, torch.arange(32)), 4, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    family(LOSSES, "softmax into nll", "softmax over the batch", "soft labels"),
)
def test_a_loss_that_does_not_fit_is_named_and_one_that_does_is_not(name: str) -> None:
    code, loss_of, out, last = LOSSES[name]
    found, alarms = _mlp(loss_of, out, last)
    assert found == code
    assert code != "healthy" or alarms == []


class Tokens(nn.Module):
    def __init__(self, kind: str, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(12, 16), nn.Linear(16, 4)
        self.body: nn.Module = (
            nn.GRU(16, 16, batch_first=batch_first)
            if kind == "recurrent"
            else nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first, dropout=0.0)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.body(self.embed(tokens))
        return self.out((h[0] if isinstance(h, tuple) else h).mean(1))


@pytest.mark.parametrize("kind", ["recurrent", "attention"])
@pytest.mark.slow
def test_a_module_that_takes_the_batch_for_time_is_named(kind: str) -> None:
    tokens = torch.randint(0, 12, (400, 7), generator=torch.Generator().manual_seed(5))

    def ask(batch_first: bool) -> tuple[CausalHypothesis, list[str]]:
        torch.manual_seed(0)
        model = Tokens(kind, batch_first)

        def loss_of(step: int) -> Tensor:
            chosen = torch.randint(0, 400, (24,), generator=torch.Generator().manual_seed(step))
            return F.cross_entropy(model(tokens[chosen]), tokens[chosen][:, 2] % 4)

        return _ask(model, loss_of)

    first, _ = ask(False)
    assert (first.code, (first.layer or "").startswith("body")) == ("wrong_dimension", True)
    assert ask(True)[1] == []


@pytest.mark.slow
def test_time_first_is_right_where_the_data_are_time_first() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(12, 16), "body": nn.LSTM(16, 16), "out": nn.Linear(16, 12)})

    def loss_of(step: int) -> Tensor:
        start = torch.randint(0, 12, (1, 24), generator=torch.Generator().manual_seed(step))
        tokens = (torch.arange(9)[:, None] + start) % 12
        scores = model["out"](model["body"](model["embed"](tokens[:-1]))[0])
        return F.cross_entropy(scores.reshape(-1, 12), tokens[1:].reshape(-1))

    assert _ask(model, loss_of)[1] == []
