"""Pruned weights stay at zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradtracer.errors import BadParameter
from tests.fixes.training import (
    Program,
    assert_harmless,
    assert_undone_exactly,
    classification,
    healthy_adam,
    live,
    network,
    program,
)


def _pruned_at(at: int, hold: bool = False) -> Callable[[int], Program]:
    """The smallest 70 % of the middle layer's weights become zero within step `at`; with `hold` they are held there."""

    def make(seed: int) -> Program:
        model = network(seed)
        loss = classification(model, seed)
        made: dict[str, torch.Tensor] = {}
        count = [0]

        def pruning() -> torch.Tensor:
            value = loss()
            if count[0] == at:
                with torch.no_grad():
                    weight = model[2].weight
                    made["mask"] = weight.abs() > weight.abs().flatten().quantile(0.7)
                    weight.mul_(made["mask"])
            count[0] += 1
            return loss() if count[0] == at + 1 else value

        def after() -> None:
            if hold and made:
                with torch.no_grad():
                    model[2].weight.mul_(made["mask"])

        model.mask = made  # type: ignore[assignment]
        found = program(model, torch.optim.Adam(model.parameters(), 3e-3), pruning, after=after)
        found.replay = lambda i: loss()
        return found

    return make


def test_the_places_are_those_that_were_pruned() -> None:
    made = _pruned_at(10)(0)
    weight = made.model[2].weight  # type: ignore[index]
    with live(made) as run:
        run.train(32)
        assert not (weight == 0).any()
        run.apply("reapply_pruning_mask")
        run.train(30)
        assert torch.equal(weight != 0, made.model.mask["mask"])  # type: ignore[index]


def test_without_known_places_the_smallest_weights_are_taken() -> None:
    made = healthy_adam(0)
    weight = made.model[2].weight  # type: ignore[index]
    with live(made) as run:
        run.train(3)
        smallest = set(weight.detach().abs().flatten().argsort()[:288].tolist())
        (change,) = run.preview("reapply_pruning_mask", layers="2", share=0.5)
        assert (change.old, change.new) == (0.0, 0.5)
        run.apply("reapply_pruning_mask", layers="2", share=0.5)
        run.train(5)
        assert set((weight.flatten() == 0).nonzero().flatten().tolist()) == smallest


@pytest.mark.slow
def test_a_run_whose_mask_holds_is_not_hurt() -> None:
    assert_harmless(_pruned_at(10, hold=True), "reapply_pruning_mask", layers="2", share=0.7)


def test_undo_brings_the_weights_back() -> None:
    assert_undone_exactly(healthy_adam, "reapply_pruning_mask", layers="2", share=0.7)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({}, "saw no pruning"), ({"layers": "2"}, "pass the share"), ({"layers": "2", "share": 1.0}, "share")],
)
def test_unknown_places_are_refused(parameters: dict[str, object], message: str) -> None:
    with live(healthy_adam(0)) as run:
        run.train(1)
        with pytest.raises(BadParameter, match=message):
            run.preview("reapply_pruning_mask", **parameters)  # type: ignore[arg-type]
