"""Training loops as users write them, each with a fault in how it is put together, or odd and healthy."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

torch.set_num_threads(1)


@dataclass
class Loop:
    """`step(i)` is one whole step of training and returns its loss."""

    model: nn.Module
    step: Callable[[int], float]
    num_steps: int = 120


class Blobs:
    """Classes around centres; a fresh batch for every step."""

    def __init__(
        self, features: int = 12, classes: int = 4, batch: int = 48, spread: float = 1.0, seed: int = 0
    ) -> None:
        self._seed, self.batch, self.classes = seed, batch, classes
        self.centres = torch.randn(classes, features, generator=torch.Generator().manual_seed(seed + 99)) * spread

    def __call__(self, i: int, batch: int | None = None) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(10_007 * self._seed + i)
        y = torch.randint(0, self.classes, (batch or self.batch,), generator=g)
        return self.centres[y] + torch.randn(len(y), self.centres.shape[1], generator=g), y


def mlp(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(a, b))
        if i < len(sizes) - 2:
            layers.append(act())
    return nn.Sequential(*layers)


def classify(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    data: Blobs | None = None,
    num_steps: int = 120,
    loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    before: Callable[[int], None] = lambda i: None,
    after: Callable[[int], None] = lambda i: None,
    zero: Callable[[int], bool] = lambda i: True,
) -> Loop:
    draw = data or Blobs()

    def step(i: int) -> float:
        before(i)
        x, y = draw(i)
        if zero(i):
            optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        after(i)
        return loss.item()

    return Loop(model, step, num_steps)


def sgd(model: nn.Module, lr: float = 0.1, **kwargs: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr, **kwargs)


# ------------------------------------------------------------------------------------------- gradients not cleared


def never_cleared_adam() -> Loop:
    model = mlp(12, 24, 24, 4, act=nn.Tanh)
    return classify(model, torch.optim.Adam(model.parameters(), 3e-3), zero=lambda i: False)


def cleared_until_37() -> Loop:
    model = mlp(12, 24, 4)
    return classify(model, sgd(model, 0.05, momentum=0.9), zero=lambda i: i < 37)


def one_of_two_never_cleared() -> Loop:
    model = nn.ModuleDict({"a": mlp(12, 16), "b": mlp(16, 4)})
    first, second = sgd(model["a"], 0.05), sgd(model["b"], 0.05)
    data = Blobs()

    def step(i: int) -> float:
        x, y = data(i)
        first.zero_grad()
        loss = F.cross_entropy(model["b"](model["a"](x)), y)
        loss.backward()
        first.step()
        second.step()
        return loss.item()

    return Loop(model, step)


# ------------------------------------------------------------------------------------------- accumulation


def accumulate(k: int, lr: float, *, divide: bool, momentum: float = 0.9, zero_each: bool = False) -> Loop:
    model = mlp(12, 32, 32, 4)
    optimizer = sgd(model, lr, momentum=momentum)
    data = Blobs(spread=2.0, batch=8)

    def step(i: int) -> float:
        if i % k == 0 or zero_each:
            optimizer.zero_grad()
        x, y = data(i)
        loss = F.cross_entropy(model(x), y)
        (loss / k if divide else loss).backward()
        if i % k == k - 1:
            optimizer.step()
        return loss.item()

    return Loop(model, step, 400)


def accumulated_sum_diverges() -> Loop:
    return accumulate(24, 0.3, divide=False)


def all_but_the_last_batch_lost() -> Loop:
    return accumulate(4, 0.05, divide=True, zero_each=True)


def updated_at_every_batch_cleared_every_eighth() -> Loop:
    model = mlp(12, 32, 4)
    return classify(model, sgd(model, 0.05), zero=lambda i: i % 8 == 0)


# ------------------------------------------------------------------------------------------- the optimizer's memory


def rebuilt(make: Callable[[nn.Module], torch.optim.Optimizer], at: Sequence[int], num_steps: int = 220) -> Loop:
    model = mlp(12, 32, 4)
    data, box = Blobs(), [make(model)]

    def step(i: int) -> float:
        if i in at:
            box[0] = make(model)
        x, y = data(i)
        box[0].zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        box[0].step()
        return loss.item()

    return Loop(model, step, num_steps)


def adam_rebuilt_at_137() -> Loop:
    return rebuilt(lambda m: torch.optim.AdamW(m.parameters(), 1e-2), [137])


def momentum_rebuilt_every_epoch() -> Loop:
    return rebuilt(lambda m: sgd(m, 0.1, momentum=0.9), range(50, 500, 50))


def state_cleared_at_63() -> Loop:
    model = mlp(12, 32, 4)
    optimizer = torch.optim.RMSprop(model.parameters(), 3e-3, momentum=0.5)

    def before(i: int) -> None:
        if i == 63:
            optimizer.state.clear()

    return classify(model, optimizer, before=before)


# ------------------------------------------------------------------------------------------- pruning, replicas


def conv_pruned_at_57(*, keep: bool = False, every: int = 1) -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 24, 3), nn.ReLU(), nn.Conv2d(24, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 4),
    )  # fmt: skip
    weight = model[3].weight
    mask: list[Tensor] = []

    def before(i: int) -> None:
        with torch.no_grad():
            if i == 57:
                mask.append((weight.abs() > weight.abs().flatten().quantile(0.7)).float())
                weight.mul_(mask[0])
            elif mask and keep and i % every == 0:
                weight.mul_(mask[0])

    return classify(model, sgd(model, 0.02, momentum=0.9), data=Blobs(36), before=before)


def conv_pruned_and_lost() -> Loop:
    return conv_pruned_at_57()


def replicas(until: int, *, shared_start: bool = True) -> Loop:
    copies = nn.ModuleList([mlp(12, 16, 4, seed=s if not shared_start else 0) for s in range(3)])
    optimizer = torch.optim.Adam(copies.parameters(), 3e-3)
    data = [Blobs(seed=0), Blobs(seed=1), Blobs(seed=2)]

    def step(i: int) -> float:
        optimizer.zero_grad()
        losses = [F.cross_entropy(m(d(i)[0]), d(i)[1]) for m, d in zip(copies, data, strict=True)]
        torch.stack(losses).sum().backward()
        if i < until:
            for together in zip(*(m.parameters() for m in copies), strict=True):
                mean = torch.stack([p.grad for p in together if p.grad is not None]).mean(0)
                for p in together:
                    p.grad = mean.clone()
        optimizer.step()
        return sum(x.item() for x in losses)

    return Loop(copies, step)


def replicas_part_at_23() -> Loop:
    return replicas(23)


# ------------------------------------------------------------------------------------------- initialisation


def initialised(how: Callable[[Tensor], object], *, act: Callable[[], nn.Module] = nn.ReLU, lr: float = 0.02,
                same_bias: bool = False) -> Loop:  # fmt: skip
    model = mlp(12, 40, 40, 40, 4, act=act)
    for m in model:
        if isinstance(m, nn.Linear):
            how(m.weight)
            if how is nn.init.zeros_ or same_bias:
                nn.init.zeros_(m.bias)
    return classify(model, sgd(model, lr, momentum=0.9))


def normal_one_in_tanh() -> Loop:
    return initialised(lambda w: nn.init.normal_(w, std=2.0), act=nn.Tanh)


def uniform_one() -> Loop:
    return initialised(lambda w: nn.init.uniform_(w, -2.0, 2.0))


def normal_tiny() -> Loop:
    return initialised(lambda w: nn.init.normal_(w, std=1e-3))


def regression_with_large_weights() -> Loop:
    model = mlp(12, 64, 64, 1)
    for m in model:
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, std=1.0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return classify(model, optimizer, loss_of=lambda out, y: F.mse_loss(out[:, 0], y.float()))


def constant_units() -> Loop:
    return initialised(lambda w: nn.init.constant_(w, 0.05), same_bias=True)


def zeros_everywhere() -> Loop:
    return initialised(nn.init.zeros_, lr=0.1)


# ------------------------------------------------------------------------------------------- half precision


def half_model_overflows() -> Loop:
    torch.manual_seed(0)
    model = mlp(12, 32, 4).half()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    data = Blobs()

    def step(i: int) -> float:
        x, y = data(i)
        optimizer.zero_grad()
        h = F.relu(model[0](x.half() * (1.0 if i < 30 else 2_000.0)))
        loss = F.cross_entropy(model[2]((h * h).sqrt() if i >= 30 else h).float(), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Loop(model, step, 60)


def half_adam(eps: float = 1e-8) -> Loop:
    model = mlp(12, 32, 4).half()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=eps)
    return classify(model, optimizer, loss_of=lambda out, y: F.cross_entropy(out.float(), y),
                    data=_HalfBlobs(), num_steps=40)  # fmt: skip


class _HalfBlobs(Blobs):
    def __call__(self, i: int, batch: int | None = None) -> tuple[Tensor, Tensor]:
        x, y = super().__call__(i, batch)
        return x.half(), y


def scaled(order: str, *, optimizer: str = "sgd") -> Loop:
    model = mlp(12, 32, 4)
    chosen = sgd(model, 0.5) if optimizer == "sgd" else torch.optim.Adam(model.parameters(), 3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=40)
    data = Blobs()

    def step(i: int) -> float:
        x, y = data(i)
        chosen.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if order == "right":
            scaler.unscale_(chosen)
        if order != "no clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if order == "not unscaled":
            chosen.step()
        else:
            scaler.step(chosen)
            scaler.update()
        return loss.item()

    return Loop(model, step)


def clipped_before_unscale_sgd() -> Loop:
    return scaled("clip first")


def clipped_before_unscale_adam() -> Loop:
    return scaled("clip first", optimizer="adam")


def stepped_without_unscale() -> Loop:
    model = mlp(12, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu")

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return scaler.scale(F.cross_entropy(out, y))

    return classify(model, optimizer, loss_of=loss_of)


# ------------------------------------------------------------------------------------------- scale of the loss


def divided_by_the_data_set() -> Loop:
    model = mlp(12, 32, 4)
    return classify(model, sgd(model, 0.05), loss_of=lambda out, y: F.cross_entropy(out, y) / 5_000)


def summed_and_divided_twice() -> Loop:
    model = mlp(12, 32, 4)
    return classify(
        model, sgd(model, 0.05), loss_of=lambda out, y: -out.log_softmax(1)[torch.arange(len(y)), y].mean() / len(y)
    )


def multiplied_by_a_thousand() -> Loop:
    model = mlp(12, 32, 32, 1)
    return classify(model, sgd(model, 0.01), loss_of=lambda out, y: 1000 * F.mse_loss(out[:, 0], y.float()))


def summed_over_the_batch() -> Loop:
    model = mlp(12, 32, 32, 1)
    return classify(model, sgd(model, 0.05), loss_of=lambda out, y: F.mse_loss(out[:, 0], y.float(), reduction="sum"))


# ------------------------------------------------------------------------------------------- decay and schedule


def decay_sgd() -> Loop:
    model = mlp(12, 32, 4)
    return classify(model, sgd(model, 0.1, momentum=0.9, weight_decay=0.3))


def decay_adam() -> Loop:
    model = mlp(12, 32, 32, 4)
    return classify(model, torch.optim.Adam(model.parameters(), 3e-3, weight_decay=5.0), num_steps=200)


def decay_adamw() -> Loop:
    model = mlp(12, 32, 32, 4)
    return classify(model, torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=50.0), num_steps=200)


def scheduled(make: Callable[[torch.optim.Optimizer], object], lr: float, num_steps: int = 200, every: int = 1) -> Loop:
    model = mlp(12, 32, 4)
    optimizer = sgd(model, lr)
    schedule = make(optimizer)

    def after(i: int) -> None:
        if i % every == every - 1:
            schedule.step()  # type: ignore[attr-defined]

    return classify(model, optimizer, after=after, num_steps=num_steps, data=Blobs(spread=0.7))


_S = torch.optim.lr_scheduler


def step_schedule_stepped_at_every_batch() -> Loop:
    return scheduled(lambda o: _S.StepLR(o, 10, 0.1), 0.05)


def exponential_schedule_stepped_at_every_batch() -> Loop:
    return scheduled(lambda o: _S.ExponentialLR(o, 0.9), 0.05)


def linear_schedule_over_too_early() -> Loop:
    return scheduled(lambda o: _S.LambdaLR(o, lambda i: max(0.0, 1 - i / 20)), 0.03)


def warm_up_stepped_once_an_epoch() -> Loop:
    return scheduled(lambda o: _S.LambdaLR(o, lambda i: min(1.0, i / 500)), 0.1, every=100)


class PostNorm(nn.Module):
    """A transformer encoder with the normalisation behind the residual connection."""

    def __init__(self, depth: int = 6, width: int = 32, norm_first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.place = nn.Parameter(torch.randn(10, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x) + self.place)[:, -1])


def transformer(lr: float, warm_up: int, *, depth: int = 6, norm_first: bool = False, num_steps: int = 200) -> Loop:
    torch.manual_seed(0)
    model = PostNorm(depth, norm_first=norm_first)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    schedule = _S.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / warm_up) if warm_up else 1.0)

    def step(i: int) -> float:
        x = torch.randint(0, 16, (32, 10), generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x[:, -3])
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()

    return Loop(model, step, num_steps)


def post_norm_without_warm_up() -> Loop:
    return transformer(1e-2, 0)


FAULTY: dict[str, tuple[Callable[[], Loop], str, str | None, int]] = {
    "never_cleared_adam": (never_cleared_adam, "zero_grad_missing", None, 1),
    "cleared_until_37": (cleared_until_37, "zero_grad_missing", None, 37),
    "one_of_two_never_cleared": (one_of_two_never_cleared, "zero_grad_missing", None, 1),
    "accumulated_sum_diverges": (accumulated_sum_diverges, "gradient_accumulation", None, 23),
    "all_but_the_last_batch_lost": (all_but_the_last_batch_lost, "gradient_accumulation", None, 3),
    "cleared_every_eighth": (updated_at_every_batch_cleared_every_eighth, "gradient_accumulation", None, 1),
    "adam_rebuilt_at_137": (adam_rebuilt_at_137, "optimizer_state_lost", None, 137),
    "momentum_rebuilt_every_epoch": (momentum_rebuilt_every_epoch, "optimizer_state_lost", None, 50),
    "state_cleared_at_63": (state_cleared_at_63, "optimizer_state_lost", None, 63),
    "conv_pruned_and_lost": (conv_pruned_and_lost, "pruning_mask_lost", "3", 57),
    "replicas_part_at_23": (replicas_part_at_23, "ddp_desync", "1", 23),
    "normal_one_in_tanh": (normal_one_in_tanh, "bad_initialisation", "0", 0),
    "uniform_one": (uniform_one, "bad_initialisation", "0", 0),
    "normal_tiny": (normal_tiny, "bad_initialisation", "0", 0),
    "regression_with_large_weights": (regression_with_large_weights, "bad_initialisation", "0", 0),
    "constant_units": (constant_units, "symmetric_or_zero_init", "0", 0),
    "zeros_everywhere": (zeros_everywhere, "symmetric_or_zero_init", "0", 0),
    "half_model_overflows": (half_model_overflows, "fp16_overflow", "0", 30),
    "half_adam": (half_adam, "optimizer_eps_half", None, 0),
    "clipped_before_unscale_sgd": (clipped_before_unscale_sgd, "amp_order", None, 0),
    "clipped_before_unscale_adam": (clipped_before_unscale_adam, "amp_order", None, 0),
    "stepped_without_unscale": (stepped_without_unscale, "amp_order", None, 0),
    "divided_by_the_data_set": (divided_by_the_data_set, "loss_scale", "0", 0),
    "summed_and_divided_twice": (summed_and_divided_twice, "loss_scale", "0", 0),
    "multiplied_by_a_thousand": (multiplied_by_a_thousand, "loss_scale", "0", 0),
    "summed_over_the_batch": (summed_over_the_batch, "loss_scale", "0", 0),
    "decay_sgd": (decay_sgd, "weight_decay_too_large", None, 0),
    "decay_adam": (decay_adam, "weight_decay_too_large", None, 0),
    "decay_adamw": (decay_adamw, "weight_decay_too_large", None, 0),
    "step_schedule_stepped_at_every_batch": (step_schedule_stepped_at_every_batch, "scheduler_misuse", None, 10),
    "exponential_schedule": (exponential_schedule_stepped_at_every_batch, "scheduler_misuse", None, 0),
    "linear_schedule_over_too_early": (linear_schedule_over_too_early, "scheduler_misuse", None, 0),
    "warm_up_stepped_once_an_epoch": (warm_up_stepped_once_an_epoch, "scheduler_misuse", None, 0),
    "post_norm_without_warm_up": (post_norm_without_warm_up, "warmup_missing", None, 0),
}
"""Program, cause, layer (None where none is at fault) and the first bad step."""


# ------------------------------------------------------------------------------------------- healthy


def gan(order: str) -> Loop:
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": mlp(4, 32, 2), "d": mlp(2, 32, 1)})
    g, d = (torch.optim.Adam(model[n].parameters(), 1e-3, (0.5, 0.9)) for n in "gd")
    bce = F.binary_cross_entropy_with_logits

    def step(i: int) -> float:
        gen = torch.Generator().manual_seed(i)
        z, real = torch.randn(32, 4, generator=gen), torch.randn(32, 2, generator=gen) + 2
        fake = model["g"](z)
        if order == "d first":
            d.zero_grad()
        else:
            g.zero_grad()
            d.zero_grad()
        on_real, on_fake = model["d"](real), model["d"](fake.detach())
        bce(on_real, torch.ones_like(on_real)).backward()
        bce(on_fake, torch.zeros_like(on_fake)).backward()
        d.step()
        if order == "d first":
            g.zero_grad()
        out = model["d"](fake)
        loss = bce(out, torch.ones_like(out))
        loss.backward()
        g.step()
        return loss.item()

    return Loop(model, step, 150)


def ensemble_of_copies() -> Loop:
    return replicas(0)


def replicas_in_step() -> Loop:
    return replicas(10_000)


def teacher() -> Loop:
    student = mlp(12, 24, 4)
    model = nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student)})
    model["teacher"].requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), 3e-3)
    data = Blobs()

    def step(i: int) -> float:
        x, y = data(i)
        optimizer.zero_grad()
        out = student(x)
        loss = F.cross_entropy(out, y) + 0.1 * F.mse_loss(out, model["teacher"](x))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(student.parameters(), model["teacher"].parameters(), strict=True):
                b.lerp_(a, 0.01)
        return loss.item()

    return Loop(model, step)


class LowRank(nn.Module):
    """A frozen layer with a low-rank correction that begins at zero."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.down, self.up = nn.Linear(size, 4, bias=False), nn.Linear(4, size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def low_rank() -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(LowRank(12), nn.ReLU(), LowRank(12), nn.ReLU(), nn.Linear(12, 4))
    nn.init.zeros_(model[4].weight)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    return classify(model, optimizer)


def sharpness_aware() -> Loop:
    model = mlp(12, 24, 4)
    optimizer = sgd(model, 0.05, momentum=0.9)
    data = Blobs()

    def step(i: int) -> float:
        x, y = data(i)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            moves = [0.02 * p.grad for p in model.parameters() if p.grad is not None]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        return loss.item()

    return Loop(model, step)


def adam_then_sgd() -> Loop:
    makers: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
        lambda m: torch.optim.Adam(m.parameters(), 1e-3),
        lambda m: sgd(m, 0.05),
    ]
    return rebuilt(lambda m: makers.pop(0)(m), [60], 150)


def unfrozen_with_a_new_optimizer() -> Loop:
    model = mlp(12, 24, 4)
    model[0].requires_grad_(False)
    box: list[torch.optim.Optimizer] = [torch.optim.Adam(model[2].parameters(), 3e-3)]
    data = Blobs()

    def step(i: int) -> float:
        if i == 50:
            model[0].requires_grad_(True)
            box[0] = torch.optim.Adam(model.parameters(), 1e-3)
        x, y = data(i)
        box[0].zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        box[0].step()
        return loss.item()

    return Loop(model, step)


def lbfgs() -> Loop:
    model = mlp(12, 8, 4, act=nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=5)
    x, y = Blobs(batch=200)(0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 1e-3 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    return Loop(model, lambda i: float(optimizer.step(closure)), 40)


def gpt_initialised() -> Loop:
    torch.manual_seed(0)
    model = PostNorm(2, norm_first=True)
    for m in model.modules():
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.1)

    def step(i: int) -> float:
        x = torch.randint(0, 16, (32, 10), generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x[:, -3])
        loss.backward()
        optimizer.step()
        return loss.item()

    return Loop(model, step, 150)


def wide_normal_behind_batchnorm() -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 40), nn.BatchNorm1d(40),
                          nn.ReLU(), nn.Linear(40, 4))  # fmt: skip
    for i in (0, 3):
        nn.init.normal_(model[i].weight, std=2.0)
    return classify(model, sgd(model, 0.1, momentum=0.9))


def noisy_labels_with_decay() -> Loop:
    model = mlp(12, 32, 4)
    data = Blobs(spread=0.15)
    return classify(model, sgd(model, 0.1, momentum=0.9, weight_decay=1e-2), data=data, num_steps=250)


def one_cycle() -> Loop:
    return scheduled(lambda o: _S.OneCycleLR(o, 0.3, total_steps=201), 0.1)


def cosine() -> Loop:
    return scheduled(lambda o: _S.CosineAnnealingLR(o, 200), 0.2)


def step_schedule() -> Loop:
    return scheduled(lambda o: _S.StepLR(o, 60, 0.1), 0.2)


def exponential_slow() -> Loop:
    return scheduled(lambda o: _S.ExponentialLR(o, 0.99), 0.2)


def linear_warm_up() -> Loop:
    return scheduled(lambda o: _S.LambdaLR(o, lambda i: min(1.0, i / 100)), 0.2)


def summed_loss_small_rate() -> Loop:
    model = mlp(12, 32, 32, 1)
    optimizer = sgd(model, 1e-3)
    return classify(model, optimizer, loss_of=lambda out, y: F.mse_loss(out[:, 0], y.float(), reduction="sum"))


def divided_loss_under_adam() -> Loop:
    model = mlp(12, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    return classify(model, optimizer, loss_of=lambda out, y: F.cross_entropy(out, y) / 64)


HEALTHY: dict[str, Callable[[], Loop]] = {
    "gan_d_first": lambda: gan("d first"),
    "gan_both": lambda: gan("both"),
    "accumulate_mean": lambda: accumulate(8, 0.1, divide=True),
    "accumulate_sum_with_a_rate_to_match": lambda: accumulate(8, 0.1 / 8, divide=False),
    "ensemble_of_copies": ensemble_of_copies,
    "replicas_in_step": replicas_in_step,
    "teacher": teacher,
    "low_rank": low_rank,
    "sharpness_aware": sharpness_aware,
    "adam_then_sgd": adam_then_sgd,
    "unfrozen_with_a_new_optimizer": unfrozen_with_a_new_optimizer,
    "lbfgs": lbfgs,
    "gpt_initialised": gpt_initialised,
    "wide_normal_behind_batchnorm": wide_normal_behind_batchnorm,
    "orthogonal": lambda: initialised(nn.init.orthogonal_),
    "kaiming": lambda: initialised(nn.init.kaiming_normal_),
    "noisy_labels_with_decay": noisy_labels_with_decay,
    "one_cycle": one_cycle,
    "cosine": cosine,
    "step_schedule": step_schedule,
    "exponential_slow": exponential_slow,
    "linear_warm_up": linear_warm_up,
    "summed_loss_small_rate": summed_loss_small_rate,
    "divided_loss_under_adam": divided_loss_under_adam,
    "half_adam_with_eps": lambda: half_adam(1e-4),
    "scaled_in_the_right_order": lambda: scaled("right"),
    "scaled_without_clipping": lambda: scaled("no clip", optimizer="adam"),
    "pruned_with_a_mask": lambda: conv_pruned_at_57(keep=True),
    "pruned_and_grown_back_on_purpose": lambda: conv_pruned_at_57(keep=True, every=10),
    "decay_usual": lambda: classify(m := mlp(12, 32, 4), sgd(m, 0.1, momentum=0.9, weight_decay=5e-4)),
    "post_norm_with_warm_up": lambda: transformer(1e-2, 100, num_steps=200),
    "pre_norm_without_warm_up": lambda: transformer(2e-3, 0, depth=2, norm_first=True),
}
