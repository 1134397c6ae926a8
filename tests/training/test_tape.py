"""A recorded step, run again from the state it began with, repeats the live one bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer.training.hooks import HOOKS
from gradtracer.training.state import TrainingState
from gradtracer.training.tape import Tape, TapeRecorder

Step = Callable[[], float]
Program = tuple[nn.Module, list[torch.optim.Optimizer], Step]


class _Listener:
    """Tells the recorder what the tracker would."""

    def __init__(self, recorder: TapeRecorder) -> None:
        self._recorder = recorder

    def on_backward(self, loss: Tensor, unscaled: Tensor) -> None:
        self._recorder.on_backward(loss, unscaled)

    def on_backward_done(self) -> None:
        pass

    def on_update(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        self._recorder.on_update(optimizer, has_closure)

    def on_updated(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        self._recorder.on_updated()


@pytest.fixture
def listen() -> Iterator[Callable[[TapeRecorder], None]]:
    heard: list[_Listener] = []

    def add(recorder: TapeRecorder) -> None:
        heard.append(_Listener(recorder))
        HOOKS.add(heard[-1])

    yield add
    for listener in heard:
        HOOKS.remove(listener)


def _classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(32, 8), torch.randint(0, 3, (32,))


def clipped_with_decay_by_hand() -> Program:
    model = _classifier()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step() -> float:
        x, y = _batch()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.item()

    return model, [optimizer], step


def accumulated() -> Program:
    model = _classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step() -> float:
        total = 0.0
        for _ in range(3):
            x, y = _batch()
            loss = nn.CrossEntropyLoss()(model(x), y) / 3
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return total

    return model, [optimizer], step


def never_cleared() -> Program:
    model = _classifier()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> float:
        x, y = _batch()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, [optimizer], step


def adversarial() -> Program:
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    ours = torch.optim.SGD(generator.parameters(), 0.1, momentum=0.9)
    theirs = torch.optim.Adam(critic.parameters())

    def step() -> float:
        fake = generator(torch.randn(16, 4))
        theirs.zero_grad()
        judged = F.softplus(-critic(torch.randn(16, 2))).mean() + F.softplus(critic(fake.detach())).mean()
        judged.backward()
        theirs.step()
        ours.zero_grad()
        fooled = F.softplus(-critic(fake)).mean()
        fooled.backward()
        ours.step()
        return judged.item() + fooled.item()

    return nn.ModuleDict({"generator": generator, "critic": critic}), [ours, theirs], step


def scaled_under_autocast() -> Program:
    model = _classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step() -> float:
        x, y = _batch()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return model, [optimizer], step


def rows_of_a_table() -> Program:
    table, head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 1)
    optimizers = [torch.optim.SparseAdam(table.parameters()), torch.optim.SGD(head.parameters(), 0.1)]

    def step() -> float:
        users, items, y = torch.randint(0, 50, (32,)), torch.randint(0, 50, (32,)), torch.rand(32)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = (head(table(users) * table(items)).squeeze(-1) - y).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    return nn.ModuleList([table, head]), optimizers, step


def recurrent() -> Program:
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 8, batch_first=True), "head": nn.Linear(8, 2)})
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> float:
        x, y = torch.randn(8, 5, 4), torch.randint(0, 2, (8,))
        outputs, _ = model["rnn"](x)
        loss = F.cross_entropy(model["head"](outputs[:, -1]), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, [optimizer], step


PROGRAMS = (
    clipped_with_decay_by_hand, accumulated, never_cleared, adversarial, scaled_under_autocast, rows_of_a_table,
    recurrent,
)  # fmt: skip


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a.to_dense(), b.to_dense())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, Sequence) and not isinstance(a, str):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


def _record(recorder: TapeRecorder, step: Step) -> tuple[Tape | None, float]:
    recorder.start()
    loss = step()
    return recorder.stop(), loss


@pytest.mark.parametrize("build", PROGRAMS, ids=lambda f: f.__name__)
def test_a_step_run_again_repeats_loss_weights_moments_and_gradients(
    build: Callable[[], Program], listen: Callable[[TapeRecorder], None]
) -> None:
    torch.manual_seed(0)
    model, optimizers, step = build()
    recorder = TapeRecorder(model)
    listen(recorder)
    state = TrainingState(model, optimizers)
    for _ in range(3):
        before = state.take(gradients=True)
        tape, loss = _record(recorder, step)
        assert tape is not None, recorder.trouble
        assert tape.live_loss == pytest.approx(loss, rel=1e-6)
        after = state.take(gradients=True)
        state.restore(before)
        assert tape.step() == tape.live_loss
        again = state.take(gradients=True)
        for part in ("tensors", "optimizers", "gradients"):
            assert _same(after[part], again[part]), part
        state.restore(after)


@pytest.mark.parametrize("build", PROGRAMS, ids=lambda f: f.__name__)
def test_recording_a_step_does_not_change_training(
    build: Callable[[], Program], listen: Callable[[TapeRecorder], None]
) -> None:
    torch.manual_seed(0)
    _, _, step = build()
    plain = [step() for _ in range(4)]
    torch.manual_seed(0)
    model, _, step = build()
    recorder = TapeRecorder(model)
    listen(recorder)
    assert [_record(recorder, step)[1] for _ in range(4)] == plain


def test_the_forward_pass_of_a_tape_goes_through_the_modules_and_leaves_weights_and_gradients_alone(
    listen: Callable[[TapeRecorder], None],
) -> None:
    torch.manual_seed(0)
    model, optimizers, step = clipped_with_decay_by_hand()
    recorder = TapeRecorder(model)
    listen(recorder)
    tape, _ = _record(recorder, step)
    assert tape is not None
    state = TrainingState(model, optimizers)
    before = state.take(gradients=True)
    seen: list[tuple[int, ...]] = []
    handle = model.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    tape.forward()
    handle.remove()
    after = state.take(gradients=True)
    assert seen == [(32, 3)]
    weights = dict(model.named_parameters())
    assert all(_same(t, after["tensors"][k]) for k, t in before["tensors"].items() if k in weights)
    assert _same(before["gradients"], after["gradients"])


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def test_what_cannot_be_followed_is_refused_and_named(listen: Callable[[TapeRecorder], None]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> float:
        optimizer.zero_grad()
        loss = _Double.apply(model(torch.randn(8, 4))).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    recorder = TapeRecorder(model)
    listen(recorder)
    tape, _ = _record(recorder, step)
    assert tape is None
    assert "_DoubleBackward" in str(recorder.trouble)


def test_a_closure_and_a_batch_that_is_too_large_are_refused(listen: Callable[[TapeRecorder], None]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    x = torch.randn(8, 4)
    optimizer = torch.optim.LBFGS(model.parameters())

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = model(x).square().mean()
        value.backward()
        return value

    recorder = TapeRecorder(model)
    listen(recorder)
    assert _record(recorder, lambda: float(optimizer.step(loss).detach()))[0] is None
    assert "closure" in str(recorder.trouble)

    plain = torch.optim.SGD(model.parameters(), 0.1)
    recorder.max_bytes = x.numel() * 4 - 1

    def step() -> float:
        value = loss()
        plain.step()
        return value.item()

    assert _record(recorder, step)[0] is None
    assert recorder.out_of_space
