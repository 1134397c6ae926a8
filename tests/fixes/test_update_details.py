"""What the fixes of optimizer and gradients compute, against slow twins, and what they leave alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer.errors import BadParameter
from gradtracer.fixes import ReportingUndo
from gradtracer.training.state import TrainingState
from tests.fixes.test_update_fixes import Listed, frozen, head_left_out, listed, spiky
from tests.fixes.training import Live, classification, healthy, live, network, program


def _rates(run: Live, num_steps: int) -> list[float]:
    used: list[float] = []
    handle = run.program.optimizer.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))
    run.train(num_steps)
    handle.remove()
    return used


def _seen_gradients(run: Live) -> list[Tensor]:
    """The gradients that the optimizer uses in the next step."""
    seen: list[Tensor] = []

    def look(optimizer: Any, *_: Any) -> None:
        seen.extend(p.grad.detach().clone() for g in optimizer.param_groups for p in g["params"])

    handle = run.program.optimizer.register_step_pre_hook(look)
    run.train(1)
    handle.remove()
    return seen


def _with_and_without(apply: Callable[[Live], Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, and gradients of one step, without and with a fix."""
    with live(healthy(0)) as run:
        run.train(3)
        weights = [p.detach().clone() for p in run.program.model.parameters()]
        plain = _seen_gradients(run)
    with live(healthy(0)) as run:
        run.train(3)
        apply(run)
        return weights, plain, _seen_gradients(run)


def test_warmup_rises_linearly_to_the_rate_of_the_schedule() -> None:
    made = healthy(0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made.optimizer, 0.9)
    step = made.step

    def scheduled() -> float:
        loss = step()
        scheduler.step()
        return loss

    made.step = scheduled
    with live(made) as run:
        run.train(2)
        run.apply("warmup", steps=4, from_fraction=0.2)
        expected = [0.05 * 0.9 ** (2 + k) * (0.2 + 0.8 * min((k + 1) / 4, 1.0)) for k in range(6)]
        assert _rates(run, 6) == pytest.approx(expected)
        assert made.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**8)


def test_a_cosine_restarts_and_then_leaves_the_rate_alone() -> None:
    with live(healthy(0)) as run:
        run.apply("cosine_restart", steps=4, cycles=2, lengthen=2.0, learning_rate=0.4, final_fraction=0.1)
        low, high = 0.04, 0.4
        expected = [low + 0.5 * (high - low) * (1 + math.cos(math.pi * t / n)) for n in (4, 8) for t in range(n)]
        assert _rates(run, 14) == pytest.approx([*expected, 0.05, 0.05])


def test_the_norm_is_clipped_as_torch_clips_it() -> None:
    _, plain, clipped = _with_and_without(lambda run: run.apply("clip_grad_norm", max_norm=0.1))
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in plain]
    for p, g in zip(parameters, plain, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(parameters, 0.1)
    for p, found in zip(parameters, clipped, strict=True):
        torch.testing.assert_close(found, p.grad, rtol=1e-4, atol=0)


def test_elements_are_clipped_one_by_one() -> None:
    _, plain, clipped = _with_and_without(lambda run: run.apply("clip_grad_value", max_value=0.01))
    for before, after in zip(plain, clipped, strict=True):
        expected = [max(-0.01, min(0.01, x)) for x in before.flatten().tolist()]
        assert after.flatten().tolist() == pytest.approx(expected)


def test_each_unit_is_clipped_by_its_own_weights() -> None:
    weights, plain, clipped = _with_and_without(lambda run: run.apply("adaptive_grad_clip", clipping=0.02))
    num_clipped = 0
    for weight, before, after in zip(weights, plain, clipped, strict=True):
        units = zip(weight, before, after, strict=True) if weight.dim() > 1 else [(weight, before, after)]
        for w, g, found in units:
            bound = 0.02 * max(math.sqrt(sum(x * x for x in w.flatten().tolist())), 1e-3)
            norm = math.sqrt(sum(x * x for x in g.flatten().tolist()))
            factor = bound / norm if norm > bound else 1.0
            num_clipped += factor < 1.0
            torch.testing.assert_close(found, g * factor, rtol=1e-4, atol=1e-9)
    assert num_clipped


def test_gradients_are_scaled_by_the_factor() -> None:
    _, plain, scaled = _with_and_without(lambda run: run.apply("scale_gradients", factor=0.125))
    assert all(torch.equal(0.125 * before, after) for before, after in zip(plain, scaled, strict=True))


@pytest.mark.parametrize(
    ("code", "parameters"),
    [("clip_grad_norm", {"max_norm": 0.1}), ("clip_grad_value", {"max_value": 0.01}),
     ("adaptive_grad_clip", {"clipping": 0.01}), ("scale_gradients", {"factor": 0.5}),
     ("skip_nonfinite_step", {}), ("skip_batch", {"max_deviations": 5.0}), ("clear_gradients", {})],
)  # fmt: skip
def test_sparse_gradients_are_taken_as_their_rows(code: str, parameters: dict[str, float]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(24, 3))
    made = program(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        lambda: F.cross_entropy(model(torch.randint(0, 20, (16, 3))), torch.randint(0, 3, (16,))),
    )
    with live(made) as run:
        run.train(2)
        run.apply(code, **parameters)
        assert all(math.isfinite(x) for x in run.train(3))


def test_skipped_batches_are_told_and_change_nothing() -> None:
    with live(spiky(0)) as run:
        run.train(5)
        undo = run.apply("skip_batch", num_updates=2, max_deviations=8.0)
        assert isinstance(undo, ReportingUndo)
        assert undo.report() == ""
        before = [p.detach().clone() for p in run.program.model.parameters()]
        run.train(2)
        assert all(torch.equal(a, b) for a, b in zip(before, run.program.model.parameters(), strict=True))
        run.train(25)
        assert undo.report() == "left out the updates of steps 5, 6, 19, 29"
        undo()
        run.train(1)
        assert undo.report().endswith("19, 29")


def test_a_norm_that_has_risen_for_good_is_let_through_after_half_a_window() -> None:
    made = healthy(0)
    made.optimizer.param_groups[0].update(lr=1e-12, momentum=0.0)
    with live(made) as run:
        run.train(1)
        undo = run.apply("skip_batch", max_deviations=8.0, window=20)
        assert isinstance(undo, ReportingUndo)
        run.train(20)
        for p in made.model.parameters():
            p.register_hook(lambda g: 1e3 * g)
        run.train(30)
        assert undo.report() == "left out the updates of steps " + ", ".join(map(str, range(21, 31)))


def test_parameters_that_join_follow_the_rate_of_their_group_and_its_schedule() -> None:
    made = head_left_out(0)
    scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1000)
    with live(made) as run:
        run.train(3)
        shown = run.preview("add_missing_parameters")
        assert [c.target for c in shown] == ["4.weight.optimizer_group", "4.bias.optimizer_group"]
        undo = run.apply("add_missing_parameters")
        head = made.model.get_parameter("4.weight")
        before = head.detach().clone()
        run.train(1)
        scheduler.step()
        torch.testing.assert_close(head, before - 0.1 * head.grad)  # pyright: ignore[reportOperatorIssue]
        assert len(made.optimizer.param_groups) == 1
        undo()
        after = head.detach().clone()
        run.train(2)
        assert torch.equal(head, after)


def test_layers_in_a_list_are_found_and_belong_to_the_state_that_a_trial_puts_back() -> None:
    made = listed(0)
    assert isinstance(made.model, Listed)
    with live(made) as run:
        run.train(3)
        names = [name for name, _ in run.run.missing_parameters()]
        assert names == ["layers[0].weight", "layers[0].bias", "layers[1].weight", "layers[1].bias"]
        state: TrainingState = run.tracker._run._state
        saved, before = state.take(gradients=True), made.model.layers[0].weight.detach().clone()
        undo = run.apply("add_missing_parameters")
        run.train(3)
        assert not torch.equal(before, made.model.layers[0].weight)
        undo()
        state.restore(saved)
        assert torch.equal(before, made.model.layers[0].weight)
        assert [name for name, _ in run.run.missing_parameters()] == names


@pytest.mark.slow
def test_layers_in_a_list_learn_once_they_have_joined() -> None:
    def accuracy(join: bool) -> float:
        made = listed(0)
        with live(made) as run:
            run.train(5)
            if join:
                run.apply("add_missing_parameters")
            return sum(run.train(150)[-30:]) / 30

    assert accuracy(True) < 0.7 * accuracy(False)


def test_nothing_is_missing_where_another_optimizer_holds_it() -> None:
    made = head_left_out(0)
    other = torch.optim.SGD(made.model.get_submodule("4").parameters(), 0.1)
    with live(made) as run:
        run.train(3)
        with pytest.raises(BadParameter, match="none is missing"):
            run.preview("add_missing_parameters")
    assert len(other.param_groups) == 1


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam, torch.optim.RMSprop])
def test_parameters_join_every_kind_of_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    model = network(0)
    made = program(model, kind(model[:4].parameters(), lr=0.01), classification(model, 0))  # type: ignore[call-arg]
    with live(made) as run:
        run.train(3)
        run.apply("add_missing_parameters")
        before = model[4].weight.detach().clone()
        run.train(1)
        assert not torch.equal(before, model[4].weight)


def test_frozen_layers_stand_still_and_the_others_train_as_before() -> None:
    with live(healthy(0)) as run:
        run.train(2)
        run.apply("freeze", layers="2, 4")
        model = run.program.model
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        run.train(1)
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert moved == {"0.weight", "0.bias"}
        assert all(p.grad is not None for p in model.parameters())


def test_unfrozen_layers_train_and_freeze_again() -> None:
    with live(frozen(0)) as run:
        run.train(2)
        undo = run.apply("unfreeze", layers="0")
        first = run.program.model.get_parameter("0.weight")
        before = first.detach().clone()
        run.train(1)
        assert not torch.equal(first, before)
        undo()
        assert not first.requires_grad
        with pytest.raises(BadParameter, match="train already"):
            run.preview("unfreeze", layers="2")


def test_a_reset_optimizer_begins_anew_and_its_undo_remembers() -> None:
    with live(healthy(0)) as run:
        run.train(5)
        optimizer = run.program.optimizer
        weight = run.program.model.get_parameter("0.weight")
        momentum = optimizer.state[weight]["momentum_buffer"].clone()
        undo = run.apply("reset_optimizer_state")
        assert not optimizer.state
        run.train(1)
        assert torch.equal(optimizer.state[weight]["momentum_buffer"], weight.grad)
        undo()
        assert torch.equal(optimizer.state[weight]["momentum_buffer"], momentum)


def test_betas_are_put_in_for_the_update_alone() -> None:
    model = network(0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    used: list[Any] = []
    with live(program(model, optimizer, classification(model, 0))) as run:
        run.apply("set_betas", beta2=0.95)
        optimizer.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["betas"]))
        run.train(1)
        assert used == [(0.9, 0.95)]
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        with pytest.raises(BadParameter, match="neither"):
            run.preview("set_betas")


def test_gradients_that_have_piled_up_are_not_used() -> None:
    model = network(0)
    made = program(model, torch.optim.SGD(model.parameters(), 0.01), classification(model, 0), clear=False)
    fresh = network(0)
    twin = program(fresh, torch.optim.SGD(fresh.parameters(), 0.01), classification(fresh, 0))
    with live(made) as run:
        run.train(5)
        fresh.load_state_dict(model.state_dict())
        run.apply("clear_gradients")
        state = torch.get_rng_state()
        run.train(4)
        torch.set_rng_state(state)
        for _ in range(4):
            twin.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
        assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def _scaled(scaler: torch.amp.GradScaler) -> tuple[Any, list[bool]]:
    """A program under a scaler whose scale overflows above 2^12; and whether each step was made."""
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loss_of = classification(model, 0)
    made: list[bool] = []

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of()
        scaler.scale(loss).backward()
        if scaler.get_scale() > 2**12:
            next(model.parameters()).grad[0, 0] = math.inf  # pyright: ignore[reportOptionalSubscript]
        before = model[0].bias.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        made.append(not torch.equal(before, model[0].bias))
        return loss.item()

    built = program(model, optimizer, loss_of)
    built.step = step
    return built, made


def test_a_lower_loss_scale_that_grows_slowly_skips_no_more_steps() -> None:
    def num_skipped(treat: bool) -> int:
        made, done = _scaled(torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2))
        with live(made) as run:
            run.train(3)
            if treat:
                shown = run.preview("lower_loss_scale", scale=2.0**8, growth_interval=1000)
                assert [c.new for c in shown] == [2.0**8, 1000]
                run.apply("lower_loss_scale", scale=2.0**8, growth_interval=1000)
            run.train(30)
        return 30 - sum(done[3:])

    assert num_skipped(False) >= 8
    assert num_skipped(True) == 0


def test_the_loss_scale_comes_back() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=7)
    made, _ = _scaled(scaler)
    with live(made) as run:
        run.train(1)
        before = scaler.state_dict()
        run.apply("lower_loss_scale", growth_interval=9)()
        assert scaler.state_dict() == before
        undo = run.apply("lower_loss_scale")
        assert scaler.get_scale() == 2.0**7
        scaler.update(2.0**5)
        undo()
        assert scaler.get_scale() == 2.0**5


def test_a_program_without_a_scaler_has_no_loss_scale() -> None:
    with live(healthy(0)) as run, pytest.raises(BadParameter, match="no enabled GradScaler"):
        run.preview("lower_loss_scale")
