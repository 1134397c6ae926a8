"""Each fix of optimizer and gradients: a run that needs it, healthy runs that it leaves alone, and its way back."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer.errors import BadParameter
from gradtracer.records import ParameterScalar
from tests.fixes.training import (
    Make,
    Program,
    assert_harmless,
    assert_undone_exactly,
    classification,
    final_losses,
    healthy,
    healthy_adam,
    live,
    network,
    program,
)
from tests.training.loops import PostNorm

# ------------------------------------------------------------------ runs that need a fix


def too_slow(seed: int) -> Program:
    model = network(seed)
    return program(model, torch.optim.SGD(model.parameters(), 1e-5), classification(model, seed))


def rate_ran_out(seed: int) -> Program:
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return program(model, optimizer, classification(model, seed), after=scheduler.step)


def unsettled(seed: int) -> Program:
    """A deep transformer, normalised behind its branches, at full rate from the first step on."""
    torch.manual_seed(seed)
    model = PostNorm(4)

    def loss() -> Tensor:
        x = torch.randint(0, 16, (32, 10))
        return F.cross_entropy(model(x), x[:, -3])

    return program(model, torch.optim.Adam(model.parameters(), 1e-2), loss)


def spiky(seed: int, size: float = 1e4) -> Program:
    """From step 20 on every tenth batch has a loss that is multiplied by a huge number."""
    made = network(seed)
    plain, count = classification(made, seed), itertools.count(1)

    def loss() -> Tensor:
        return plain() * (size if (n := next(count)) >= 20 and n % 10 == 0 else 1.0)

    return program(made, torch.optim.SGD(made.parameters(), 0.1), loss)


def one_wild_layer(seed: int) -> Program:
    """The last layer's gradient is far too large, the others' are right."""
    model = network(seed)
    model[4].weight.register_hook(lambda g: 1e4 * g)
    return program(model, torch.optim.SGD(model.parameters(), 0.1), classification(model, seed))


def with_gaps(seed: int) -> Program:
    """Every fourth batch has a row that is not finite."""
    model = network(seed)
    plain, count = classification(model, seed), itertools.count(1)

    def loss() -> Tensor:
        return plain() * (float("nan") if next(count) % 4 == 0 else 1.0)

    return program(model, torch.optim.SGD(model.parameters(), 0.1), loss)


def decayed_away(seed: int) -> Program:
    model = network(seed)
    return program(model, torch.optim.SGD(model.parameters(), 0.05, weight_decay=2.0), classification(model, seed))


def heavy(seed: int) -> Program:
    model = network(seed)
    return program(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.998), classification(model, seed))


def in_half(seed: int, eps: float = 1e-8) -> Program:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4)).half()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, eps=eps)
    centres = 1.5 * torch.randn(4, 12, generator=torch.Generator().manual_seed(seed))

    def loss() -> Tensor:
        y = torch.randint(0, 4, (32,))
        return F.cross_entropy(model((centres[y] + torch.randn(32, 12)).half()).float(), y)

    return program(model, optimizer, loss)


def spoilt_moments(seed: int) -> Program:
    """A wild gradient has filled Adam's second moments at step 20: its steps are tiny from then on."""
    model = network(seed)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    count = itertools.count()

    def after() -> None:
        if next(count) == 19:
            for state in optimizer.state.values():
                state["exp_avg_sq"].fill_(1e6)

    return program(model, optimizer, classification(model, seed), after=after)


def head_left_out(seed: int) -> Program:
    model = network(seed)
    groups = [{"params": model[:4].parameters(), "lr": 0.1}]
    with torch.no_grad():
        model[4].weight.mul_(0.01)
    return program(model, torch.optim.SGD(groups, lr=1e-6), classification(model, seed))


class Listed(nn.Module):
    """Layers in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(12, 24), nn.Linear(24, 24)]
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(0.3 * layer(x))
        return self.head(x)


def listed(seed: int) -> Program:
    torch.manual_seed(seed)
    model = Listed()
    return program(model, torch.optim.Adam(model.parameters(), 3e-3), classification(model, seed))


def frozen(seed: int) -> Program:
    model = network(seed)
    with torch.no_grad():
        model[0].weight.mul_(0.05)
    model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return program(model, torch.optim.SGD(trained, 0.05), classification(model, seed))


def one_wild_rate(seed: int) -> Program:
    model = network(seed)
    groups = [{"params": model[:4].parameters()}, {"params": model[4].parameters(), "lr": 30.0}]
    return program(model, torch.optim.SGD(groups, lr=0.1), classification(model, seed))


def never_cleared(seed: int) -> Program:
    model = network(seed)
    return program(model, torch.optim.SGD(model.parameters(), 0.2), classification(model, seed), clear=False)


def summed(seed: int) -> Program:
    model = network(seed)
    plain = classification(model, seed)
    return program(model, torch.optim.SGD(model.parameters(), 0.1), lambda: 200 * plain())


# ------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Case:
    """A run that needs a fix, and how the fix is used."""

    code: str
    needs_it: Make
    parameters: dict[str, ParameterScalar] = field(default_factory=dict)
    at: int = 0
    on_healthy: dict[str, ParameterScalar] | None = None
    healthy: Make = healthy
    refused: dict[str, ParameterScalar] = field(default_factory=dict)
    of_healthy: bool = True
    """Whether it can be applied to a healthy run at all."""


CASES = [
    Case("set_learning_rate", too_slow, {"learning_rate": 0.1}, on_healthy={"learning_rate": 0.04},
         refused={"learning_rate": 0.0}),
    Case("warmup", unsettled, {"steps": 100}, on_healthy={"steps": 20}, refused={"steps": 0}),
    Case("cosine_restart", rate_ran_out, {"steps": 100, "learning_rate": 0.1}, at=30,
         on_healthy={"steps": 110, "final_fraction": 0.1}, refused={"steps": 1}),
    Case("clip_grad_norm", spiky, {"max_norm": 2.0}, on_healthy={"max_norm": 2.0}, refused={"max_norm": -1.0}),
    Case("clip_grad_value", spiky, {"max_value": 0.1}, on_healthy={"max_value": 0.1}, refused={"max_value": 0.0}),
    Case("adaptive_grad_clip", one_wild_layer, {"clipping": 0.1}, on_healthy={"clipping": 0.1},
         refused={"clipping": 11.0}),
    Case("scale_gradients", summed, {"factor": 0.005}, on_healthy={"factor": 0.9}, refused={"factor": 0.0}),
    Case("skip_batch", spiky, {"max_deviations": 8.0}, on_healthy={"max_deviations": 8.0},
         refused={"window": 5, "num_updates": 1}),
    Case("skip_nonfinite_step", with_gaps),
    Case("set_weight_decay", decayed_away, {"weight_decay": 1e-4}, on_healthy={"weight_decay": 1e-4},
         refused={"weight_decay": -0.1}),
    Case("set_betas", heavy, {"beta1": 0.9}, on_healthy={"beta1": 0.85}, refused={"beta1": 1.0}),
    Case("set_epsilon", in_half, {"epsilon": 1e-4}, on_healthy={"epsilon": 1e-7}, healthy=healthy_adam,
         refused={"epsilon": 2.0}),
    Case("reset_optimizer_state", spoilt_moments, at=25, healthy=healthy_adam, refused={"optimizer": 7}),
    Case("add_missing_parameters", head_left_out, at=5, refused={"optimizer": 3}, of_healthy=False),
    Case("unfreeze", frozen, {"layers": "0"}, at=5, refused={"layers": "7"}, of_healthy=False),
    Case("freeze", one_wild_rate, {"layers": "4"}, on_healthy={"layers": "2"}, refused={"layers": "7"}),
    Case("clear_gradients", never_cleared, at=5),
]  # fmt: skip

by_code = pytest.mark.parametrize("case", CASES, ids=lambda case: case.code)


@pytest.mark.slow
@by_code
def test_a_run_that_needs_it_ends_far_better_with_it(case: Case) -> None:
    seeds = range(3)
    without = final_losses(case.needs_it, seeds, num_steps=150)
    treated = final_losses(case.needs_it, seeds, num_steps=150, code=case.code, at=case.at, **case.parameters)
    assert statistics.fmean(treated) < 0.5 * statistics.fmean(without), (without, treated)
    assert max(treated) < float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.of_healthy], ids=lambda case: case.code)
def test_a_healthy_run_is_not_hurt(case: Case) -> None:
    assert_harmless(case.healthy, case.code, **(case.on_healthy or {}))


@by_code
def test_undo_leaves_no_trace(case: Case) -> None:
    make = case.healthy if case.of_healthy else case.needs_it
    parameters = case.parameters if make is not case.healthy else case.on_healthy
    assert_undone_exactly(make, case.code, **(parameters or {}))


@pytest.mark.parametrize("case", [c for c in CASES if c.refused], ids=lambda case: case.code)
def test_what_cannot_be_is_refused(case: Case) -> None:
    with live(case.needs_it(0)) as run:
        run.train(2)
        with pytest.raises(BadParameter):
            run.preview(case.code, **case.refused)


@by_code
def test_a_preview_names_what_would_change(case: Case) -> None:
    with live(case.needs_it(0)) as run:
        run.train(case.at)
        before = {name: t.clone() for name, t in run.program.model.state_dict().items()}
        changes = run.preview(case.code, **case.parameters)
        assert changes
        assert all(c.old != c.new for c in changes)
        assert all(torch.equal(t, before[name]) for name, t in run.program.model.state_dict().items())
