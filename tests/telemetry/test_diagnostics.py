"""Findings from made-up times: network, stragglers, waits for data, noise, invalid numbers."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.records import PLACE, Columns, Finding, Rows, StepOptions
from nbdist.telemetry.diagnostics import (
    LASTING_S,
    LEAST_S,
    NETWORK,
    STARVED,
    STRAGGLER,
    WINDOW,
    Diagnostics,
)
from nbdist.telemetry.step_times import LONGEST_ROWS, Recent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Noise = np.ndarray[tuple[int, int], np.dtype[np.float64]]
    MakeNoise = Callable[[np.random.Generator, tuple[int, int]], Noise]

HOSTS = {0: "hostA", 1: "hostA", 2: "hostB", 3: "hostB"}
ALL = Columns(measures=("step_s", "input_s", "collective_s"), own=("loss",))
ONLY_STEP = Columns(measures=("step_s",))
SAMPLE = Columns(measures=("step_s", "collective_s"))
STEP_S = 0.05
EVERY_S = 0.1
"""Seconds between two steps in the reports."""

LONG = WINDOW + int(LASTING_S / EVERY_S) + 20
"""Steps after which a finding is certain."""

MESSAGE = 10
"""Steps in a message."""


class Fed(Diagnostics):
    """Diagnostics that know the steps reported so far."""

    steps = 0


def rows(rank: int, columns: Columns, table: Sequence[Sequence[float]], first: int = 1) -> Rows:
    values = b"".join(
        struct.pack(f"<{len(PLACE) + len(row)}d", rank, 1, first + i, EVERY_S * (first + i), *row)
        for i, row in enumerate(table)
    )
    return Rows(rank=rank, cell=1, columns=columns, values=values)


def feed(
    diagnostics: Fed,
    own_s: Mapping[int, float | Sequence[float]],
    network_s: float = 0.0,
    input_s: Mapping[int, float] | None = None,
    steps: int = LONG,
) -> None:
    """Report synchronous steps, in which all ranks wait for the slowest one, and look at them."""
    for begin in range(0, steps, MESSAGE):
        chosen = range(begin, min(begin + MESSAGE, steps))
        own = {rank: [seconds_of(one, i) for i in chosen] for rank, one in own_s.items()}
        step_s = [max(seconds) + network_s for seconds in zip(*own.values(), strict=True)]
        for rank, mine in own.items():
            wait_s = (input_s or {}).get(rank, 0.0)
            table = [(s, wait_s, s - m, 0.5) for s, m in zip(step_s, mine, strict=True)]
            diagnostics.take(rows(rank, ALL, table, diagnostics.steps + 1))
        diagnostics.steps += len(chosen)
        diagnostics.findings()


def seconds_of(one: float | Sequence[float], step: int) -> float:
    return one if isinstance(one, float) else one[step]


def found(diagnostics: Diagnostics) -> dict[str, Finding]:
    return {finding.topic: finding for finding in diagnostics.findings()}


def equal_times(own_s: float = STEP_S) -> dict[int, float]:
    return dict.fromkeys(HOSTS, own_s)


@pytest.fixture
def diagnostics() -> Fed:
    return Fed(HOSTS, "mirrored", 96, StepOptions(data="train"))


class TestNetwork:
    @pytest.mark.parametrize(("share", "is_reported"), [(0.15, False), (0.25, True), (0.8, True)])
    def test_a_share_above_the_limit_is_reported(
        self, diagnostics: Fed, share: float, is_reported: bool
    ) -> None:
        feed(diagnostics, equal_times(), network_s=STEP_S * share / (1 - share))
        assert ("network" in found(diagnostics)) is is_reported
        if is_reported:
            finding = found(diagnostics)["network"]
            assert finding.value == pytest.approx(share)
            assert finding.text.startswith(f"{share:.0%} of a step")
            assert "--batch (it is 96)" in finding.text
            assert "--precision" not in finding.text  # gradients would stay float32
            assert "a faster link" in finding.text

    def test_waiting_for_a_straggler_is_no_network_time(self, diagnostics: Fed) -> None:
        feed(diagnostics, equal_times() | {2: 4 * STEP_S}, network_s=0.001)
        assert found(diagnostics).keys() == {"straggler"}

    def test_advice_for_pjrt_names_its_remedies(self) -> None:
        diagnostics = Fed({0: "here", 1: "here"}, "pjrt")
        feed(diagnostics, {0: STEP_S, 1: STEP_S}, network_s=STEP_S)
        text = found(diagnostics)["network"].text
        assert "--precision" not in text
        assert "--batch" not in text
        assert "arrays in bfloat16" in text
        assert "fewer workers on this machine" in text

    def test_a_finding_ends_and_does_not_flicker(self, diagnostics: Fed) -> None:
        between = (NETWORK.on + NETWORK.off) / 2
        for share, is_reported in [(between, False), (0.3, True), (between, True), (0.1, False)]:
            feed(diagnostics, equal_times(), network_s=STEP_S * share / (1 - share))
            assert ("network" in found(diagnostics)) is is_reported

    def test_a_finding_with_a_small_change_stays_unchanged(self, diagnostics: Fed) -> None:
        feed(diagnostics, equal_times(), network_s=STEP_S)
        before = diagnostics.findings()
        feed(diagnostics, equal_times(), network_s=1.05 * STEP_S)
        assert diagnostics.findings() == before

    def test_one_rank_has_no_network_time(self) -> None:
        diagnostics = Fed({0: "here"}, "mirrored")
        feed(diagnostics, {0: STEP_S}, network_s=STEP_S)
        assert not diagnostics.findings()

    def test_messages_of_ranks_without_common_steps(self, diagnostics: Fed) -> None:
        """Report 100 rows per message. The last messages of two ranks have no step in common."""
        row = (0.05, 0.0, 0.04, 1.0)
        for message in range(3):
            for rank in HOSTS:
                if rank or message < 2:
                    diagnostics.take(rows(rank, ALL, [row] * 100, first=1 + 100 * message))
            diagnostics.findings()
        assert found(diagnostics)["network"].value == pytest.approx(0.8)

    def test_a_few_milliseconds_are_no_finding(self, diagnostics: Fed) -> None:
        feed(diagnostics, equal_times(0.001), network_s=0.9 * LEAST_S)
        assert not diagnostics.findings()
        assert diagnostics.pace.collectives == pytest.approx(4.5 / 5.5)


class TestStraggler:
    @pytest.mark.parametrize("ratio", [1.14, 1.4, 3.0])
    def test_a_slow_rank_is_reported_with_its_host(self, diagnostics: Fed, ratio: float) -> None:
        feed(diagnostics, equal_times() | {2: ratio * STEP_S}, network_s=0.002)
        finding = found(diagnostics)["straggler"]
        assert finding.ranks == (2,)
        assert finding.value == pytest.approx(ratio)
        assert finding.text == (
            f"rank 2@hostB computes {ratio:.2g} times longer than the other ranks "
            f"({1000 * ratio * STEP_S:.3g} instead of 50 ms a step): "
            "check for other processes on its host, or a slower processor"
        )

    @pytest.mark.parametrize("own_s", [0.06, 1.0, 10.0])
    @pytest.mark.parametrize(("share", "is_reported"), [(0.09, False), (0.11, True)])
    def test_the_limit_is_ten_percent_of_the_step(
        self, diagnostics: Fed, own_s: float, share: float, is_reported: bool
    ) -> None:
        feed(diagnostics, equal_times(own_s) | {2: own_s / (1 - share)})
        assert ("straggler" in found(diagnostics)) is is_reported

    @pytest.mark.parametrize(("excess_s", "is_reported"), [(0.9, False), (1.1, True)])
    def test_the_limit_is_five_milliseconds(
        self, diagnostics: Fed, excess_s: float, is_reported: bool
    ) -> None:
        feed(diagnostics, equal_times(0.001) | {2: 0.001 + excess_s * LEAST_S})
        assert ("straggler" in found(diagnostics)) is is_reported

    def test_the_slower_of_two_ranks_is_compared_with_the_other(self) -> None:
        diagnostics = Fed({0: "here", 1: "here"}, "mirrored")
        feed(diagnostics, {0: STEP_S, 1: 2 * STEP_S})
        assert found(diagnostics)["straggler"].value == pytest.approx(2)

    def test_several_stragglers_are_listed_and_counted(self, diagnostics: Fed) -> None:
        feed(diagnostics, equal_times() | {1: 2 * STEP_S, 3: 3 * STEP_S})
        finding = found(diagnostics)["straggler"]
        assert finding.ranks == (1, 3)
        assert finding.text.startswith("rank 3@hostB computes 3 times longer")
        assert "(and 1 more rank)" in finding.text

    def test_too_few_steps_give_no_finding(self, diagnostics: Fed) -> None:
        feed(diagnostics, equal_times() | {2: 2 * STEP_S}, steps=LONG - 30)
        assert not diagnostics.findings()

    def test_a_short_load_gives_no_finding(self, diagnostics: Fed) -> None:
        loaded = WINDOW + int(LASTING_S / EVERY_S) - MESSAGE
        for rank in (0, 2):
            feed(diagnostics, equal_times())
            feed(diagnostics, equal_times() | {rank: 2 * STEP_S}, steps=loaded)
            assert not diagnostics.findings()

    def test_a_straggler_that_catches_up_is_no_longer_reported(self, diagnostics: Fed) -> None:
        between = (STRAGGLER.on + STRAGGLER.off) / 2
        for share, is_reported in [(between, False), (0.3, True), (between, True), (0.0, False)]:
            feed(diagnostics, equal_times(0.1) | {2: 0.1 / (1 - share)})
            assert ("straggler" in found(diagnostics)) is is_reported

    def test_a_rank_that_waits_for_its_data_is_one_finding(self, diagnostics: Fed) -> None:
        feed(diagnostics, equal_times() | {2: 2 * STEP_S}, input_s={2: STEP_S})
        assert found(diagnostics).keys() == {"starved"}
        assert found(diagnostics)["starved"].ranks == (2,)

    def test_ranks_without_collectives_are_compared(self, diagnostics: Fed) -> None:
        """Without collectives, ranks are compared by the time of whole steps."""
        for begin in range(1, LONG + 1, MESSAGE):
            for rank in HOSTS:
                table = [(STEP_S * (2 if rank == 1 else 1),)] * MESSAGE
                diagnostics.take(rows(rank, ONLY_STEP, table, begin))
            diagnostics.findings()
        assert found(diagnostics)["straggler"].ranks == (1,)

    def test_collectives_may_be_timed_in_some_steps_only(self, diagnostics: Fed) -> None:
        for begin in range(1, 30 * MESSAGE, MESSAGE):
            for rank in HOSTS:
                table = [(STEP_S,)] * (MESSAGE - 1)
                diagnostics.take(rows(rank, ONLY_STEP, table, begin))
                sample = 2 * STEP_S, 2 * STEP_S * (0.3 if rank == 1 else 0.5)
                diagnostics.take(rows(rank, SAMPLE, [sample], begin + MESSAGE - 1))
            diagnostics.findings()
        findings = found(diagnostics)
        assert findings["network"].value == pytest.approx(0.3)
        assert findings["straggler"].ranks == (1,)
        assert findings["straggler"].value == pytest.approx(0.7 / 0.5)


def independent(generator: np.random.Generator, shape: tuple[int, int]) -> Noise:
    return 0.03 * generator.lognormal(0, 0.5, shape)


def heavy_tails(generator: np.random.Generator, shape: tuple[int, int]) -> Noise:
    return 0.02 * (1 + generator.pareto(1.5, shape))


def correlated(generator: np.random.Generator, shape: tuple[int, int]) -> Noise:
    """Return times whose deviations last for about 20 steps."""
    drawn = generator.normal(size=shape)
    for step in range(1, shape[1]):
        drawn[:, step] = 0.95 * drawn[:, step - 1] + 0.31 * drawn[:, step]
    return 0.03 * np.exp(0.5 * drawn)


def bursts(generator: np.random.Generator, shape: tuple[int, int]) -> Noise:
    """Return times that double on one rank for 40 steps, then on another."""
    own = 0.03 * generator.lognormal(0, 0.1, shape)
    for begin in range(0, shape[1], 60):
        own[generator.integers(shape[0]), begin : begin + 40] *= 2
    return own


NOISES = (independent, heavy_tails, correlated, bursts)


class TestNoise:
    """Seeded noise of equal ranks. 64,000 looks at such noise gave no finding."""

    @pytest.mark.parametrize("noise", NOISES)
    @pytest.mark.parametrize("ranks", [2, 4])
    def test_noise_alone_gives_no_finding(self, noise: MakeNoise, ranks: int) -> None:
        diagnostics = Fed(dict.fromkeys(range(ranks), "here"), "mirrored")
        own = noise(np.random.default_rng(ranks), (ranks, 1000))
        for begin in range(0, 1000, MESSAGE):
            part = dict(enumerate(own[:, begin : begin + MESSAGE].tolist()))
            feed(diagnostics, part, network_s=0.001, steps=MESSAGE)
            assert not diagnostics.findings()

    @pytest.mark.parametrize("noise", [independent, heavy_tails])
    @pytest.mark.parametrize("ranks", [2, 4])
    def test_a_slow_rank_is_found_in_noise(self, noise: MakeNoise, ranks: int) -> None:
        diagnostics = Fed(dict.fromkeys(range(ranks), "here"), "mirrored")
        own = noise(np.random.default_rng(ranks), (ranks, 2 * LONG))
        own[1] += 0.08
        feed(diagnostics, dict(enumerate(own.tolist())), steps=2 * LONG)
        assert found(diagnostics)["straggler"].ranks == (1,)


class TestStarved:
    def test_waiting_for_data_is_reported_with_options(self, diagnostics: Fed) -> None:
        feed(diagnostics, equal_times(), input_s=equal_times(0.3 * STEP_S))
        finding = found(diagnostics)["starved"]
        assert finding.ranks == ()
        assert finding.value == pytest.approx(0.3)
        assert "30% of a step is waiting for data on all ranks" in finding.text
        assert "--prefetch auto" in finding.text
        assert "num_parallel_calls=tf.data.AUTOTUNE" in finding.text

    def test_waiting_ranks_are_listed_with_their_hosts(self, diagnostics: Fed) -> None:
        waits = 0.3 * STEP_S
        for starved, part in [
            ({2: waits}, "on rank 2@hostB: "),
            ({1: waits, 3: waits}, "on rank 1@hostA, rank 3@hostB: "),
        ]:
            feed(diagnostics, equal_times(), input_s=starved)
            assert part in found(diagnostics)["starved"].text
        diagnostics = Fed(dict.fromkeys(range(6), "here"), "pjrt")
        feed(diagnostics, dict.fromkeys(range(6), STEP_S), input_s=dict.fromkeys(range(5), waits))
        others = "on rank 0@here, rank 1@here, rank 2@here, 2 more: "
        assert others in found(diagnostics)["starved"].text

    def test_a_rank_between_the_limits_keeps_its_state(self, diagnostics: Fed) -> None:
        between = (STARVED.on + STARVED.off) / 2 * STEP_S
        feed(diagnostics, equal_times(), input_s={0: between, 2: STEP_S / 2})
        assert found(diagnostics)["starved"].ranks == (2,)
        feed(diagnostics, equal_times(), input_s={0: between, 2: between})
        assert found(diagnostics)["starved"].ranks == (2,)

    def test_advice_for_a_cell_without_steps_names_no_option(self) -> None:
        diagnostics = Fed(HOSTS, None)
        feed(diagnostics, equal_times(), input_s=equal_times(0.3 * STEP_S))
        text = found(diagnostics)["starved"].text
        assert "--prefetch" not in text
        for remedy in (
            ".prefetch(tf.data.AUTOTUNE)",
            ".cache()",
            "num_parallel_calls",
            "workers=4",
        ):
            assert remedy in text

    def test_advice_in_effect_is_omitted(self) -> None:
        diagnostics = Fed(HOSTS, "mirrored", 8, StepOptions(data="train", prefetch="auto"))
        feed(diagnostics, equal_times(), input_s=equal_times(0.3 * STEP_S))
        text = found(diagnostics)["starved"].text
        assert "--prefetch" not in text
        assert "prepare them faster" in text

    def test_a_few_milliseconds_are_no_finding(self, diagnostics: Fed) -> None:
        wait_s = equal_times(0.9 * LEAST_S)
        feed(diagnostics, equal_times(2 * LEAST_S), input_s=wait_s)
        assert not diagnostics.findings()

    def test_a_finding_ends_and_does_not_flicker(self, diagnostics: Fed) -> None:
        between = (STARVED.on + STARVED.off) / 2
        for share, is_reported in [(between, False), (0.5, True), (between, True), (0.01, False)]:
            feed(diagnostics, equal_times(), input_s=equal_times(share * STEP_S))
            assert ("starved" in found(diagnostics)) is is_reported


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
MEASURES = st.lists(
    st.sampled_from(["step_s", "input_s", "collective_s", "process_bytes"]), unique=True
).map(tuple)


@st.composite
def any_rows(draw: st.DrawFn) -> Rows:
    columns = Columns(measures=draw(MEASURES), own=("loss",))
    values = draw(st.lists(NUMBERS, min_size=1, max_size=12))
    width = len(columns.names)
    # Repeats a few numbers, to have enough rows for a finding.
    row = (values * width)[:width]
    data = b"".join(
        struct.pack(f"<{width}d", *row[:2], draw(st.sampled_from([step, row[2]])), *row[3:])
        for step in range(draw(st.integers(0, 3 * WINDOW)))
    )
    missing = draw(st.integers(0, 7))
    return Rows(
        rank=draw(st.integers(0, 5)), cell=1, columns=columns, values=data[: len(data) - missing]
    )


@given(st.lists(any_rows(), max_size=12))
def test_any_reports_raise_no_error(messages: list[Rows]) -> None:
    diagnostics = Fed(HOSTS, "mirrored", batch=8)
    for message in messages:
        diagnostics.take(message)
        for finding in diagnostics.findings():
            assert 0 < finding.value < float("inf")


@given(bad=st.lists(NUMBERS.filter(lambda x: not 0 <= x < 1e9), min_size=1, max_size=30))
def test_invalid_times_do_not_hide_the_valid_ones(bad: list[float]) -> None:
    """Times are NaN, infinite, or negative as after a clock that jumped."""
    diagnostics = Fed(HOSTS, "mirrored", batch=8)
    feed(diagnostics, equal_times() | {2: 2 * STEP_S})
    for rank in HOSTS:
        diagnostics.take(rows(rank, ALL, [(x, x, x, x) for x in bad if not x > 0], 1000))
    assert found(diagnostics)["straggler"].ranks == (2,)


def test_a_silent_rank_leaves_findings_unchanged(diagnostics: Fed) -> None:
    feed(diagnostics, equal_times(), network_s=STEP_S)
    before = found(diagnostics)["network"]
    for rank in (0, 1, 2):
        diagnostics.take(rows(rank, ALL, [(STEP_S, 0.0, 0.0, 1.0)] * 200, first=500))
    assert found(diagnostics)["network"] == before


def test_a_recovery_gives_no_findings(diagnostics: Fed) -> None:
    """Times before the recovery do not count.

    The first step after it is slow, most on the new rank.
    """
    feed(diagnostics, equal_times() | {2: 5 * STEP_S}, steps=LONG - 30)
    diagnostics.forget()
    slow = equal_times() | {2: 100 * STEP_S}
    feed(diagnostics, slow, input_s=equal_times(50 * STEP_S), steps=1)
    assert found(diagnostics) == {}
    feed(diagnostics, equal_times())
    assert found(diagnostics) == {}


def test_stored_rows_are_limited() -> None:
    recent = Recent()
    for message in range(50):
        recent.take(rows(0, ALL, [(0.1, 0.0, 0.0, 1.0)] * (LONGEST_ROWS + 100), 1000 * message))
    assert len(recent.times()[0].step_s) <= 2 * LONGEST_ROWS
