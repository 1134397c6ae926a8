"""Small real training runs, healthy but odd, and faulty with a known root. Seeded; each takes a second or two."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn


@dataclass
class Program:
    """A training program: `step(i)` does one whole step and returns its loss."""

    model: nn.Module
    step: Callable[[int], float]
    num_steps: int


Build = Callable[[int], Program]


def _digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(np.asarray(data.data), dtype=torch.float32) / 16, torch.tensor(np.asarray(data.target))


def _rows(num_rows: int, batch: int, seed: int, i: int) -> Tensor:
    return torch.randint(0, num_rows, (batch,), generator=torch.Generator().manual_seed(1_000_003 * seed + i))


def _mlp(sizes: list[int], activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(before, after))
        if i < len(sizes) - 2:
            layers.append(activation())
    return nn.Sequential(*layers)


def _loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], Tensor],
    num_steps: int,
    *,
    before: Callable[[int], None] | None = None,
    after: Callable[[int], None] | None = None,
    clip: float | None = None,
) -> Program:
    def step(i: int) -> float:
        if before:
            before(i)
        optimizer.zero_grad()
        value = loss(i)
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if after:
            after(i)
        return float(value.detach())

    return Program(model, step, num_steps)


def _classifier(
    seed: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_steps: int = 200,
    batch: int = 64,
    **kwargs: object,
) -> Program:
    x, y = _digits()

    def loss(i: int) -> Tensor:
        rows = _rows(len(x), batch, seed, i)
        return F.cross_entropy(model(x[rows]), y[rows])

    return _loop(model, optimizer, loss, num_steps, **kwargs)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- healthy


def mlp(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _mlp([64, 64, 64, 10])
    return _classifier(seed, model, torch.optim.Adam(model.parameters(), 3e-3))


def mlp_sgd(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _mlp([64, 64, 64, 10])
    return _classifier(seed, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


class _Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x.view(-1, 1, 8, 8))))
        x = F.relu(self.norm2(self.conv2(x))).mean((2, 3))
        return self.head(self.drop(x))


def cnn(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _Cnn()
    return _classifier(seed, model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4))


class _Transformer(nn.Module):
    def __init__(self, vocabulary: int = 16, width: int = 32, length: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.1)
        block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens) + self.position))[:, -1])


def transformer(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def loss(i: int) -> Tensor:
        tokens = torch.randint(0, 16, (64, 12), generator=torch.Generator().manual_seed(7_919 * seed + i))
        return F.cross_entropy(model(tokens), tokens[:, -2])

    return _loop(model, optimizer, loss, 150)


def transformer_warm_up(seed: int) -> Program:
    program = transformer(seed)
    optimizer = torch.optim.Adam(program.model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 100))

    def loss(i: int) -> Tensor:
        tokens = torch.randint(0, 16, (64, 12), generator=torch.Generator().manual_seed(7_919 * seed + i))
        return F.cross_entropy(program.model(tokens), tokens[:, -2])

    return _loop(program.model, optimizer, loss, 150, after=lambda i: schedule.step())


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(4, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def _sequences(seed: int, i: int, length: int = 20) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, length, 4, generator=torch.Generator().manual_seed(104_729 * seed + i))
    return x, (x[:, -5:, 0].sum(1) > 0).long()


def lstm(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _Recurrent(nn.LSTM)

    def loss(i: int) -> Tensor:
        x, y = _sequences(seed, i)
        return F.cross_entropy(model(x), y)

    return _loop(model, torch.optim.Adam(model.parameters(), 1e-2), loss, 150)


def sum_reduced_loss(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _mlp([64, 64, 10])
    x, y = _digits()

    def loss(i: int) -> Tensor:
        rows = _rows(len(x), 256, seed, i)
        return F.cross_entropy(model(x[rows]), y[rows], reduction="sum")

    return _loop(model, torch.optim.Adam(model.parameters(), 3e-3), loss, 200)


def unscaled_regression(seed: int) -> Program:
    """Targets in the thousands: loss and gradients in the millions."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1000, 16, generator=generator)
    y = 3000 + 2000 * torch.tanh(x @ torch.randn(16, 1, generator=generator) / 2)
    model = _mlp([16, 64, 64, 1])

    def loss(i: int) -> Tensor:
        rows = _rows(len(x), 64, seed, i)
        return F.mse_loss(model(x[rows]), y[rows])

    return _loop(model, torch.optim.Adam(model.parameters(), 3e-2), loss, 200)


def batches_of_two(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _mlp([64, 64, 10])
    return _classifier(seed, model, torch.optim.SGD(model.parameters(), 0.02), 1500, batch=2)


def warm_restarts(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _mlp([64, 64, 10])
    optimizer = torch.optim.SGD(model.parameters(), 0.8)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 60)
    return _classifier(seed, model, optimizer, 300, after=lambda i: schedule.step())


def plateau_then_drop(seed: int) -> Program:
    """A parity of three bits: nothing to be seen for a hundred steps and more, then it falls."""
    torch.manual_seed(seed)
    model = _mlp([12, 128, 1])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(i: int) -> Tensor:
        bits = torch.randint(0, 2, (128, 12), generator=torch.Generator().manual_seed(15_485_863 * seed + i)).float()
        return F.binary_cross_entropy_with_logits(model(2 * bits - 1)[:, 0], bits[:, :3].sum(1) % 2)

    return _loop(model, optimizer, loss, 500)


def frozen_on_purpose(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _mlp([64, 128, 64, 10])
    model[0].requires_grad_(False)
    return _classifier(seed, model, torch.optim.Adam(model[2:].parameters(), 5e-3))


def rare_embeddings(seed: int) -> Program:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"user": nn.Embedding(300, 16), "item": nn.Embedding(500, 16)})
    for table in model.parameters():
        nn.init.normal_(table, std=0.1)

    def loss(i: int) -> Tensor:
        user, other, pick = (_rows(n, 16, seed + k, i) for k, n in enumerate((300, 500, 50)))
        item = 10 * pick + user % 10  # Users like every tenth item.
        vectors = model["user"](user)
        return -F.logsigmoid((vectors * (model["item"](item) - model["item"](other))).sum(1)).mean()

    return _loop(model, torch.optim.Adam(model.parameters(), 0.02), loss, 300)


def negative_loss(seed: int) -> Program:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(600, 3, generator=generator)
    y = 0.5 * x[:, 0] + 0.05 * torch.randn(600, generator=generator)
    model = _mlp([3, 32, 2], nn.Tanh)

    def loss(i: int) -> Tensor:
        rows = _rows(len(x), 128, seed, i)
        mean, log_variance = model(x[rows]).unbind(1)
        log_variance = log_variance.clamp(-6, 6)
        return (0.5 * (mean - y[rows]) ** 2 / log_variance.exp() + 0.5 * log_variance).mean()

    return _loop(model, torch.optim.Adam(model.parameters(), 5e-3), loss, 300)


def gan(seed: int) -> Program:
    torch.manual_seed(seed)
    model = nn.ModuleDict(
        {
            "generator": _mlp([4, 32, 2]),
            "critic": nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
        }
    )
    for_generator, for_critic = (torch.optim.Adam(m.parameters(), 2e-3, (0.5, 0.9)) for m in model.values())
    one, zero = torch.ones(128, 1), torch.zeros(128, 1)

    def step(i: int) -> float:
        noise = torch.Generator().manual_seed(100 + i + 10_000 * seed)
        real = torch.tensor([3.0, -2.0]) + 0.5 * torch.randn(128, 2, generator=noise)
        fake = model["generator"](torch.randn(128, 4, generator=noise))
        for_critic.zero_grad()
        critic_loss = F.binary_cross_entropy_with_logits(model["critic"](real), one)
        critic_loss = critic_loss + F.binary_cross_entropy_with_logits(model["critic"](fake.detach()), zero)
        critic_loss.backward()
        for_critic.step()
        for_generator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model["critic"](fake), one)
        loss.backward()
        for_generator.step()
        return float(loss.detach())

    return Program(model, step, 400)


def policy_gradient(seed: int) -> Program:
    """A bandit with noisy rewards: the loss is near 0, of both signs, and says nothing about progress."""
    torch.manual_seed(seed)
    model = _mlp([8, 32, 4], nn.Tanh)
    right = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))

    def loss(i: int) -> Tensor:
        noise = torch.Generator().manual_seed(32_452_843 * seed + i)
        state = torch.randn(64, 8, generator=noise)
        log_probability = F.log_softmax(model(state), 1)
        action = torch.multinomial(log_probability.detach().exp(), 1, generator=noise)
        reward = (state @ right).gather(1, action)[:, 0] + torch.randn(64, generator=noise)
        advantage = (reward - reward.mean()) / reward.std()
        return -(log_probability.gather(1, action)[:, 0] * advantage).mean()

    return _loop(model, torch.optim.Adam(model.parameters(), 3e-3), loss, 400)


def converged_with_weight_decay(seed: int) -> Program:
    """Full batches of what a linear map can fit: the gradient goes to 1e-8 and decay is all that moves."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 8, generator=generator)
    y = x @ torch.randn(8, 1, generator=generator)
    model = _mlp([8, 64, 64, 64, 1], nn.GELU)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.985)
    return _loop(model, optimizer, lambda i: F.mse_loss(model(x), y), 800, after=lambda i: schedule.step())


def deep_rectified(seed: int) -> Program:
    """Ten plain layers with He's initialisation: the healthy twin of the deep sigmoid network."""
    torch.manual_seed(seed)
    model = _mlp([64, *[32] * 10, 10])
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return _classifier(seed, model, torch.optim.SGD(model.parameters(), 0.02, momentum=0.9))


def zero_initialised_head(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _mlp([64, 64, 64, 64, 10], nn.Tanh)
    nn.init.zeros_(model[-1].weight)  # type: ignore[arg-type]
    return _classifier(seed, model, torch.optim.Adam(model.parameters(), 3e-3))


def clipped_recurrent(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _Recurrent(nn.RNN)

    def loss(i: int) -> Tensor:
        x, y = _sequences(seed, i)
        return F.cross_entropy(model(x), y)

    return _loop(model, torch.optim.Adam(model.parameters(), 3e-3), loss, 150, clip=1.0)


HEALTHY: tuple[Build, ...] = (
    mlp, mlp_sgd, cnn, transformer, transformer_warm_up, lstm, sum_reduced_loss, unscaled_regression, batches_of_two,
    warm_restarts, plateau_then_drop, frozen_on_purpose, rare_embeddings, negative_loss, gan, policy_gradient,
    converged_with_weight_decay, deep_rectified, zero_initialised_head, clipped_recurrent,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------- faulty


def deep_sigmoid(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _mlp([64, *[32] * 10, 10], nn.Sigmoid)
    return _classifier(seed, model, torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), 60)


def deep_tanh(seed: int) -> Program:
    """Twelve tanh layers whose weights are a fifth of Glorot's."""
    torch.manual_seed(seed)
    model = _mlp([64, *[32] * 12, 10], nn.Tanh)
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight, gain=0.2)
    return _classifier(seed, model, torch.optim.SGD(model.parameters(), 0.1), 60)


def rate_too_high(seed: int) -> Program:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1000, 16, generator=generator)
    y = torch.tanh(x @ torch.randn(16, 1, generator=generator) / 2)
    model = _mlp([16, 64, 64, 1])

    def loss(i: int) -> Tensor:
        rows = _rows(len(x), 64, seed, i)
        return F.mse_loss(model(x[rows]), y[rows])

    return _loop(model, torch.optim.SGD(model.parameters(), 3.0), loss, 60)


def rate_jumps(seed: int) -> Program:
    """A schedule slip at step 60 multiplies the rate by 300 and leaves it there."""
    torch.manual_seed(seed)
    model = _mlp([64, 64, 64, 10])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def before(i: int) -> None:
        if i == 60:
            optimizer.param_groups[0]["lr"] = 1.0

    return _classifier(seed, model, optimizer, 120, before=before)


def rate_too_low(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _mlp([64, 64, 64, 10])
    return _classifier(seed, model, torch.optim.SGD(model.parameters(), 1e-6), 80)


def bias_kills_rectifiers(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _mlp([64, 64, 64, 10])

    def before(i: int) -> None:
        if i == 60:
            with torch.no_grad():
                model[2].bias.fill_(-30.0)  # type: ignore[union-attr, operator]

    return _classifier(seed, model, torch.optim.SGD(model.parameters(), 0.1), 200, before=before)


def nan_in_batch(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _mlp([64, 64, 10])
    x, y = _digits()

    def loss(i: int) -> Tensor:
        rows = _rows(len(x), 64, seed, i)
        batch = x[rows].clone()
        if i == 40:
            batch[3, 5] = float("nan")
        return F.cross_entropy(model(batch), y[rows])

    return _loop(model, torch.optim.Adam(model.parameters(), 3e-3), loss, 60)


class _Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = _mlp([64, 32, 32])
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


def head_not_in_optimizer(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _Headed()
    return _classifier(seed, model, torch.optim.Adam(model.body.parameters(), 3e-3), 80)


class _Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNN(2, 32, batch_first=True, nonlinearity="relu")
        self.out = nn.Linear(32, 1)
        with torch.no_grad():
            self.cell.weight_hh_l0.copy_(torch.eye(32))
            self.cell.weight_ih_l0.mul_(0.3)
            self.cell.bias_hh_l0.zero_()
            self.cell.bias_ih_l0.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x)[0][:, -1])[:, 0]


def recurrent_explodes(seed: int) -> Program:
    torch.manual_seed(seed)
    model = _Adding()

    def loss(i: int) -> Tensor:
        x = torch.rand(32, 80, 2, generator=torch.Generator().manual_seed(49_979_687 * seed + i))
        x[:, :, 1] = (x[:, :, 1] < 0.025).float()
        return F.mse_loss(model(x), (x[:, :, 0] * x[:, :, 1]).sum(1))

    return _loop(model, torch.optim.SGD(model.parameters(), 0.03), loss, 60)


@dataclass(frozen=True)
class Fault:
    """A faulty program and what a diagnosis of it has to say."""

    build: Build
    cause: str
    layer: str | None
    onset: int
    fix: str | None


FAULTS: tuple[Fault, ...] = (
    Fault(deep_sigmoid, "vanishing_gradient", "0", 0, None),
    Fault(deep_tanh, "vanishing_gradient", "0", 0, None),
    Fault(rate_too_high, "learning_rate_too_high", None, 0, "set_learning_rate"),
    Fault(rate_jumps, "learning_rate_too_high", None, 60, "set_learning_rate"),
    Fault(rate_too_low, "learning_rate_too_low", None, 0, "set_learning_rate"),
    Fault(bias_kills_rectifiers, "dead_relu", "2", 60, "revive_dead_units"),
    Fault(nan_in_batch, "nan_in_data", "0", 40, "skip_nonfinite_step"),
    Fault(head_not_in_optimizer, "missing_optimizer_params", "head", 0, None),
    Fault(recurrent_explodes, "exploding_gradient", "cell", 0, "clip_grad_norm"),
)
