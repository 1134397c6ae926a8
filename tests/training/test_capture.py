"""What is recorded equals an independent computation in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer import FlowTracker
from gradtracer.journal import Journal
from gradtracer.records import ModelDescription, OptimizerDescription
from gradtracer.samples import LayerTable
from gradtracer.series import Series
from tests.training.models import Training, cnn, mlp


def _recorded(tracker: FlowTracker) -> Series:
    with Journal(tracker.directory) as journal:
        return Series.from_journal(journal)


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def test_gradients_weights_and_updates_of_every_layer_match_a_float64_twin() -> None:
    training = cnn()
    twin: list[dict[tuple[str, str], float]] = []
    losses: list[float] = []
    last: dict[str, Tensor] = {}
    with FlowTracker(training.model, training.optimizer, track_interval=1) as tracker:
        for _ in range(12):
            training.optimizer.zero_grad()
            loss = training.loss()
            loss.backward()
            row: dict[tuple[str, str], float] = {}
            before = {n: p.detach().double().clone() for n, p in training.model.named_parameters()}
            gradients = {n: p.grad.double().clone() for n, p in training.model.named_parameters() if p.grad is not None}
            training.optimizer.step()
            tracker.step(loss.item())
            losses.append(loss.item())
            for layer in ("conv", "norm", "head"):
                names = [f"{layer}.weight", f"{layer}.bias"]
                g = torch.cat([gradients[n].flatten() for n in names])
                w = torch.cat([before[n].flatten() for n in names])
                after = dict(training.model.named_parameters())
                moved = torch.cat([(after[n].detach().double() - before[n]).flatten() for n in names])
                row[layer, "grad_norm"] = float(g.norm())
                row[layer, "grad_mean"] = float(g.mean())
                row[layer, "grad_std"] = float(g.std(unbiased=False))
                row[layer, "weight_norm"] = float(w.norm())
                row[layer, "update_ratio"] = float(moved.norm() / w.norm())
                if layer in last:
                    parts = [(gradients[n].flatten(), last[n].flatten()) for n in names]
                    dot = sum(float(a @ b) for a, b in parts)
                    row[layer, "step_cosine"] = dot / sum(float(a.norm() * b.norm()) for a, b in parts)
            for layer in ("conv", "norm", "head"):
                last[layer] = torch.empty(0)
                last |= {n: gradients[n] for n in (f"{layer}.weight", f"{layer}.bias")}
            row["head", "zero_grad_fraction"] = float(
                np.mean([(r == 0).all().item() for r in gradients["head.weight"]])
            )
            row["", "total"] = _norm(list(gradients.values()))
            twin.append(row)
    series = _recorded(tracker)
    assert series.steps.tolist() == list(range(12))
    assert series.run("loss") == pytest.approx(losses, rel=1e-6)
    assert series.run("grad_norm") == pytest.approx([row["", "total"] for row in twin], rel=1e-5)
    for layer, signal in {key for row in twin for key in row if key[0]}:
        steps, values = series.layer(layer, signal)
        expected = [twin[s][layer, signal] for s in steps.tolist()]
        assert len(steps) == sum((layer, signal) in row for row in twin)
        # Cosines and means are differences of large sums; the update is a difference of float32 weights.
        assert values == pytest.approx(expected, rel=2e-3, abs=2e-6), (layer, signal)


def test_a_cosine_of_minus_one_shows_an_oscillating_gradient() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 2.0)  # the curvature is 1: the weight flips its sign every step
    with FlowTracker(model, optimizer, track_interval=1) as tracker:
        for _ in range(6):
            optimizer.zero_grad()
            (0.5 * model(torch.ones(1, 1)).square().sum()).backward()
            optimizer.step()
    _, cosines = _recorded(tracker).layer("(root)", "step_cosine")
    assert cosines == pytest.approx([-1.0] * 5)


def test_growth_rate_is_the_slope_of_the_log_norm() -> None:
    weight = nn.Parameter(torch.ones(()))
    model = nn.Module()
    model.register_parameter("weight", weight)
    optimizer = torch.optim.SGD([weight], 0.0)
    with FlowTracker(model, optimizer, track_interval=1) as tracker:
        for step in range(12):
            optimizer.zero_grad()
            (weight * math.exp(0.3 * step)).backward()
            optimizer.step()
    steps, growth = _recorded(tracker).layer("(root)", "grad_growth_rate")
    assert steps.tolist() == list(range(3, 12))
    assert growth == pytest.approx([0.3] * 9, rel=1e-4)


def test_activation_statistics_match_a_float64_twin() -> None:
    training = mlp()
    outputs: dict[str, Tensor] = {}
    x, y = torch.randn(40, 12), torch.randint(0, 3, (40,))
    with FlowTracker(training.model, training.optimizer) as tracker:
        training.optimizer.zero_grad()
        h = x
        F.cross_entropy(training.model(x), y).backward()
        with torch.no_grad():
            for name, module in training.model.named_children():
                h = outputs[name] = module(h)
        training.optimizer.step()
        tracker.step()
    series = _recorded(tracker)

    def value(layer: str, signal: str) -> float:
        return series.layer(layer, signal)[1].item()

    for name, output in outputs.items():
        assert value(name, "activation_mean") == pytest.approx(float(output.double().mean()), abs=1e-6)
        assert value(name, "activation_std") == pytest.approx(float(output.double().std(unbiased=False)), rel=1e-5)
    assert value("1", "activation_zero_fraction") == pytest.approx(float((outputs["1"] == 0).double().mean()))
    assert value("3", "saturated_fraction") == pytest.approx(float((outputs["3"].abs() > 0.99).double().mean()))
    centred = outputs["2"].double()
    eigenvalues = torch.linalg.eigvalsh(torch.cov(centred.T))
    assert value("2", "effective_rank") == pytest.approx(
        float(eigenvalues.sum() ** 2 / eigenvalues.square().sum()), rel=1e-3
    )
    model = series.model
    assert model is not None
    assert [layer.name for layer in model.layers] == ["0", "1", "2", "3", "4"]
    assert [layer.fed_by for layer in model.layers] == [None, "0", "1", "2", "3"]


@pytest.mark.slow
def test_a_unit_counts_as_dead_after_256_rows_without_output_and_lives_again_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].bias[:2] = -100.0
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    generator = torch.Generator().manual_seed(0)
    with FlowTracker(model, optimizer, track_interval=1) as tracker:
        for step in range(8):
            if step == 6:
                with torch.no_grad():
                    model[0].bias[:2] = 100.0
            optimizer.zero_grad()
            model(torch.randn(64, 4, generator=generator)).mean().backward()
            optimizer.step()
    _, dead = _recorded(tracker).layer("1", "dead_unit_fraction")
    assert dead == pytest.approx([0, 0, 0, 0.25, 0.25, 0.25, 0, 0])


def test_accumulated_gradients_are_read_once_as_the_optimizer_gets_them() -> None:
    training = mlp()
    expected, losses = [], []
    with FlowTracker(training.model) as tracker:
        for _ in range(5):
            training.optimizer.zero_grad()
            parts = [training.loss() / 4 for _ in range(4)]
            for part in parts:
                part.backward()
            losses.append(sum(p.item() for p in parts))
            expected.append(_norm([p.grad for p in training.model.parameters() if p.grad is not None]))
            training.optimizer.step()
    series = _recorded(tracker)
    assert series.run("grad_norm") == pytest.approx(expected, rel=1e-5)
    assert series.run("loss") == pytest.approx(losses, rel=1e-5)


def test_a_loss_scaled_by_a_grad_scaler_is_recorded_unscaled_and_so_are_the_gradients() -> None:
    training = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses, norms = [], []
    with FlowTracker(training.model) as tracker:
        for _ in range(4):
            training.optimizer.zero_grad()
            loss = training.loss()
            scaler.scale(loss).backward()
            norms.append(_norm([p.grad / 2.0**12 for p in training.model.parameters() if p.grad is not None]))
            scaler.step(training.optimizer)
            scaler.update()
            losses.append(loss.item())
    series = _recorded(tracker)
    assert series.run("loss") == pytest.approx(losses, rel=1e-6)
    assert series.run("grad_norm") == pytest.approx(norms, rel=1e-4)


@pytest.mark.slow
def test_evaluation_passes_between_steps_leave_no_trace() -> None:
    runs = []
    for evaluate in (True, False):
        training = cnn()
        with FlowTracker(training.model, track_interval=1) as tracker:
            for _ in range(5):
                training.run(1)
                if evaluate:
                    state = torch.get_rng_state()
                    training.model.eval()
                    with torch.no_grad():
                        training.model(100 * torch.randn(64, 1, 8, 8))
                    training.model.train()
                    torch.set_rng_state(state)
        runs.append(_recorded(tracker))
    assert runs[0].run("loss").tolist() == runs[1].run("loss").tolist()
    for (_, a), (_, b) in zip(runs[0].tables, runs[1].tables, strict=True):
        assert np.array_equal(_without_costs(a), _without_costs(b), equal_nan=True)


def _without_costs(table: LayerTable) -> np.ndarray:
    """The numbers that depend on the training alone, and not on the clock and the memory of this process."""
    costs = {"data_wait_s", "compute_s", "resident_bytes"}
    return table.values[[i for i, (_, signal) in enumerate(table.layout.columns) if signal not in costs]]


@pytest.mark.slow
def test_closures_sparse_gradients_half_precision_and_shared_weights_are_read() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    with FlowTracker(model) as tracker:
        for _ in range(3):
            optimizer.step(closure)
    series = _recorded(tracker)
    assert series.run("grad_norm")[-1] == pytest.approx(
        _norm([p.grad for p in model.parameters() if p.grad is not None]), rel=1e-5
    )

    table = nn.Embedding(10, 3, sparse=True)
    sparse = torch.optim.SparseAdam(table.parameters())
    with FlowTracker(table) as tracker:
        table(torch.tensor([1, 1, 4])).sum().backward()
        sparse.step()
    assert _recorded(tracker).run("grad_norm") == pytest.approx([math.sqrt(3 * 4 + 3 * 1)])

    half = nn.Linear(100, 100, bias=False).to(torch.bfloat16)
    half_optimizer = torch.optim.SGD(half.parameters(), 1e-3)
    with FlowTracker(half) as tracker:
        (half(torch.ones(1, 100, dtype=torch.bfloat16)).sum() * 1e4).backward()
        half_optimizer.step()
    assert _recorded(tracker).run("grad_norm") == pytest.approx([1e4 * 100], rel=1e-2)

    tied = nn.ModuleList([nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)])
    tied[1].weight = tied[0].weight
    tied_optimizer = torch.optim.SGD(tied.parameters(), 0.1)
    with FlowTracker(tied) as tracker:
        F.cross_entropy(tied[1](tied[0](torch.tensor([1, 2]))), torch.tensor([2, 3])).backward()
        tied_optimizer.step()
    series = _recorded(tracker)
    assert series.layer("0", "grad_norm")[1] == pytest.approx([_norm([tied[0].weight.grad])], rel=1e-5)
    assert len(series.layer("1", "grad_norm")[1]) == 0


def test_a_gradient_whose_float32_sum_of_squares_overflows_is_finite() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with FlowTracker(model) as tracker:
        (model(torch.ones(1, 2)) * 1e25).sum().backward()
        optimizer.step()
    series = _recorded(tracker)
    assert series.run("grad_norm") == pytest.approx([1e25 * math.sqrt(2)], rel=1e-5)
    assert series.run("num_non_finite_grads").tolist() == [0]


def test_two_optimizers_that_take_turns_make_one_step_and_each_layer_keeps_its_own_gradient() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 1)})
    first = torch.optim.SGD(model["g"].parameters(), 0.01)
    second = torch.optim.SGD(model["d"].parameters(), 0.01)
    norms: dict[str, list[float]] = {"g": [], "d": []}
    with FlowTracker(model, track_interval=1) as tracker:
        for _ in range(6):
            second.zero_grad()
            model["d"](model["g"](torch.randn(8, 3)).detach()).square().mean().backward()
            norms["d"].append(_norm([p.grad for p in model["d"].parameters()]))
            second.step()
            first.zero_grad()
            model["d"](model["g"](torch.randn(8, 3))).mean().backward()  # leaves a gradient on d as well
            norms["g"].append(_norm([p.grad for p in model["g"].parameters()]))
            first.step()
    series = _recorded(tracker)
    assert series.steps.tolist() == list(range(6))
    for name in ("g", "d"):
        assert series.layer(name, "grad_norm")[1] == pytest.approx(norms[name], rel=1e-5)


@pytest.mark.slow
def test_parameters_that_no_optimizer_holds_are_named_and_idle_optimizers_are_not_blamed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    with FlowTracker(model, optimizer) as tracker:
        for _ in range(4):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
    described = _recorded(tracker).last_observation(OptimizerDescription)
    assert described is not None
    assert described.missing == ("2.weight", "2.bias")

    idle = torch.optim.SGD(model[2].parameters(), 0.1)
    with FlowTracker(model, optimizer) as tracker:
        for _ in range(4):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
    described = _recorded(tracker).last_observation(OptimizerDescription)
    assert described is not None
    assert described.missing == ()
    assert idle.param_groups


@pytest.mark.slow
def test_a_compiled_model_is_told_and_its_gradients_are_still_read() -> None:
    training = mlp()
    compiled = torch.compile(training.model, backend="eager")
    with FlowTracker(compiled, training.optimizer) as tracker:
        training.optimizer.zero_grad()
        compiled(torch.randn(4, 12)).sum().backward()
        training.optimizer.step()
        tracker.step()
    series = _recorded(tracker)
    assert any("compiled" in getattr(o, "message", "") for o in series.observations)
    assert series.run("grad_norm")[0] > 0
    assert series.last_observation(ModelDescription) is not None


@pytest.mark.slow
def test_numbers_that_wait_on_a_device_come_out_the_same_as_those_read_at_once() -> None:
    recorded = []
    for waits in (False, True):
        training = mlp()
        tracker = FlowTracker(training.model, training.optimizer)
        tracker._capture._on_device = waits  # no accelerator here: the same path with tensors of the CPU
        training.run(150, lambda loss, tracker=tracker: tracker.step(loss.detach()))
        tracker.close()
        recorded.append(_recorded(tracker))
    assert recorded[0].steps.tolist() == recorded[1].steps.tolist() == list(range(150))
    assert np.array_equal(recorded[0].columns.numbers[:, :3], recorded[1].columns.numbers[:, :3])
    for (s, a), (t, b) in zip(recorded[0].tables, recorded[1].tables, strict=True):
        assert s == t
        assert a.layout == b.layout
        assert _without_costs(a) == pytest.approx(_without_costs(b), nan_ok=True)


@pytest.mark.slow
def test_steps_that_a_grad_scaler_skips_are_counted_where_the_user_marks_steps() -> None:
    training: Training = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with FlowTracker(training.model, training.optimizer) as tracker:
        for step in range(4):
            training.optimizer.zero_grad()
            loss = training.loss() * (math.inf if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            tracker.step()
    series = _recorded(tracker)
    assert series.steps.tolist() == [0, 1, 2, 3]
    assert np.isnan(series.run("grad_norm")).tolist() == [False, False, True, False]
    assert np.isinf(series.run("loss")).tolist() == [False, False, True, False]
