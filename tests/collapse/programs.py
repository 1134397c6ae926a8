"""Small trainings of collapsing things and their healthy twins. Seeded; each takes a second or two."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer.diagnosis import diagnose
from gradtracer.journal import Journal
from gradtracer.records import CausalHypothesis, SemanticEvent, Severity
from gradtracer.series import Series
from gradtracer.training.tracker import FlowTracker


@dataclass
class Program:
    """A training program; `loss(i)` is the loss of a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[int], Tensor]
    num_steps: int
    after: Callable[[], None] | None = None


@dataclass(frozen=True)
class Outcome:
    """What the tracker says about a program."""

    series: Series
    hypotheses: tuple[CausalHypothesis, ...]
    broken: str

    @property
    def costly(self) -> list[SemanticEvent]:
        """Events of severity warning and above."""
        return [e for e in self.series.events if e.severity is not Severity.INFO]

    @property
    def top(self) -> tuple[str, str | None]:
        """Code and layer of the most probable hypothesis."""
        return self.hypotheses[0].code, self.hypotheses[0].layer


def watch(program: Program, home: Path) -> Outcome:
    """Train with a tracker attached, and ask it."""
    with FlowTracker(program.model, program.optimizer, serve=False, home=home) as tracker:
        for i in range(program.num_steps):
            program.optimizer.zero_grad()
            loss = program.loss(i)
            loss.backward()
            program.optimizer.step()
            if program.after:
                program.after()
            tracker.step(loss=loss.item())
    with Journal(tracker.directory) as journal:
        series = Series.from_journal(journal)
    return Outcome(series, diagnose(series), tracker.broken_reason)


def _generator(i: int, seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + i)


# ---------------------------------------------------------------- attention


class Heads(nn.Module):
    """Self-attention by several heads, written in one of the usual ways."""

    def __init__(self, way: str, width: int, heads: int, gain: float, scale: float | None, causal: bool) -> None:
        super().__init__()
        self.way, self.heads, self.causal = way, heads, causal
        self.scale = (width // heads) ** -0.5 if scale is None else scale
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        with torch.no_grad():
            self.qkv.weight[: 2 * width] *= gain

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.way == "fused":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        else:
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.scale
            if self.causal:
                later = torch.ones(length, length, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later, -math.inf)
            out = F.dropout(scores.softmax(dim=-1), 0.1, self.training) @ v
        return self.proj(out.transpose(1, 2).reshape(batch, length, width))


class Reader(nn.Module):
    """Reads tokens and tells, at the last place, what stood two places before."""

    def __init__(self, attention: nn.Module, width: int, layers: int = 1) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(20, width), nn.Embedding(14, width)
        self.norm, self.attention, self.head = nn.LayerNorm(width), attention, nn.Linear(width, 20)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.place(torch.arange(x.shape[1]))
        n = self.norm(h)
        if isinstance(self.attention, nn.MultiheadAttention):
            return self.head((h + self.attention(n, n, n, need_weights=False)[0])[:, -1])
        return self.head((h + self.attention(n))[:, -1])


def reading(
    way: str = "plain", *, width: int = 64, heads: int = 2, gain: float = 1.0, scale: float | None = None,
    causal: bool = False, rate: float = 3e-3, num_steps: int = 150, seed: int = 0,
) -> Program:  # fmt: skip
    """Copying by attention: healthy runs learn to look at one key, and that is right."""
    torch.manual_seed(seed)
    attention = (
        nn.MultiheadAttention(width, heads, batch_first=True)
        if way == "module"
        else Heads(way, width, heads, gain, scale, causal)
    )
    model = Reader(attention, width)

    def loss(i: int) -> Tensor:
        x = torch.randint(0, 20, (64, 14), generator=_generator(i, seed))
        return F.cross_entropy(model(x), x[:, -3])

    return Program(model, torch.optim.Adam(model.parameters(), rate), loss, num_steps)


# ---------------------------------------------------------------- representations


def _blobs(i: int, num: int = 96, classes: int = 6, width: int = 24) -> tuple[Tensor, Tensor]:
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(5))
    g = _generator(i)
    y = torch.randint(0, classes, (num,), generator=g)
    return centres[y] + 0.7 * torch.randn(num, width, generator=g), y


def _encoder(out: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, out))


def pulled_together(push: bool) -> Program:
    """Two views pulled together by their cosine, with negatives (InfoNCE) or without anything that pushes."""
    torch.manual_seed(1)
    model = _encoder()

    def loss(i: int) -> Tensor:
        x, _ = _blobs(i)
        g = _generator(i, 3)
        views = [F.normalize(model(x + 0.3 * torch.randn(x.shape, generator=g)), dim=1) for _ in range(2)]
        if push:
            return F.cross_entropy(views[0] @ views[1].T / 0.2, torch.arange(len(x)))
        return -F.cosine_similarity(views[0], views[1], dim=1).mean()

    return Program(model, torch.optim.Adam(model.parameters(), 3e-3), loss, 200)


def contrastive_pairs(margin: bool) -> Program:
    """Siamese pairs by distance, with a margin for different classes or with the pull alone."""
    torch.manual_seed(2)
    model = nn.ModuleDict({"tower": _encoder(8)})

    def loss(i: int) -> Tensor:
        x, y = _blobs(i)
        a, b = model["tower"](x[:48]), model["tower"](x[48:])
        distance = (a - b).square().sum(1)
        same = y[:48] == y[48:]
        push = F.relu(2.0 - (distance + 1e-6).sqrt()).square() if margin else torch.zeros_like(distance)
        return torch.where(same, distance, push if margin else 0.1 * distance).mean()

    return Program(model, torch.optim.Adam(model.parameters(), 3e-3), loss, 200)


def self_taught(predictor: bool) -> Program:
    """A student follows a slow copy of itself (BYOL); without the predictor and with a fast copy it collapses."""
    torch.manual_seed(3)
    student, teacher = _encoder(), _encoder()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    head = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 12)) if predictor else nn.Identity()
    model = nn.ModuleDict({"student": student, "head": head})

    def loss(i: int) -> Tensor:
        x, _ = _blobs(i)
        g = _generator(i, 3)
        a, b = (x + 0.3 * torch.randn(x.shape, generator=g) for _ in range(2))
        with torch.no_grad():
            target = teacher(b)
        return F.mse_loss(model["head"](model["student"](a)), target)

    def after() -> None:
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.5)

    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=5.0 if not predictor else 0.0)
    return Program(model, optimizer, loss, 300, after)


def classifier(smoothing: float = 0.0) -> Program:
    """A classifier trained to neural collapse: rows of one class are one, classes lie apart."""
    torch.manual_seed(4)
    model = nn.Sequential(_encoder(16), nn.ReLU(), nn.Linear(16, 6))

    def loss(i: int) -> Tensor:
        x, y = _blobs(i % 4)
        return F.cross_entropy(model(x), y, label_smoothing=smoothing)

    return Program(model, torch.optim.Adam(model.parameters(), 3e-3), loss, 300)


def noisy_regression() -> Program:
    """A Gaussian likelihood with a head for the scale, which is the same for all rows: sound."""
    torch.manual_seed(5)
    model = nn.ModuleDict({"body": _encoder(16), "mean": nn.Linear(16, 3), "log_scale": nn.Linear(16, 3)})

    def loss(i: int) -> Tensor:
        x, _ = _blobs(i)
        h = model["body"](x).relu()
        target = x[:, :3] + 0.5 * torch.randn(x.shape[0], 3, generator=_generator(i, 9))
        mean, log_scale = model["mean"](h), model["log_scale"](h)
        return (log_scale + 0.5 * ((target - mean) / log_scale.exp()).square()).mean()

    return Program(model, torch.optim.Adam(model.parameters(), 3e-3), loss, 300)


# ---------------------------------------------------------------- latents


class Autoencoder(nn.Module):
    """A variational one, its latent written in one of the usual ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.encoder = nn.Sequential(nn.Linear(24, 64), nn.ReLU())
        if way == "halves":
            self.both = nn.Linear(64, 8)
        else:
            self.mean, self.scale = nn.Linear(64, 4), nn.Linear(64, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 24))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Reconstruction, and divergence of each example."""
        h = self.encoder(x)
        if self.way == "law":
            law = torch.distributions.Normal(self.mean(h), F.softplus(self.scale(h)) + 1e-6 * 0)
            z = law.rsample()
            prior = torch.distributions.Normal(torch.zeros_like(z), torch.ones_like(z))
            return self.decoder(z), torch.distributions.kl_divergence(law, prior).sum(1)
        mean, log_var = self.both(h).chunk(2, dim=1) if self.way == "halves" else (self.mean(h), self.scale(h))
        z = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        return self.decoder(z), 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1)


def autoencoder(way: str, weight: float, num_steps: int = 300) -> Program:
    """Reconstruction summed over the data plus `weight` times the divergence."""
    torch.manual_seed(6)
    model = Autoencoder(way)

    def loss(i: int) -> Tensor:
        x, _ = _blobs(i)
        out, divergence = model(x)
        return ((out - x).square().sum(1) + weight * divergence).mean()

    return Program(model, torch.optim.Adam(model.parameters(), 3e-3), loss, num_steps)


def policy() -> Program:
    """A policy by reparameterised actions, whose noise is on purpose: no posterior and no prior."""
    torch.manual_seed(7)
    model = nn.ModuleDict({"body": _encoder(16), "mean": nn.Linear(16, 2), "scale": nn.Linear(16, 2)})

    def loss(i: int) -> Tensor:
        x, _ = _blobs(i)
        h = model["body"](x).relu()
        law = torch.distributions.Normal(model["mean"](h), model["scale"](h).clamp(-4, 1).exp())
        action = law.rsample()
        reward = -(action - 0.1 * x[:, :2]).square().sum(1)
        return (0.2 * law.log_prob(action).sum(1) - reward).mean()

    return Program(model, torch.optim.Adam(model.parameters(), 1e-3), loss, 300)


# ---------------------------------------------------------------- codebooks


class Quantiser(nn.Module):
    """Images to codes; the codebook is an embedding, a parameter, or a moving average."""

    def __init__(self, kind: str, start: float, num: int = 24, width: int = 6) -> None:
        super().__init__()
        self.kind = kind
        self.encoder = nn.Sequential(nn.Conv2d(1, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, width, 1))
        self.decoder = nn.Sequential(nn.Conv2d(width, 16, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 4))
        codes = start * torch.randn(num, width)
        if kind == "embedding":
            self.codes = nn.Embedding(num, width)
            self.codes.weight.data.copy_(codes)
        elif kind == "parameter":
            self.codes = nn.Parameter(codes)
        else:
            self.register_buffer("codes", codes)

    @property
    def table(self) -> Tensor:
        return self.codes.weight if isinstance(self.codes, nn.Embedding) else self.codes

    def forward(self, x: Tensor) -> Tensor:  # the loss
        z = self.encoder(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, z.shape[-1])
        index = torch.cdist(flat.detach(), self.table.detach()).argmin(1)
        q = (self.codes(index) if isinstance(self.codes, nn.Embedding) else self.table[index]).view_as(z)
        through = z + (q - z).detach()
        out = self.decoder(through.permute(0, 3, 1, 2))
        loss = F.mse_loss(out, x) + 0.25 * F.mse_loss(z, q.detach())
        if self.kind == "average":
            with torch.no_grad():
                hot = F.one_hot(index, len(self.table)).float()
                mean = hot.T @ flat.detach() / hot.sum(0).clamp_min(1)[:, None]
                used = hot.sum(0) > 0
                self.table[used] = 0.9 * self.table[used] + 0.1 * mean[used]
            return loss
        return loss + F.mse_loss(q, z.detach())


def quantiser(kind: str, healthy: bool) -> Program:
    """Patches of images through a codebook that begins among the encoder's outputs, or far from them."""
    torch.manual_seed(8)
    model = Quantiser(kind, 0.3 if healthy else 20.0)
    if healthy:
        with torch.no_grad():
            z = model.encoder(_images(999)).permute(0, 2, 3, 1).reshape(-1, 6)
            model.table.copy_(z[torch.randperm(len(z))[:24]])
    return Program(model, torch.optim.Adam(model.parameters(), 2e-3), lambda i: model(_images(i)), 200)


def _images(i: int) -> Tensor:
    shapes = torch.randn(5, 1, 12, 12, generator=torch.Generator().manual_seed(11))
    g = _generator(i, 4)
    return shapes[torch.randint(0, 5, (24,), generator=g)] + 0.3 * torch.randn(24, 1, 12, 12, generator=g)


# ---------------------------------------------------------------- mixtures


class Mixture(nn.Module):
    def __init__(self, num: int, bias: float, soft: bool) -> None:
        super().__init__()
        self.soft = soft
        self.router = nn.Linear(24, num)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 24)) for _ in range(num)]
        )
        with torch.no_grad():
            self.router.bias[1] = bias

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Output, and the term for balance."""
        shares = self.router(x).softmax(1)
        chosen = shares.argmax(1)
        load = F.one_hot(chosen, shares.shape[1]).float().mean(0)
        balance = shares.shape[1] * (shares.mean(0) * load).sum()
        if self.soft:
            return (torch.stack([e(x) for e in self.experts], 1) * shares[..., None]).sum(1), balance
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * shares[rows, i : i + 1])
        return out, balance


def mixture(*, collapsed: bool, soft: bool = False, num: int = 4) -> Program:
    """A mixture of experts with a balanced router, or one that begins in favour of one expert."""
    torch.manual_seed(9)
    model = nn.ModuleDict({"mix": Mixture(num, 12.0 if collapsed else 0.0, soft), "head": nn.Linear(24, 6)})

    def loss(i: int) -> Tensor:
        x, y = _blobs(i)
        out, balance = model["mix"](x)
        return F.cross_entropy(model["head"](x + out), y) + (0.0 if collapsed else 0.05) * balance

    return Program(model, torch.optim.Adam(model.parameters(), 1e-3), loss, 160)


def many_heads() -> Program:
    """Blocks in a list, and a head with as many classes as there are blocks: no mixture."""
    torch.manual_seed(10)
    blocks = nn.ModuleList([nn.Linear(24, 24) for _ in range(6)])
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(24, 6)})

    def loss(i: int) -> Tensor:
        x, y = _blobs(i)
        for block in list(blocks)[:2]:  # the last ones are not in use yet
            x = x + block(x).relu()
        return F.cross_entropy(model["head"](x), y)

    return Program(model, torch.optim.Adam(model.parameters(), 1e-3), loss, 160)


# ---------------------------------------------------------------- tables

FIELDS = (9, 40, 5, 26)


def fields(offsets: bool, *, sparse: bool = False) -> Program:
    """A table for four fields, whose offsets were added or not."""
    torch.manual_seed(11)
    starts = torch.tensor([0, *FIELDS[:-1]]).cumsum(0) if offsets else torch.zeros(4, dtype=torch.long)
    model = nn.ModuleDict({"table": nn.Embedding(sum(FIELDS), 6, sparse=sparse), "head": nn.Linear(24, 1)})
    weights = [torch.randn(size, generator=torch.Generator().manual_seed(j)) for j, size in enumerate(FIELDS)]

    def loss(i: int) -> Tensor:
        g = _generator(i)
        x = torch.stack([torch.randint(0, size, (128,), generator=g) for size in FIELDS], 1)
        y = sum(w[x[:, j]] for j, w in enumerate(weights))
        assert isinstance(y, Tensor)
        out = model["head"](model["table"](x + starts).flatten(1))[:, 0]
        return F.binary_cross_entropy_with_logits(out, (y > 0).float())

    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), 1.0) if sparse else torch.optim.Adam(model.parameters(), 1e-2)
    )
    return Program(model, optimizer, loss, 120)


def behind_rectifier(dead: bool) -> Program:
    """Rows that pass a rectifier, a third of which begin below zero in every feature."""
    torch.manual_seed(12)
    model = nn.ModuleDict({"rows": nn.Embedding(48, 8), "head": nn.Linear(8, 3)})
    table = model["rows"]
    assert isinstance(table, nn.Embedding)
    if dead:
        with torch.no_grad():
            table.weight[::3] = -table.weight[::3].abs() - 0.5

    def loss(i: int) -> Tensor:
        x = torch.randint(0, 48, (128,), generator=_generator(i))
        return F.cross_entropy(model["head"](table(x).relu()), x % 3)

    return Program(model, torch.optim.Adam(model.parameters(), 1e-2), loss, 160)


def bytes_model() -> Program:
    """A vocabulary of 256 bytes of which the text uses a quarter: sound."""
    torch.manual_seed(13)
    model = nn.ModuleDict({"byte": nn.Embedding(256, 16), "head": nn.Linear(16, 256)})

    def loss(i: int) -> Tensor:
        x = torch.randint(32, 96, (32, 8), generator=_generator(i))
        return F.cross_entropy(model["head"](model["byte"](x)).flatten(0, 1), ((x + 1) % 96).flatten())

    return Program(model, torch.optim.Adam(model.parameters(), 1e-2), loss, 160)


def power_law() -> Program:
    """Items of a power law with sampled negatives, sparse gradients: rare rows are seen rarely, and that is all."""
    torch.manual_seed(14)
    model = nn.ModuleDict({"user": nn.Embedding(60, 8, sparse=True), "item": nn.Embedding(400, 8, sparse=True)})
    popularity = torch.arange(1, 401).float().pow(-1.1)

    def loss(i: int) -> Tensor:
        g = _generator(i)
        users = torch.randint(0, 60, (128,), generator=g)
        items = torch.multinomial(popularity, 128, replacement=True, generator=g)
        others = torch.randint(0, 400, (128,), generator=g)
        u = model["user"](users)
        return -F.logsigmoid((u * (model["item"](items) - model["item"](others))).sum(1)).mean()

    return Program(model, torch.optim.SGD(model.parameters(), 2.0), loss, 250)


def two_towers(rate: float) -> Program:
    """A factorisation by plain gradient descent, with a rate that fits its rows or one that throws them about."""
    torch.manual_seed(15)
    model = nn.ModuleDict({"left": nn.Embedding(90, 8), "right": nn.Embedding(70, 8)})
    g = torch.Generator().manual_seed(2)
    likes = (torch.randn(90, 4, generator=g) @ torch.randn(4, 70, generator=g)) > 0

    def loss(i: int) -> Tensor:
        draw = _generator(i)
        a, b = torch.randint(0, 90, (512,), generator=draw), torch.randint(0, 70, (512,), generator=draw)
        score = (model["left"](a) * model["right"](b)).sum(1)
        return F.binary_cross_entropy_with_logits(score, likes[a, b].float())

    return Program(model, torch.optim.SGD(model.parameters(), rate), loss, 160)
