"""The tracker on two ranks of a gloo process group: real processes, under DistributedDataParallel and fully_shard."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from gradtracer import FlowTracker
from gradtracer.control import FixRequest, InterventionReply, Refusal, Reply, RevertRequest, TrainingRequest
from gradtracer.fixes.set_learning_rate import SetLearningRate
from gradtracer.journal import Journal
from gradtracer.records import CaptureNotice, Intervention, NonFiniteOrigin, ParameterScalar
from gradtracer.series import Series
from gradtracer.training.controller import TrainingStopped
from tests.deadline import wait_until
from tests.training import rank_programs
from tests.training.rank_programs import BATCH, SIZE, Distributed, ask, batch, launch, whole

pytestmark = pytest.mark.slow

WRAPS = ("ddp", "fsdp")


def request(code: str, mode: Any = "apply", **parameters: ParameterScalar) -> FixRequest:
    return FixRequest(fix=code, mode=mode, parameters=parameters, requester="test")


def done(reply: Reply | None) -> Intervention:
    assert isinstance(reply, InterventionReply), reply
    return reply.intervention


def refusal(reply: Reply | None) -> str:
    assert isinstance(reply, Refusal), reply
    return reply.message


def series_of(tracker: FlowTracker) -> Series:
    with Journal(tracker.directory) as journal:
        return Series.from_journal(journal)


def notices(tracker: FlowTracker) -> list[str]:
    return [o.message for o in series_of(tracker).observations if isinstance(o, CaptureNotice)]


def record_rates(training: Distributed) -> list[float]:
    """The rate that each update uses, as the optimizer sees it."""
    rates: list[float] = []
    training.optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    return rates


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ------------------------------------------------------------------------------------------- recording changes nothing


def _trained(rank: int, folder: Path, wrap: str, tracked: bool) -> Any:
    training = Distributed(rank, wrap)
    tracker = FlowTracker(training.model, training.optimizer, track_interval=4) if tracked else None
    training.train(30, tracker)
    if tracker is not None:
        tracker.close()
        assert not tracker.broken_reason, tracker.broken_reason
    return training.losses, training.weights(), torch.get_rng_state()


@pytest.mark.parametrize("wrap", WRAPS)
def test_trackers_on_all_ranks_change_no_bit(tmp_path: Path, wrap: str) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    tracked = launch(_trained, tmp_path / "with", wrap, True)
    plain = launch(_trained, tmp_path / "without", wrap, False)
    for (losses, weights, random), (losses_plain, weights_plain, random_plain) in zip(tracked, plain, strict=True):
        assert losses == losses_plain
        assert same(weights, weights_plain)
        assert torch.equal(random, random_plain)


# ------------------------------------------------------------------------------------------- fixes


def _fixed(rank: int, folder: Path, wrap: str) -> Any:
    training = Distributed(rank, wrap)
    rates = record_rates(training)
    before: list[list[torch.Tensor]] = []
    training.optimizer.register_step_pre_hook(lambda *_: before.append(training.weights()))
    with FlowTracker(training.model, training.optimizer) as tracker:
        training.train(4, tracker)
        preview = ask(training, tracker, request("set_learning_rate", "dry_run", learning_rate=1e-3))
        applied = ask(training, tracker, request("set_learning_rate", learning_rate=1e-3))
        number = done(applied).id if rank == 0 else ""
        reverted = ask(training, tracker, RevertRequest(intervention_id=number or "none", requester="test"))
        saved = ask(training, tracker, TrainingRequest(action="checkpoint", requester="test"))
        name = done(saved).snapshot if rank == 0 else None
        back = ask(training, tracker, request("rollback", snapshot=name))
        assert not tracker.broken_reason, tracker.broken_reason
        return {
            "preview": preview, "applied": applied, "reverted": reverted, "saved": saved, "back": back, "rates": rates,
            "before": before, "after": training.weights(),
        }  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPS)
def test_fixes_and_rollback_take_effect_at_the_same_step_on_all_ranks(tmp_path: Path, wrap: str) -> None:
    first, second = launch(_fixed, tmp_path, wrap)
    assert done(first["preview"]).state.value == "previewed"
    step = done(first["applied"]).applied_step
    assert step is not None
    slow = [i for i, rate in enumerate(first["rates"]) if rate == 1e-3]
    assert slow[0] == step + 1
    assert slow == list(range(slow[0], slow[-1] + 1))
    assert slow[-1] < len(first["rates"]) - 1, "it was taken back"
    assert first["rates"] == second["rates"]
    assert done(first["reverted"]).state.value == "kept"
    saved, back = done(first["saved"]), done(first["back"])
    assert back.state.value == "applied"
    assert saved.ended_step is not None
    assert back.applied_step is not None
    assert saved.snapshot == f"step-{saved.ended_step}"
    weights = first["before"]
    assert same(weights[saved.ended_step + 1], weights[back.applied_step + 1])
    assert not same(weights[saved.ended_step + 1], weights[back.applied_step])
    assert all(same(mine, theirs) for mine, theirs in zip(weights, second["before"], strict=True))
    assert same(first["after"], second["after"])


def _clipped(rank: int, folder: Path, wrap: str) -> Any:
    training = Distributed(rank, wrap)
    norms: list[float] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients = [whole(p.grad) for p in training.model.parameters() if p.grad is not None]
        if gradients:  # none where the update is skipped
            norms.append(float(torch.cat([g.flatten().double() for g in gradients]).norm()))

    training.optimizer.register_step_pre_hook(note)
    with FlowTracker(training.model, training.optimizer) as tracker:
        training.train(4, tracker)
        clipped = ask(training, tracker, request("clip_grad_norm", max_norm=1e-3), extra_steps=6)
        skipping = ask(training, tracker, request("skip_nonfinite_step"))
        before = training.weights()
        momenta = [whole(s["momentum_buffer"]).clone() for s in training.optimizer.state.values()]
        # What only one rank sees: its own gradient turns bad behind the reduction.
        training.optimizer.zero_grad()
        x, y = batch(0)
        F.mse_loss(training.model(x), y).backward()
        if rank == 1:
            gradient: Any = next(training.model.parameters()).grad
            (gradient.to_local() if wrap == "fsdp" else gradient).fill_(math.nan)
        training.optimizer.step()
        after = training.weights()
        momenta_after = [whole(s["momentum_buffer"]).clone() for s in training.optimizer.state.values()]
        tracker.step()
        training.train(3, tracker)
        assert not tracker.broken_reason, tracker.broken_reason
        return {
            "clipped": clipped, "skipping": skipping, "norms": norms, "after": training.weights(),
            "untouched": same(before, after) and same(momenta, momenta_after),
        }  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPS)
def test_clipping_uses_the_global_norm_and_a_bad_update_is_skipped_on_all_ranks(tmp_path: Path, wrap: str) -> None:
    first, second = launch(_clipped, tmp_path, wrap)
    step = done(first["clipped"]).applied_step
    assert step is not None
    finite = [n for n in first["norms"] if math.isfinite(n)]
    assert min(finite[: step + 1]) > 1e-3
    # torch divides by the norm plus 1e-6
    assert finite[step + 1 : step + 6] == pytest.approx([1e-3] * 5, rel=1e-3)
    assert first["untouched"]
    assert second["untouched"]
    assert same(first["after"], second["after"])


def _tried(rank: int, folder: Path, wrap: str) -> Any:
    training = Distributed(rank, wrap)
    with FlowTracker(training.model, training.optimizer) as tracker:
        training.train(4, tracker)
        wanted = FixRequest(
            fix="set_learning_rate", mode="trial", parameters={"learning_rate": 1e-9}, requester="test", trial_steps=8,
            wait_s=50,
        )  # fmt: skip
        reply = ask(training, tracker, wanted)
        assert not tracker.broken_reason, tracker.broken_reason
        return reply, training.losses, training.weights()


def _untried(rank: int, folder: Path, steps: int, wrap: str) -> Any:
    training = Distributed(rank, wrap)
    training.train(steps)
    return training.losses, training.weights()


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_trial_runs_on_all_ranks_and_leaves_no_trace(tmp_path: Path, wrap: str) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    first, second = launch(_tried, tmp_path / "with", wrap)
    trial = done(first[0]).trial
    assert trial is not None
    assert [len(b.losses) for b in trial.branches] == [8, 8]
    plain = launch(_untried, tmp_path / "without", len(first[1]), wrap)
    for tried, (losses, weights) in zip((first, second), plain, strict=True):
        assert tried[1] == losses
        assert same(tried[2], weights)


def _failing_on_one(rank: int, folder: Path, wrap: str) -> Any:
    training = Distributed(rank, wrap)
    rates = record_rates(training)
    if rank == 1:

        def break_down(*_: Any) -> Any:
            raise RuntimeError("out of luck")

        SetLearningRate.apply = break_down  # type: ignore[method-assign]
    with FlowTracker(training.model, training.optimizer) as tracker:
        training.train(4, tracker)
        reply = ask(training, tracker, request("set_learning_rate", learning_rate=1e-3))
        again = ask(training, tracker, TrainingRequest(action="checkpoint", requester="test"))
        return reply, again, rates, training.weights()


def test_what_fails_on_one_rank_is_taken_back_on_all(tmp_path: Path) -> None:
    first, second = launch(_failing_on_one, tmp_path, "ddp")
    assert "rank 1" in refusal(first[0])
    assert done(first[1]).state.value == "kept"
    assert set(first[2]) == set(second[2]) == {1e-2}
    assert same(first[3], second[3])


def _made_worse(rank: int, folder: Path) -> Any:
    training = Distributed(rank, "ddp")
    with FlowTracker(training.model, training.optimizer) as tracker:
        training.train(50, tracker)
        reply = ask(training, tracker, request("set_learning_rate", learning_rate=2.0), extra_steps=0)
        state = done(reply).id if rank == 0 else ""

        def ended() -> bool:
            return next(i for i in series_of(tracker).interventions if i.id == state).state.value == "reverted"

        going, num_steps = torch.ones(1), 0
        while going.item() and num_steps < 3000:
            training.train(5, tracker)
            num_steps += 5
            if rank == 0:
                tracker._recorder.flush(5.0)
                going.fill_(0.0 if ended() else 1.0)
            dist.broadcast(going, 0)
        return reply, going.item(), training.weights()


def test_a_fix_that_makes_things_worse_is_taken_back_on_all_ranks(tmp_path: Path) -> None:
    first, second = launch(_made_worse, tmp_path)
    assert done(first[0]).state.value == "applied"
    assert first[1] == 0.0, "it was not taken back"
    assert same(first[2], second[2])
    assert all(bool(w.isfinite().all()) for w in first[2])


def _paused(rank: int, folder: Path) -> Any:
    training = Distributed(rank, "ddp")
    rates = record_rates(training)
    replies: list[Reply] = []
    with FlowTracker(training.model, training.optimizer) as tracker:
        training.train(4, tracker)
        if rank == 0:

            def agent() -> None:
                from gradtracer.control import ControlClient
                from gradtracer.home import read_manifest

                client = ControlClient(read_manifest(tracker.directory))
                for wanted in (
                    TrainingRequest(action="pause", requester="test"),
                    request("set_learning_rate", learning_rate=1e-3),
                    TrainingRequest(action="resume", requester="test"),
                    TrainingRequest(action="stop", requester="test"),
                ):
                    replies.append(client.ask(wanted, 60.0))

            threading.Thread(target=agent, daemon=True).start()
        stopped = False
        try:
            training.train(100_000, tracker)
        except TrainingStopped:
            stopped = True
        if rank == 0:
            wait_until(lambda: len(replies) == 4)
        return replies, stopped, training.num_steps, rates, training.weights()


def test_all_ranks_pause_take_a_fix_in_the_pause_resume_and_stop_together(tmp_path: Path) -> None:
    first, second = launch(_paused, tmp_path)
    paused, fixed, resumed, stopped = map(done, first[0])
    assert paused.applied_step == fixed.applied_step == resumed.ended_step
    assert stopped.ended_step == first[2] - 1
    assert first[1]
    assert second[1]
    assert first[2] == second[2]
    assert first[3] == second[3]
    assert first[3].index(1e-3) == fixed.applied_step + 1  # type: ignore[operator]
    assert same(first[4], second[4])


# ------------------------------------------------------------------------------------------- ranks that take no part


def _main_alone(rank: int, folder: Path, wrap: str) -> Any:
    training = Distributed(rank, wrap)
    tracker = FlowTracker(training.model, training.optimizer) if rank == 0 else None
    training.train(4, tracker)
    reply = ask(training, tracker, request("set_learning_rate", learning_rate=1e-3))
    training.train(20, tracker)
    if tracker is not None:
        tracker.close()
        assert not tracker.broken_reason, tracker.broken_reason
    return reply, training.num_steps, training.weights()


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_tracker_on_rank_0_alone_trains_on_and_says_what_a_fix_needs(tmp_path: Path, wrap: str) -> None:
    first, second = launch(_main_alone, tmp_path, wrap)
    assert "rank 1 has no tracker" in refusal(first[0])
    assert "Make the FlowTracker on every rank" in refusal(first[0])
    assert first[1] == second[1]
    assert same(first[2], second[2])


def _left_alone(rank: int, folder: Path, wrap: str) -> Any:
    training = Distributed(rank, wrap)
    tracker = FlowTracker(training.model, training.optimizer)
    training.train(4, tracker)
    if rank == 1:
        os._exit(0)
    reply: list[Reply] = []

    def agent() -> None:
        from gradtracer.control import ControlClient
        from gradtracer.home import read_manifest

        client = ControlClient(read_manifest(tracker.directory))
        reply.append(client.ask(request("set_learning_rate", learning_rate=1e-3), 60.0))

    thread = threading.Thread(target=agent, daemon=True)
    thread.start()
    error = ""
    try:
        while not reply:
            training.train(1, tracker)
    except RuntimeError as lost:  # what the training's own communication says of a peer that is gone
        error = str(lost)
    tracker.close()
    thread.join(60.0)
    return refusal(reply[0]), error, notices(tracker)


def test_a_dead_rank_is_named_and_the_other_trains_on(tmp_path: Path) -> None:
    ((message, error, told),) = launch(_left_alone, tmp_path, "none", ranks=[0])
    assert not error
    assert "rank 1 did not answer" in message
    assert any("rank 1 did not answer" in notice for notice in told)


def test_a_run_that_ends_with_its_dead_rank_ends_as_without_a_tracker(tmp_path: Path) -> None:
    ((message, error, _),) = launch(_left_alone, tmp_path, "ddp", ranks=[0])
    assert error
    assert "ended" in message


def _uneven(rank: int, folder: Path) -> Any:
    training = Distributed(rank, "none")
    rates = record_rates(training)
    x = torch.randn(512, 512)
    with FlowTracker(training.model, training.optimizer) as tracker:
        reply: list[Reply] = []
        if rank == 0:

            def agent() -> None:
                from gradtracer.control import ControlClient
                from gradtracer.home import read_manifest

                client = ControlClient(read_manifest(tracker.directory))
                reply.append(client.ask(request("set_learning_rate", learning_rate=1e-3), 60.0))

            threading.Thread(target=agent, daemon=True).start()
        for _ in range(20_000):
            training.train(1, tracker)
            if rank == 1:
                x @ x  # several times as long as the step itself
            if 1e-3 in rates[-2:-1]:
                break
        return reply, rates


def test_a_rank_that_is_slower_is_waited_for(tmp_path: Path) -> None:
    first, second = launch(_uneven, tmp_path)
    step = done(first[0][0]).applied_step
    assert step is not None
    assert first[1].index(1e-3) == second[1].index(1e-3) == step + 1


# ------------------------------------------------------------------------------------------- what is read


def reference(steps: int) -> list[list[float]]:
    """Norms of the parameters' gradients in one process on the global batch, in float64, by step."""
    model = rank_programs.model().double()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    found: list[list[float]] = []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x.double()), y.double()).backward()
        found.append([float(p.grad.norm()) for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return found


def _read(rank: int, folder: Path, wrap: str, steps: int) -> Any:
    training = Distributed(rank, wrap)
    tracker = FlowTracker(training.model, training.optimizer, track_interval=7)
    training.train(steps, tracker)
    tracker.close()
    if rank != 0:
        return None
    series = series_of(tracker)
    prefix = "module." if wrap == "ddp" else ""
    layers = {n: series.layer(prefix + n, "grad_norm") for n in ("0", "2", "4")}
    weights = {n: series.layer(prefix + n, "weight_norm") for n in ("0", "2", "4")}
    return series.run("grad_norm"), layers, weights, [e.kind for e in tracker.events if e.severity.rank > 0]


@pytest.mark.parametrize("wrap", WRAPS)
def test_gradient_norms_are_those_of_one_process_on_the_global_batch(tmp_path: Path, wrap: str) -> None:
    steps = 24
    norms, layers, weights, alarms = launch(_read, tmp_path, wrap, steps)[0]
    expected = reference(steps)
    assert norms.tolist() == pytest.approx([math.hypot(*row) for row in expected], rel=1e-4)
    for n, (at, values) in layers.items():
        first = int(n)
        assert set(at.tolist()) >= {0, 1, 5, 9, 10, 14, 20, 21}
        assert values.tolist() == pytest.approx([math.hypot(*expected[s][first : first + 2]) for s in at], rel=1e-4)
    start = rank_programs.model()
    for n, (at, values) in weights.items():
        assert at[0] == 0
        assert values[0] == pytest.approx(
            math.hypot(*(float(p.detach().norm()) for p in start[int(n)].parameters())), rel=1e-5
        )
    assert not alarms


def _main_reads_alone(rank: int, folder: Path) -> Any:
    training = Distributed(rank, "fsdp")
    tracker = FlowTracker(training.model, training.optimizer) if rank == 0 else None
    training.train(12, tracker)
    if tracker is None:
        return None
    tracker.close()
    return series_of(tracker).run("grad_norm"), series_of(tracker).run("loss"), notices(tracker)


def test_norms_of_sharded_gradients_are_missing_where_only_rank_0_is_tracked(tmp_path: Path) -> None:
    norms, losses, told = launch(_main_reads_alone, tmp_path)[0]
    assert len(norms) == len(losses) == 12
    assert all(math.isnan(n) for n in norms)
    assert all(math.isfinite(x) for x in losses)
    assert any("sharded" in notice for notice in told)


def _blown_up(rank: int, folder: Path) -> Any:
    training = Distributed(rank, "fsdp")
    with FlowTracker(training.model, training.optimizer) as tracker:
        training.train(5, tracker)
        with torch.no_grad():
            layer = training.plain[2]
            assert isinstance(layer, nn.Linear)
            layer.bias.fill_(math.nan)
        training.train(3, tracker)
        assert not tracker.broken_reason, tracker.broken_reason
    if rank == 0:
        return [o for o in series_of(tracker).observations if isinstance(o, NonFiniteOrigin)]
    return None


def test_a_loss_that_is_not_finite_is_traced_without_touching_freed_parameters(tmp_path: Path) -> None:
    origins = launch(_blown_up, tmp_path)[0]
    assert [o.step for o in origins] == [5]


# ------------------------------------------------------------------------------------------- replicas


def _replicas(rank: int, folder: Path, wrap: str, fault: str, steps: int) -> Any:
    training = Distributed(rank, wrap)
    if fault == "other start":
        with torch.no_grad():
            for p in training.model.parameters():
                p.add_(0.01 * rank)
    tracker = FlowTracker(training.model, training.optimizer, track_interval=20)
    for step in range(steps):
        if fault == "perturbed" and step == 30 and rank == 1:
            with torch.no_grad():
                training.plain[2].weight[0, 0] += 1e-3  # type: ignore[index]
        if fault == "averaged" and step % 8 == 0:
            for p in training.model.parameters():
                dist.all_reduce(p.detach())
                p.data.div_(SIZE)
        training.train(1, tracker)
    if rank == 0:
        for _ in range(100):  # the other rank's numbers come a moment later
            if series_of(tracker).audit("replicas_diverged"):
                break
            training.train(1, tracker) if wrap == "none" else tracker._recorder.flush(1.0)
    tracker.close()
    if rank != 0:
        return None
    found = series_of(tracker).audit("replicas_diverged")
    return [(f.step, f.layer, f.detail) for f in found], [h.code for h in tracker.explain_failure()[:1]]


def test_a_replica_whose_weights_were_changed_is_named(tmp_path: Path) -> None:
    found, causes = launch(_replicas, tmp_path, "ddp", "perturbed", 200)[0]
    assert [(step, layer) for step, layer, _ in found] == [(32, "module.2")]
    assert "rank 1" in found[0][2]
    assert causes == ["ddp_desync"]


def _mended(rank: int, folder: Path) -> Any:
    training = Distributed(rank, "ddp")
    with FlowTracker(training.model, training.optimizer) as tracker:
        training.train(4, tracker)
        if rank == 1:
            with torch.no_grad():
                training.plain[2].weight[0, 0] += 1e-3  # type: ignore[index]
        before = training.weights()
        reply = ask(training, tracker, request("broadcast_parameters"))
        assert not tracker.broken_reason, tracker.broken_reason
        return reply, before, training.weights()


def test_replicas_that_differ_are_made_equal_by_broadcast_parameters(tmp_path: Path) -> None:
    first, second = launch(_mended, tmp_path)
    assert done(first[0]).state.value == "applied"
    assert not same(first[1], second[1])
    assert same(first[2], second[2])


def test_a_model_that_was_never_wrapped_is_named(tmp_path: Path) -> None:
    found, causes = launch(_replicas, tmp_path, "none", "", 400)[0]
    assert len(found) == 1
    assert found[0][0] == 100
    assert "DistributedDataParallel" in found[0][2]
    assert causes == ["ddp_desync"]


@pytest.mark.parametrize(("wrap", "fault"), [("ddp", ""), ("fsdp", ""), ("none", "other start"), ("none", "averaged")])
def test_healthy_ranks_stay_silent(tmp_path: Path, wrap: str, fault: str) -> None:
    found, causes = launch(_replicas, tmp_path, wrap, fault, 200)[0]
    assert not found
    assert "ddp_desync" not in causes


assert BATCH % SIZE == 0
