"""Prefetched batches: order, errors and the end of threads."""

from __future__ import annotations

import itertools
import threading
import time
import types
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from nbdist.records import StepOptions
from nbdist.telemetry.run_reader import stored_runs
from nbdist.worker.data import prefetch
from nbdist.worker.data.batches import RankRows
from nbdist.worker.data.prefetch import AUTO_BATCHES, STARVED, WINDOW, Feed, PrefetchIterator
from nbdist.worker.data.rank_shards import Parts
from nbdist.worker.data.sources import open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.worker.data.batches import Batch

ALL_ROWS = RankRows(rank=0, ranks=1, replicas=1)
WAIT_S = 10.0


def feed(data: Any, texts: list[str] | None = None, **options: Any) -> Feed:
    chosen = StepOptions(data="data", **options)
    source = open_source(data, chosen, rank=0, ranks=1, gather=lambda n: n[None])
    notes = [] if texts is None else texts
    return Feed(source, chosen, lambda topic, text: notes.append(f"{topic}: {text}"), int)


def first_values(batches: Iterator[tuple[Batch, float]]) -> list[np.ndarray]:
    return [batch.values[0] for batch, _ in batches]


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "nbdist-prefetch"]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("prefetch", [1, 3, 100, "auto"])
@pytest.mark.parametrize("limit", [-1, 0, 7, 1000])
def test_prefetch_keeps_batches_and_order(prefetch: Any, limit: int) -> None:
    x = np.random.default_rng(0).normal(size=(101, 3))
    for epoch in (1, 2):
        plain = first_values(feed(x, batch=8, shuffle=5).epoch(epoch, ALL_ROWS, limit))
        ahead = first_values(
            feed(x, batch=8, shuffle=5, prefetch=prefetch).epoch(epoch, ALL_ROWS, limit)
        )
        expected = plain if prefetch == "auto" or limit < 0 else plain[:limit]
        assert len(ahead) == len(expected)
        for one, other in zip(ahead, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert not threads()


def test_prefetch_is_limited_by_room_and_steps() -> None:
    taken: list[int] = []

    def data() -> Iterator[np.ndarray]:
        for number in itertools.count():
            taken.append(number)
            yield np.full(2, number)

    batches = feed(data(), prefetch=3).epoch(1, ALL_ROWS, 10)
    next(batches)
    wait_until(lambda: len(taken) == 4)
    rest = [int(values[0]) for values in first_values(batches)]
    assert rest == list(range(1, 10))
    assert len(taken) == 10  # the next cell continues with the same iterator
    assert not threads()


def test_data_error_is_raised_at_its_step() -> None:
    def data() -> Iterator[np.ndarray]:
        yield np.ones(2)
        yield np.ones(2)
        raise LookupError("no third")

    batches = feed(data, prefetch=4).epoch(1, ALL_ROWS, -1)
    next(batches)
    next(batches)
    with pytest.raises(LookupError, match="no third") as caught:
        next(batches)
    assert "data" in [entry.name for entry in caught.traceback]
    assert not threads()


def test_thread_ends_with_a_shortened_epoch() -> None:
    batches = feed(lambda: itertools.repeat(np.ones(2)), prefetch=2).epoch(1, ALL_ROWS, -1)
    next(batches)
    assert threads()
    batches.close()
    assert not threads()


def test_blocked_thread_does_not_delay_the_end() -> None:
    gate = threading.Event()

    def data() -> Iterator[int]:
        yield 1
        gate.wait(WAIT_S)
        yield 2

    ahead = PrefetchIterator(data(), room=2, limit=-1)
    assert next(iter(ahead)) == 1
    start_s = time.monotonic()
    ahead.close()
    assert time.monotonic() - start_s < WAIT_S / 2
    gate.set()
    wait_until(lambda: not threads())


def test_data_read_together_are_not_prefetched() -> None:
    """Ranks exchange numbers while they read: only the main thread may do so."""
    calling_threads: set[str] = set()

    def gather(numbers: np.ndarray) -> np.ndarray:
        calling_threads.add(threading.current_thread().name)
        return numbers[None]

    notes: list[str] = []
    source = Parts(lambda: iter([np.ones((2, 1))] * 5), 0, "by file", gather)
    options = StepOptions(data="data", prefetch=4)
    together = Feed(source, options, lambda topic, text: notes.append(f"{topic}: {text}"), int)
    assert len(first_values(together.epoch(1, ALL_ROWS, -1))) == 5
    assert calling_threads == {threading.current_thread().name}
    assert notes == ["starved: --prefetch 4: not used, because ranks read their parts together"]


class TestAuto:
    COMPUTE_S = 0.02

    @pytest.fixture(autouse=True)
    def _clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the clock: only the code of `run` takes time, and not on other threads."""
        self.now = 0.0
        clock = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(prefetch, "time", clock)

    def _spend(self, seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            self.now += seconds

    def run(self, input_s: float, steps: int, **options: Any) -> tuple[list[float], list[str]]:
        """Return the share of each step spent waiting for data, and the notes."""

        def data() -> Iterator[np.ndarray]:
            for _ in range(steps):
                self._spend(input_s)
                yield np.ones(2)

        notes: list[str] = []
        shares = []
        for _, waited_s in feed(data, notes, **options).epoch(1, ALL_ROWS, -1):
            self._spend(self.COMPUTE_S)
            shares.append(waited_s / (waited_s + self.COMPUTE_S))
        return shares, notes

    def test_starved_run_starts_to_prefetch_and_notes_it(self) -> None:
        shares, notes = self.run(0.5 * self.COMPUTE_S, 3 * WINDOW, prefetch="auto")
        assert median(shares[: WINDOW // 2]) > STARVED
        assert median(shares[-WINDOW:]) < STARVED
        assert len(notes) == 1
        assert "of the time was waiting for data; nbdist now prefetches batches" in notes[0]

    def test_run_without_starvation_does_not_prefetch(self) -> None:
        _, notes = self.run(0.0, WINDOW, prefetch="auto")
        assert not notes
        assert not threads()

    def test_starved_run_without_prefetch_stays_starved(self) -> None:
        shares, notes = self.run(0.5 * self.COMPUTE_S, WINDOW)
        assert median(shares) > STARVED
        assert not notes

    def test_fixed_number_prefetches_from_the_start(self) -> None:
        shares, _ = self.run(0.5 * self.COMPUTE_S, WINDOW, prefetch=AUTO_BATCHES)
        assert median(shares[2:]) < STARVED


@pytest.mark.parametrize("text", ["some", "-3", "1.5", ""])
def test_invalid_prefetch_is_refused(text: str) -> None:
    from nbdist.cells.options import parse_prefetch

    with pytest.raises(nbdist.errors.UsageError, match="use auto, or a number of batches"):
        parse_prefetch(text)
    assert parse_prefetch("auto") == "auto"
    assert parse_prefetch("12") == 12


SETUP = """
import jax.numpy as jnp, numpy as np, time
w = jnp.ones(4)
def data():
    for number in range(STEPS):
        time.sleep(0.002)
        yield np.full((6, 4), number, "float32")
        if number == BROKEN:
            raise LookupError(f"broken after {number}")
"""
STEP = "loss = jnp.mean((batch @ w - 1) ** 2)\nw = w * 0.9\nloss"


def step(cluster: nbdist.Cluster, broken: int, **options: Any) -> nbdist.Run:
    cluster.run(f"STEPS, BROKEN = 30, {broken}\n" + SETUP, strategy="pjrt")
    chosen = StepOptions(data="data", epochs=2, **options)
    return cluster.run(STEP, step=chosen, strategy="pjrt")


def losses(run: nbdist.Run) -> list[float]:
    return [
        m.shared["loss"] for m in run.metrics if m.rank == 0 and m.step > 0 and "loss" in m.shared
    ]


def test_prefetch_on_engines_keeps_the_losses(cluster: nbdist.Cluster) -> None:
    plain = losses(step(cluster, broken=-1))
    assert len(plain) == 60
    assert losses(step(cluster, broken=-1, prefetch=3)) == plain
    auto = step(cluster, broken=-1, prefetch="auto")
    assert losses(auto) == plain
    cluster.run("import threading\n[t.name for t in threading.enumerate()]")
    assert all("nbdist-prefetch" not in names for names in cluster.last_run.results.values())


def test_data_error_on_engines_ends_the_run_at_its_step(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError, match="broken after 7"):
        step(cluster, broken=7, prefetch=4)
    assert max(m.step for m in cluster.last_run.metrics) <= 8
    assert losses(step(cluster, broken=-1, steps=5))


INPUT_S, COMPUTE_S = 0.01, 0.02
SLOW_SETUP = f"""
import jax, jax.numpy as jnp, numpy as np, time
w = jnp.ones(4)
def data():
    for number in range({5 * WINDOW}):
        time.sleep({INPUT_S})
        yield np.full((6, 4), number, "float32")
def nap(value):
    time.sleep({COMPUTE_S})
    return value
"""
SLOW_STEP = f"""
late = jax.pure_callback(nap, jax.ShapeDtypeStruct((), "float32"), w[0])
{STEP.replace("w * 0.9", "w * 0.9 + 0 * late")}
"""


def input_shares(cluster: nbdist.Cluster, **options: Any) -> list[float]:
    """Return the share of each step that rank 1 waited for data that sleep."""
    cluster.run(SLOW_SETUP, strategy="pjrt")
    cluster.run(SLOW_STEP, step=StepOptions(data="data", **options), strategy="pjrt")
    run = stored_runs(cluster.settings.runs_path)[0]
    (table,) = [table for table in run.tables() if "input_s" in table.columns.measures]
    names = table.columns.names
    rows = [row for row in run.array(table) if row[names.index("rank")] == 1]
    return [row[names.index("input_s")] / row[names.index("step_s")] for row in rows]


@pytest.mark.full  # `TestAuto` covers a quick case
def test_starved_run_on_engines_starts_to_prefetch(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = input_shares(cluster)
    assert median(plain[-WINDOW:]) > STARVED
    capsys.readouterr()
    auto = input_shares(cluster, prefetch="auto")
    assert median(auto[: WINDOW // 2]) > STARVED
    assert median(auto[-WINDOW:]) < STARVED
    assert "nbdist now prefetches batches" in "".join(capsys.readouterr())
    findings = stored_runs(cluster.settings.runs_path)[0].state().findings
    assert [f.text for f in findings if f.topic == "starved" and "of a step" in f.text] == []
    assert [f.text for f in findings if "nbdist now prefetches batches" in f.text]
