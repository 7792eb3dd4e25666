"""Trials, in which candidates are timed in turn, and the choice from the measured times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.parallel.autoplace.trials import (
    FEWEST_ROUNDS,
    HOPELESS,
    LEAST_GAIN,
    MOST_ROUNDS,
    Contender,
    alone,
    choose,
    noise,
    race,
    spread,
    tried,
)
from nbdist.records.autoplace import DEFAULT, Timed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SECONDS = st.floats(1e-6, 10.0)
SAMPLES = st.lists(SECONDS, min_size=FEWEST_ROUNDS, max_size=12)


def timed(name: str, samples: Sequence[float]) -> Timed:
    return Timed(
        name=name,
        words="",
        median_s=float(np.median(samples)),
        spread_s=spread(samples),
        rounds=len(samples),
    )


@given(SAMPLES, st.lists(SAMPLES, max_size=5))
def test_the_choice_is_never_slower_than_the_default(
    default: list[float], others: list[list[float]]
) -> None:
    base = timed(DEFAULT, default)
    candidates = [timed(f"c{i}", samples) for i, samples in enumerate(others)]
    choice = choose([base, *candidates])
    chosen = next(one for one in [base, *candidates] if one.name == choice.name)
    faster = [one for one in candidates if base.median_s - one.median_s > noise(base, one)]
    assert chosen.median_s <= base.median_s
    assert (choice.name == DEFAULT) == (not faster)
    assert all(chosen.median_s <= one.median_s for one in faster)


@given(SAMPLES, st.floats(0.0, 0.5 * LEAST_GAIN))
def test_a_candidate_with_little_gain_is_not_chosen(default: list[float], gain: float) -> None:
    base = timed(DEFAULT, default)
    other = timed("other", [seconds * (1 - gain) for seconds in default])
    assert choose([base, other]).name == DEFAULT


def test_a_candidate_faster_within_the_spread_is_not_chosen() -> None:
    base = timed(DEFAULT, [1.0, 1.0, 1.0, 1.0, 1.0])
    noisy = timed("noisy", [0.5, 0.6, 0.9, 1.2, 1.3])
    assert choose([base, noisy]).name == DEFAULT
    assert choose([base, timed("steady", [0.9] * 5)]).name == "steady"


def test_the_fastest_is_chosen_if_the_default_cannot_run() -> None:
    choice = choose([timed("a", [2.0] * 5), timed("b", [1.0] * 5)])
    assert choice.name == "b"
    assert "the default does not" in choice.why
    assert choose([]).name == DEFAULT


@dataclass
class Work(Contender):
    """A call that takes some time or fails."""

    name: str
    seconds: float = 0.0
    error: Exception | None = None
    words: str = ""
    calls: list[float] = field(default_factory=list)

    def prepare(self) -> Any:
        return jnp.ones(4)

    def call(self, prepared: Any) -> Any:
        self.calls.append(self.seconds)
        if self.error is not None:
            raise self.error
        ends = time.perf_counter() + self.seconds
        while time.perf_counter() < ends:
            pass
        return prepared + 1


def fixed_times(default: float, other: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that replaces the agreed times of all processes by fixed ones."""
    return lambda figures: np.array([default, other][: len(figures)])


def test_a_hopeless_candidate_is_dropped_early_with_a_note() -> None:
    slow = Work("slow")
    default, hopeless = race([Work(DEFAULT), slow], fixed_times(0.002, 0.05))
    assert hopeless.rounds == 2
    assert default.rounds == FEWEST_ROUNDS  # no other candidate is left
    assert len(slow.calls) == hopeless.rounds
    assert hopeless.note == "dropped after 2 rounds, 25 times slower"


def test_a_slower_candidate_is_measured_to_the_end() -> None:
    default, other = race([Work(DEFAULT), Work("other")], fixed_times(0.002, 0.002 * HOPELESS))
    assert default.rounds == other.rounds == MOST_ROUNDS
    assert not other.note


def test_a_slow_default_is_measured_to_the_end() -> None:
    default, fast = race([Work(DEFAULT), Work("fast")], fixed_times(3.0, 0.5))
    assert default.rounds == fast.rounds == FEWEST_ROUNDS  # the time limit is reached
    assert choose([default, fast]).name == "fast"


def test_the_measured_time_is_that_of_the_call() -> None:
    default, slower = race([Work(DEFAULT), Work("slower", 0.01)], alone)
    assert slower.median_s >= 0.01
    assert default.rounds >= FEWEST_ROUNDS


def test_a_failing_candidate_is_left_out_with_its_reason() -> None:
    broken = Work("broken", error=NotImplementedError("no sort here\nand more"))
    verdict = tried([Work(DEFAULT), broken], alone)
    assert [one.name for one in verdict.timed] == [DEFAULT]
    (left,) = verdict.left_out
    assert (left.name, left.why) == ("broken", "NotImplementedError: no sort here")
    assert verdict.choice.why == "the only candidate"


def test_a_candidate_that_fails_in_another_process_is_left_out() -> None:
    """The common result of all processes decides, and not that of one process."""

    def most(figures: np.ndarray) -> np.ndarray:
        return np.maximum(figures, [0, 1]) if figures.shape == (2,) else figures

    verdict = tried([Work(DEFAULT), Work("other")], most)
    assert [one.name for one in verdict.timed] == [DEFAULT]
    assert verdict.left_out[0].why == "it failed in another process"


def test_an_interrupt_is_not_a_failure() -> None:
    class Stopped(Work):
        def call(self, prepared: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tried([Work(DEFAULT), Stopped("other")], alone)
