"""The read-only view of a run, against slow and plain twins."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtracer.journal import Journal, JournalWriter
from gradtracer.records import LayerInfo, ModelDescription
from gradtracer.samples import LayerTable, Layout
from gradtracer.series import Series, reduce_keeping_extremes
from tests import runs


def load(directory: Path) -> Series:
    with Journal(directory) as journal:
        return Series.from_journal(journal)


def layer_slowly(series: Series, layer: str, signal: str) -> dict[int, float]:
    """Twin of `Series.layer`: look through every table; a step's own table speaks before its look-back table."""
    found: dict[int, float] = {}
    for look_back in (True, False):
        for step, table in series.tables:
            value = table.get(layer, signal)
            if table.look_back == look_back and not math.isnan(value):
                found[step] = value
    return dict(sorted(found.items()))


@pytest.fixture
def recorded(tmp_path: Path) -> Series:
    """250 steps; the layers change at step 50, and a look-back fills in steps 91 to 100 after step 120."""
    early, late = runs.layout(3), runs.layout(5)
    narrow = Layout(tuple((layer, "grad_norm") for layer in late.layers))
    writer = JournalWriter(tmp_path)
    for step in range(250):
        writer.add_sample(runs.sample(step, early if step < 50 else late))
        if step == 120:
            for missed in range(91, 101):
                writer.add_table(missed, runs.table(missed + 5000, narrow))
    writer.close()
    return load(tmp_path)


@pytest.mark.parametrize("signal", runs.SIGNALS)
def test_a_layers_curve_is_ascending_and_complete(recorded: Series, signal: str) -> None:
    for layer in recorded.layers:
        steps, values = recorded.layer(layer, signal)
        assert dict(zip(steps.tolist(), values.tolist(), strict=True)) == layer_slowly(recorded, layer, signal)
        assert np.all(np.diff(steps) > 0)
        assert (steps.dtype, values.dtype) == (np.int64, np.float64)


def test_a_curve_that_was_never_recorded_is_empty(recorded: Series) -> None:
    for layer, signal in (("no such layer", "grad_norm"), (recorded.layers[0], "no such signal")):
        steps, values = recorded.layer(layer, signal)
        assert (steps.shape, values.shape, steps.dtype) == ((0,), (0,), np.int64)


def test_the_replay_is_what_was_recorded(recorded: Series) -> None:
    early, late = runs.layout(3), runs.layout(5)
    expected = [runs.sample(step, early if step < 50 else late) for step in range(250)]
    assert [runs.numbers(s) for s in recorded.samples()] == [runs.numbers(s) for s in expected]


def test_the_newest_full_table_is_found_at_any_step(recorded: Series) -> None:
    found = [recorded.table_at(step) for step in (None, 199, 100, 99, 90)]
    assert [step for step, _ in filter(None, found)] == [200, 100, 100, 90, 90]
    assert all(not table.look_back for _, table in filter(None, found))


def test_a_run_of_nothing_is_empty(tmp_path: Path) -> None:
    JournalWriter(tmp_path).close()
    series = load(tmp_path)
    assert (series.last_step, series.layers, series.table_at(), series.model) == (-1, (), None, None)
    assert list(series.samples()) == []
    assert len(series.run("loss")) == 0


def test_layers_stand_in_forward_order_where_it_is_known(tmp_path: Path) -> None:
    names = ("decoder", "blocks.1.linear", "blocks.0.linear")
    layers = tuple(LayerInfo(name=n, type="Linear", num_parameters=1, trainable=True, in_optimizer=True) for n in names)
    model = ModelDescription(step=0, type="Net", num_parameters=3, num_bytes=12, layers=layers)
    writer = JournalWriter(tmp_path)
    writer.add_observation(model.model_copy(update={"layers": ()}))
    writer.add_observation(model)
    writer.add_sample(runs.sample(0, runs.layout(3)))
    writer.close()
    series = load(tmp_path)
    assert series.model == model
    assert series.layers == (*names, "blocks.2.linear")


def test_tables_made_in_memory_need_no_journal() -> None:
    columns = Layout((("fc", "grad_norm"),))
    tables = tuple((step, LayerTable(columns, np.asarray([step / 2], np.float32))) for step in (0, 4, 9))
    empty = Series(columns=None, tables=tables)  # pyright: ignore[reportArgumentType]
    steps, values = empty.layer("fc", "grad_norm")
    assert (steps.tolist(), values.tolist()) == ([0, 4, 9], [0.0, 2.0, 4.5])


points = st.lists(
    st.one_of(st.floats(allow_nan=True, allow_infinity=True, width=32), st.sampled_from([0.0, 1.0])), max_size=200
)


def reduce_slowly(values: list[float], max_points: int) -> list[int]:
    """Twin: the positions that stay, bucket by bucket in plain Python."""
    n = len(values)
    if n <= max_points:
        return list(range(n))
    inner, num_buckets = list(range(1, n - 1)), (max_points - 2) // 3
    size, longer = divmod(len(inner), num_buckets)
    keep = {0, n - 1}
    start = 0
    for number in range(num_buckets):
        bucket = inner[start : start + size + (number < longer)]
        start += len(bucket)
        finite = [i for i in bucket if math.isfinite(values[i])]
        if finite:
            keep |= {min(finite, key=lambda i: values[i]), max(finite, key=lambda i: values[i])}
        keep |= set([i for i in bucket if not math.isfinite(values[i])][:1])
    return sorted(keep)


@settings(deadline=None)
@given(values=points, max_points=st.integers(5, 60))
def test_reduction_is_that_of_its_twin(values: list[float], max_points: int) -> None:
    steps = np.arange(0, 3 * len(values), 3)
    chosen, reduced = reduce_keeping_extremes(steps, values, max_points)
    expected = reduce_slowly(values, max_points)
    assert chosen.tolist() == [3 * i for i in expected]
    np.testing.assert_array_equal(reduced, np.asarray([values[i] for i in expected], dtype=np.float64))


@settings(deadline=None)
@given(values=points, max_points=st.integers(5, 60))
def test_reduction_keeps_ends_and_extremes_within_the_budget(values: list[float], max_points: int) -> None:
    chosen, reduced = reduce_keeping_extremes(range(len(values)), values, max_points)
    assert len(chosen) == len(reduced) <= max_points
    assert np.all(np.diff(chosen) > 0)
    if values:
        assert (chosen[0], chosen[-1]) == (0, len(values) - 1)
    finite = [v for v in values if math.isfinite(v)]
    if finite:
        kept = reduced[np.isfinite(reduced)]
        assert (kept.min(), kept.max()) == (min(finite), max(finite))
    assert np.all(np.isfinite(reduced)) == all(map(math.isfinite, values))


@pytest.mark.parametrize("max_points", [4, 0, -1])
def test_too_small_a_budget_of_points_is_refused(max_points: int) -> None:
    with pytest.raises(ValueError, match=f"at least 5, got {max_points}"):
        reduce_keeping_extremes([1, 2], [1.0, 2.0], max_points)
