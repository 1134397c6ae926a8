"""Small models with their data, for tests that train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

torch.set_num_threads(1)


@dataclass
class Training:
    """A model, its optimizer, and what computes the loss of a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], Tensor]

    def run(self, steps: int, after_step: Callable[[Tensor], None] | None = None) -> list[float]:
        """Train; the losses, bit for bit."""
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            if after_step is not None:
                after_step(loss)
        return losses


class SmallCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.act(self.norm(self.conv(x))), 2)
        return self.head(self.drop(x.flatten(1)))


class SmallTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)))


def mlp(seed: int = 0, lr: float = 1e-2) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    x = torch.randn(256, 12)
    y = x[:, :3].argmax(dim=1)

    def loss() -> Tensor:
        batch = torch.randint(0, 256, (32,))
        return F.cross_entropy(model(x[batch]), y[batch])

    return Training(model, torch.optim.SGD(model.parameters(), lr, momentum=0.9), loss)


def cnn(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = SmallCnn()
    x, y = torch.randn(128, 1, 8, 8), torch.randint(0, 4, (128,))

    def loss() -> Tensor:
        batch = torch.randint(0, 128, (16,))
        return F.cross_entropy(model(x[batch]), y[batch])

    return Training(model, torch.optim.Adam(model.parameters(), 1e-3), loss)


def transformer(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = SmallTransformer()
    tokens = torch.randint(0, 20, (64, 11))

    def loss() -> Tensor:
        batch = tokens[torch.randint(0, 64, (8,))]
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return Training(model, torch.optim.AdamW(model.parameters(), 1e-3), loss)


MODELS: dict[str, Callable[[], Training]] = {"mlp": mlp, "cnn": cnn, "transformer": transformer}
