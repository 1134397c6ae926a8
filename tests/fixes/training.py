"""Small trainings to which fixes are applied at step boundaries, and what every fix must hold to."""

from __future__ import annotations

import copy
import io
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer import FlowTracker
from gradtracer.fixes import LiveRun, Undo, get_fix
from gradtracer.records import Change, ParameterScalar
from gradtracer.training.state import TrainingState
from tests.training.models import mlp

torch.set_num_threads(1)


@dataclass
class Program:
    """A training program. `step()` is one whole step and returns its loss.

    Batches come from torch's global random state, so that a restored state sees the same ones again.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], float]
    replay: Callable[[int], Tensor] | None = None
    """The loss of a batch, for fixes that rehearse."""


Make = Callable[[int], Program]
"""Builds a program from a seed."""


def program(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], Tensor],
    *,
    clear: bool = True,
    after: Callable[[], None] = lambda: None,
) -> Program:
    """The usual loop; `after` comes last in a step."""

    def step() -> float:
        if clear:
            optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        after()
        return value.item()

    return Program(model, optimizer, step, replay=lambda i: loss())


def classification(model: nn.Module, seed: int, *, spread: float = 1.5) -> Callable[[], Tensor]:
    """Cross-entropy of a fresh batch of four Gaussian classes, `[32, 12]`, whose centres the seed gives.

    With a spread of 1.5 the loss falls to nearly 0; with 0.5 the classes overlap.
    """
    centres = spread * torch.randn(4, 12, generator=torch.Generator().manual_seed(seed))

    def loss() -> Tensor:
        y = torch.randint(0, 4, (32,))
        return F.cross_entropy(model(centres[y] + torch.randn(32, 12)), y)

    return loss


def network(seed: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Three layers for `classification`."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 24), activation(), nn.Linear(24, 24), activation(), nn.Linear(24, 4))


def healthy(seed: int) -> Program:
    """A run that learns, with momentum."""
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return program(model, optimizer, classification(model, seed, spread=0.5))


def healthy_adam(seed: int) -> Program:
    """A run that learns, with moments of both kinds."""
    model = network(seed)
    return program(model, torch.optim.AdamW(model.parameters(), 3e-3), classification(model, seed, spread=0.5))


def on_fixed_data(seed: int) -> Program:
    """A run on a small set of examples, under Adam."""
    training = mlp(seed)
    return program(training.model, torch.optim.Adam(training.model.parameters(), 3e-3), training.loss)


@dataclass
class Live:
    """A program with a tracker. Its fixes act between two steps, as under the controller."""

    program: Program
    run: LiveRun
    tracker: FlowTracker

    def train(self, steps: int) -> list[float]:
        """Losses, bit for bit."""
        losses = []
        for _ in range(steps):
            losses.append(self.program.step())
            self.tracker.step(losses[-1])
        return losses

    def preview(self, code: str, **parameters: ParameterScalar) -> list[Change]:
        """What the fix would change."""
        fix = get_fix(code)
        return fix.preview(self.run, fix.parse(parameters))

    def apply(self, code: str, **parameters: ParameterScalar) -> Undo:
        """Apply the fix now."""
        fix = get_fix(code)
        return fix.apply(self.run, fix.parse(parameters))


@contextmanager
def live(made: Program, *, optimizer: bool = True) -> Iterator[Live]:
    """Attach a tracker that nobody reaches from outside; with `optimizer`, it is told of it from the start."""
    tracker = FlowTracker(made.model, made.optimizer if optimizer else None, serve=False, replay=made.replay)
    try:
        yield Live(made, tracker._run, tracker)
    finally:
        tracker.close()
    assert not tracker.broken_reason


def final_losses(
    make: Make, seeds: Sequence[int], *, num_steps: int, code: str = "", at: int = 0, **parameters: ParameterScalar
) -> list[float]:
    """Median loss of the last fifth of a run by seed, with the fix (none where it is empty) from step `at` on.

    A loss that is not finite counts as infinite.
    """
    found = []
    for seed in seeds:
        with live(make(seed)) as one:
            losses = one.train(at)
            if code:
                one.apply(code, **parameters)
            losses += one.train(num_steps - at)
        found.append(statistics.median(x if math.isfinite(x) else math.inf for x in losses[-num_steps // 5 :]))
    return found


def assert_harmless(
    make: Make, code: str, *, num_steps: int = 120, at: int = 30, num_seeds: int = 4, **parameters: ParameterScalar
) -> None:
    """With the fix a healthy run ends no worse than without, by more than runs of other seeds differ."""
    seeds = range(num_seeds)
    without = final_losses(make, seeds, num_steps=num_steps)
    treated = final_losses(make, seeds, num_steps=num_steps, code=code, at=at, **parameters)
    assert statistics.fmean(treated) <= statistics.fmean(without) + statistics.stdev(without), (without, treated)


def assert_undone_exactly(
    make: Make, code: str, *, at: int = 4, in_force: int = 3, after: int = 5, **parameters: ParameterScalar
) -> None:
    """After undo, and the state put back as a trial does, the run goes on bit for bit as one that never had the fix.

    While the fix is in force the model can be copied and saved, and its state dict fits an untouched model.
    """
    untouched = make(0)
    with live(untouched) as twin:
        expected = twin.train(at + after)
    made = make(0)
    with live(made) as one:
        losses = one.train(at)
        state = TrainingState(made.model, one.run.optimizers)
        state.find_schedulers()
        saved, shape = state.take(gradients=True), _left_on(made.model, made.optimizer)
        undo = one.apply(code, **parameters)
        one.train(in_force)
        copy.deepcopy(made.model)
        torch.save(made.model, io.BytesIO())
        make(0).model.load_state_dict(made.model.state_dict())
        undo()
        assert _left_on(made.model, made.optimizer) == shape
        state.restore(saved)
        losses += one.train(after)
    assert losses == expected
    for name, tensor in untouched.model.state_dict().items():
        assert torch.equal(tensor, made.model.state_dict()[name]), name


def _left_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """What of a program is in no state dict: modules, hooks, attributes, flags of parameters, parameter groups."""
    modules = [
        (
            name,
            type(module),
            {k: id(v) if isinstance(v, dict) else repr(v) for k, v in vars(module).items() if not isinstance(v, dict)},
            [len(v) for k, v in vars(module).items() if k.endswith("_hooks") and hasattr(v, "__len__")],
            set(vars(module)),
        )
        for name, module in model.named_modules()
    ]
    parameters = [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]
    groups = [(sorted(group), [id(p) for p in group["params"]]) for group in optimizer.param_groups]
    return modules, parameters, groups, [id(p) for p in optimizer.state]
