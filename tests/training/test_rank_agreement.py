"""How ranks agree, by a store in this process: each rank is a thread, and steps come as fast as it makes them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from gradtracer.errors import RunRefused
from gradtracer.training.rank_mail import RankMail
from gradtracer.training.ranks import Ranks
from tests.deadline import wait_until

STEP_S = 0.01


@pytest.fixture
def ranks() -> Iterator[list[Ranks]]:
    store = dist.HashStore()
    made = [Ranks(store, rank, 3) for rank in range(3)]
    yield made
    for one in made:
        one.close()


def lead(main: Ranks, body: str, *, act: Callable[[], str] = lambda: "") -> tuple[int, dict[int, str]]:
    """Ask for it at every boundary until it is done; at which step it was, and what went wrong."""
    for step in range(1_000_000):
        if main.agree(step, body, STEP_S):
            return step, main.finish(act())
        threading.Event().wait(STEP_S / 10)
    raise AssertionError("never agreed")


def follow(rank: Ranks, until: threading.Event, act: Callable[[str], str]) -> list[tuple[int, str, dict[int, str]]]:
    """Steps without end; what was done, and when."""
    seen: list[tuple[int, str, dict[int, str]]] = []
    step = 0
    while not until.is_set():
        body = rank.due(step)
        if body is not None:
            seen.append((step, body, rank.finish(act(body))))
        step += 1
        until.wait(STEP_S / 10)
    return seen


def together(ranks: list[Ranks], act: Callable[[int], str]) -> tuple[Any, list[Any]]:
    until = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(follow, r, until, lambda _, n=r.rank: act(n)) for r in ranks[1:]]
        try:
            led = lead(ranks[0], "do it", act=lambda: act(0))
        finally:
            until.set()
        return led, [other.result() for other in others]


def test_all_ranks_do_it_at_one_step_and_average_over_all(ranks: list[Ranks]) -> None:
    means: list[list[float]] = []

    def act(rank: int) -> str:
        means.append(ranks[rank].mean([float(rank), 1.0]))
        return "" if ranks[rank].all(True) and not ranks[rank].all(rank != 1) else "wrong"

    (step, problems), others = together(ranks, act)
    assert problems == {}
    assert others == [[(step, "do it", {})], [(step, "do it", {})]]
    assert means == [[1.0, 1.0]] * 3


def test_a_failure_is_learnt_by_all_ranks(ranks: list[Ranks]) -> None:
    (step, problems), others = together(ranks, lambda rank: "it broke" if rank == 2 else "")
    assert problems == {2: "it broke"}
    assert others == [[(step, "do it", {2: "it broke"})]] * 2


def test_who_waits_for_a_value_of_a_rank_that_failed_is_let_go(ranks: list[Ranks]) -> None:
    def act(rank: int) -> str:
        if rank == 2:
            return "it broke"
        with pytest.raises(RunRefused, match="failed on another rank"):
            ranks[rank].mean([1.0])
        return "let go"

    (_, problems), _ = together(ranks, act)
    assert problems == {0: "let go", 1: "let go", 2: "it broke"}


def test_a_rank_that_makes_no_steps_is_not_waited_for_once_its_tracker_is_closed(ranks: list[Ranks]) -> None:
    until = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(follow, ranks[1], until, lambda _: "")
        leading = pool.submit(lead, ranks[0], "do it")
        wait_until(lambda: ranks[2]._plan is not None)
        ranks[2].close()
        with pytest.raises(RunRefused, match=r"rank 2 (closed its tracker|did not answer)"):
            leading.result(30)
        until.set()
        assert other.result() == []


def test_ranks_without_a_tracker_are_named_and_asked_only_once_more_later() -> None:
    store = dist.HashStore()
    main, second = Ranks(store, 0, 3), Ranks(store, 1, 3)
    tries: list[int] = []
    publish = main._publish
    main._publish = lambda step, body: (tries.append(step), publish(step, body))[1]  # type: ignore[method-assign]
    until = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(follow, second, until, lambda _: "")
        for expected in (2, 3):
            with pytest.raises(RunRefused, match="rank 2 has no tracker"):
                lead(main, "do it")
            assert len(tries) == expected
        until.set()
        assert other.result() == []
    main.close()
    second.close()


def test_a_step_that_never_comes_does_not_keep_a_refusal_waiting() -> None:
    store = dist.HashStore()
    main = Ranks(store, 0, 2)

    def ask_at_one_step() -> bool:
        return main.agree(0, "do it", 1e-9)  # so short a step that the plan's is thousands of steps away

    with pytest.raises(RunRefused, match="rank 1 has no tracker"):
        wait_until(ask_at_one_step)
    main.close()


def test_no_rank_touches_the_store_between_plans() -> None:
    class Counting:
        def __init__(self) -> None:
            self.store, self.threads = dist.HashStore(), set[str]()

        def __getattr__(self, name: str) -> Any:
            self.threads.add(threading.current_thread().name)
            return getattr(self.store, name)

    store = Counting()
    second = Ranks(store, 1, 2)
    wait_until(lambda: store.threads)
    assert all(second.due(step) is None for step in range(1000))
    assert store.threads == {"gradtracer-ranks"}
    second.close()


# ------------------------------------------------------------------------------------------- numbers of all ranks


def test_parts_are_put_together_in_the_order_of_the_main_rank() -> None:
    store = dist.HashStore()
    store.set("here/0", "")
    main, second = RankMail(store, 0, 2), RankMail(store, 1, 2)
    main.post("norms", 0, np.asarray([1.0, np.nan]))
    main.post("norms", 1, np.asarray([3.0]))
    second.post("norms", 1, np.asarray([4.0]))
    second.carry()
    main._fetch()
    assert main.take("norms") == []  # step 1 is complete, and waits for step 0
    second.post("norms", 0, np.asarray([np.inf, 2.0]))
    second.carry()
    main._fetch()
    (first, parts), (then, more) = main.take("norms")
    assert (first, then) == (0, 1)
    assert parts is not None
    assert more is not None
    assert [p.tolist() for p in parts] == [[1.0, pytest.approx(np.nan, nan_ok=True)], [np.inf, 2.0]]
    assert [p.tolist() for p in more] == [[3.0], [4.0]]
    assert main.take("norms") == []


def test_what_nobody_reads_is_dropped() -> None:
    store = dist.HashStore()
    store.set("here/0", "")
    second = RankMail(store, 1, 2)
    for step in range(500):
        second.post("norms", step, np.ones(2))
        second.carry()
    assert store.num_keys() < 100


def test_without_the_other_parts_a_step_is_given_up_at_the_end() -> None:
    main = RankMail(dist.HashStore(), 0, 2)
    main.post("norms", 0, np.ones(1))
    assert main.take("norms") == []
    main.give_up(0.0)
    assert main.take("norms") == [(0, None)]


def test_plans_are_text_that_any_rank_can_read() -> None:
    store = dist.HashStore()
    main = Ranks(store, 0, 2)
    assert not main.agree(5, "body", STEP_S)
    step, body = json.loads(store.get("plan/1"))
    assert step > 6
    assert body == "body"
    main.close()
