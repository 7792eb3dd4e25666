"""Findings from made-up times: network share, stragglers, waits for data, invalid numbers."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.records import PLACE, Columns, Finding, Rows
from nbdist.telemetry.diagnostics import (
    FLOOR_S,
    LONGEST_ROWS,
    NETWORK,
    STARVED,
    STRAGGLER,
    WINDOW,
    Diagnostics,
    Recent,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HOSTS = {0: "hostA", 1: "hostA", 2: "hostB", 3: "hostB"}
ALL = Columns(measures=("step_s", "input_s", "collective_s"), own=("loss",))
SAMPLE = Columns(measures=("step_s", "collective_s"))
STEP_S = 0.05


def rows(rank: int, columns: Columns, table: Sequence[Sequence[float]], first: int = 1) -> Rows:
    values = b"".join(
        struct.pack(f"<{len(PLACE) + len(row)}d", rank, 1, first + i, 0.1 * i, *row)
        for i, row in enumerate(table)
    )
    return Rows(rank=rank, cell=1, columns=columns, values=values)


def feed(
    diagnostics: Diagnostics,
    own_s: Mapping[int, float],
    network_s: float = 0.0,
    input_s: Mapping[int, float] | None = None,
    steps: int = WINDOW,
    first: int = 1,
) -> None:
    """Report synchronous steps, in which all ranks wait for the slowest one."""
    step_s = max(own_s.values()) + network_s
    for rank, own in own_s.items():
        row = (step_s, (input_s or {}).get(rank, 0.0), step_s - own, 0.5)
        diagnostics.take(rows(rank, ALL, [row] * steps, first))


def found(diagnostics: Diagnostics) -> dict[str, Finding]:
    return {finding.topic: finding for finding in diagnostics.findings()}


def equal_times(own_s: float = STEP_S) -> dict[int, float]:
    return dict.fromkeys(HOSTS, own_s)


@pytest.fixture
def diagnostics() -> Diagnostics:
    return Diagnostics(HOSTS, "mirrored", batch=96)


class TestNetwork:
    @pytest.mark.parametrize(("share", "is_reported"), [(0.15, False), (0.25, True), (0.8, True)])
    def test_a_share_above_the_limit_is_reported(
        self, diagnostics: Diagnostics, share: float, is_reported: bool
    ) -> None:
        feed(diagnostics, equal_times(), network_s=STEP_S * share / (1 - share))
        assert ("network" in found(diagnostics)) is is_reported
        if is_reported:
            finding = found(diagnostics)["network"]
            assert finding.value == pytest.approx(share)
            assert finding.text.startswith(f"{share:.0%} of a step")
            assert "--batch (it is 96)" in finding.text
            assert "--precision bfloat16" in finding.text
            assert "a faster link" in finding.text

    def test_waiting_for_a_straggler_is_no_network_time(self, diagnostics: Diagnostics) -> None:
        feed(diagnostics, equal_times() | {2: 4 * STEP_S}, network_s=0.001)
        assert found(diagnostics).keys() == {"straggler"}

    def test_advice_for_pjrt_names_its_remedies(self) -> None:
        diagnostics = Diagnostics({0: "here", 1: "here"}, "pjrt")
        feed(diagnostics, {0: STEP_S, 1: STEP_S}, network_s=STEP_S)
        text = found(diagnostics)["network"].text
        assert "--precision" not in text
        assert "--batch" not in text
        assert "arrays in bfloat16" in text
        assert "fewer workers on this machine" in text

    def test_a_finding_ends_and_does_not_flicker(self, diagnostics: Diagnostics) -> None:
        between = (NETWORK.on + NETWORK.off) / 2
        for share, is_reported in [(between, False), (0.3, True), (between, True), (0.1, False)]:
            feed(
                diagnostics, equal_times(), network_s=STEP_S * share / (1 - share), steps=5 * WINDOW
            )
            assert ("network" in found(diagnostics)) is is_reported

    def test_a_finding_with_a_small_change_stays_unchanged(self, diagnostics: Diagnostics) -> None:
        feed(diagnostics, equal_times(), network_s=STEP_S, steps=2 * WINDOW)
        before = diagnostics.findings()
        feed(diagnostics, equal_times(), network_s=1.05 * STEP_S, steps=5 * WINDOW)
        assert diagnostics.findings() == before

    def test_one_rank_has_no_network_time(self) -> None:
        diagnostics = Diagnostics({0: "here"}, "mirrored")
        feed(diagnostics, {0: STEP_S}, network_s=STEP_S)
        assert not diagnostics.findings()

    def test_messages_of_ranks_without_common_steps(self, diagnostics: Diagnostics) -> None:
        """Report 100 rows per message. The last messages of two ranks have no step in common."""
        row = (0.0005, 0.0, 0.0004, 1.0)
        for rank in HOSTS:
            for message in range(3 if rank else 2):
                diagnostics.take(rows(rank, ALL, [row] * 100, first=1 + 100 * message))
        assert found(diagnostics)["network"].value == pytest.approx(0.8)


class TestStraggler:
    @pytest.mark.parametrize("ratio", [1.12, 1.2, 1.4, 3.0])
    def test_a_slow_rank_is_reported_with_its_host(
        self, diagnostics: Diagnostics, ratio: float
    ) -> None:
        feed(diagnostics, equal_times() | {2: ratio * STEP_S}, network_s=0.002)
        finding = found(diagnostics)["straggler"]
        assert finding.ranks == (2,)
        assert finding.value == pytest.approx(ratio)
        message = f"rank 2@hostB is {ratio:.2g} times slower than the median over the last 20 steps"
        assert finding.text.startswith(message)

    @pytest.mark.parametrize("own_s", [0.003, STEP_S, 10.0])
    @pytest.mark.parametrize(("ratio", "is_reported"), [(1.08, False), (1.12, True)])
    def test_the_limit_is_ten_percent(
        self, diagnostics: Diagnostics, own_s: float, ratio: float, is_reported: bool
    ) -> None:
        feed(diagnostics, equal_times(own_s) | {2: ratio * own_s})
        assert ("straggler" in found(diagnostics)) is is_reported

    @pytest.mark.parametrize(("own_s", "is_reported"), [(0.004, False), (STEP_S, True)])
    def test_small_differences_of_scattered_times_are_not_reported(
        self, diagnostics: Diagnostics, own_s: float, is_reported: bool
    ) -> None:
        for rank in HOSTS:
            usual = own_s * (1.12 if rank == 2 else 1)
            table = [(usual * (1 + 0.1 * (-1) ** i),) for i in range(WINDOW)]
            diagnostics.take(rows(rank, Columns(measures=("step_s",)), table))
        assert ("straggler" in found(diagnostics)) is is_reported

    def test_the_slower_of_two_ranks_is_compared_with_the_other(self) -> None:
        diagnostics = Diagnostics({0: "here", 1: "here"}, "mirrored")
        feed(diagnostics, {0: STEP_S, 1: 2 * STEP_S})
        assert found(diagnostics)["straggler"].value == pytest.approx(2)

    def test_several_stragglers_are_listed_and_counted(self, diagnostics: Diagnostics) -> None:
        feed(diagnostics, equal_times() | {1: 2 * STEP_S, 3: 3 * STEP_S})
        finding = found(diagnostics)["straggler"]
        assert finding.ranks == (1, 3)
        assert finding.text.startswith("rank 3@hostB is 3 times slower")
        assert "(and 1 more" in finding.text

    def test_too_few_steps_give_no_finding(self, diagnostics: Diagnostics) -> None:
        feed(diagnostics, equal_times() | {2: 2 * STEP_S}, steps=WINDOW - 1)
        assert not diagnostics.findings()

    def test_noise_of_short_steps_gives_no_finding(self, diagnostics: Diagnostics) -> None:
        feed(diagnostics, equal_times(FLOOR_S) | {2: 1.9 * FLOOR_S})
        assert "straggler" not in found(diagnostics)

    def test_a_straggler_that_catches_up_is_no_longer_reported(
        self, diagnostics: Diagnostics
    ) -> None:
        between = (STRAGGLER.on + STRAGGLER.off) / 2
        for ratio, is_reported in [(between, False), (1.5, True), (between, True), (1.0, False)]:
            feed(diagnostics, equal_times() | {2: ratio * STEP_S}, steps=5 * WINDOW)
            assert ("straggler" in found(diagnostics)) is is_reported

    def test_a_straggler_that_waits_for_data_has_that_reason(
        self, diagnostics: Diagnostics
    ) -> None:
        feed(diagnostics, equal_times() | {2: 2 * STEP_S}, input_s={2: STEP_S})
        findings = found(diagnostics)
        assert "it waits for its data: use --prefetch auto" in findings["straggler"].text
        assert findings["starved"].ranks == (2,)

    def test_ranks_without_collectives_are_compared(self, diagnostics: Diagnostics) -> None:
        """Without collectives, ranks are compared by the time of whole steps."""
        for rank in HOSTS:
            table = [(STEP_S * (2 if rank == 1 else 1),)] * WINDOW
            diagnostics.take(rows(rank, Columns(measures=("step_s",)), table))
        assert found(diagnostics)["straggler"].ranks == (1,)

    def test_collectives_may_be_timed_in_some_steps_only(self, diagnostics: Diagnostics) -> None:
        for rank in HOSTS:
            diagnostics.take(rows(rank, Columns(measures=("step_s",)), [(STEP_S,)] * WINDOW, 1000))
            waits = 0.3 if rank == 1 else 0.5
            diagnostics.take(rows(rank, SAMPLE, [(2 * STEP_S, 2 * STEP_S * waits)] * 5, 200))
        findings = found(diagnostics)
        assert findings["network"].value == pytest.approx(0.3)
        assert findings["straggler"].ranks == (1,)
        assert findings["straggler"].value == pytest.approx(0.7 / 0.5)


class TestStarved:
    def test_waiting_for_data_is_reported_with_options(self, diagnostics: Diagnostics) -> None:
        feed(diagnostics, equal_times(), input_s=equal_times(0.3 * STEP_S))
        finding = found(diagnostics)["starved"]
        assert finding.ranks == ()
        assert finding.value == pytest.approx(0.3)
        assert "30% of a step is waiting for data on all ranks" in finding.text
        assert "--prefetch auto" in finding.text
        assert "num_parallel_calls=tf.data.AUTOTUNE" in finding.text

    def test_waiting_ranks_are_listed_with_their_hosts(self, diagnostics: Diagnostics) -> None:
        waits = 0.3 * STEP_S
        for starved, part in [
            ({2: waits}, "on rank 2@hostB: "),
            ({1: waits, 3: waits}, "on rank 1@hostA, rank 3@hostB: "),
        ]:
            feed(diagnostics, equal_times(), input_s=starved, steps=5 * WINDOW)
            assert part in found(diagnostics)["starved"].text
        diagnostics = Diagnostics(dict.fromkeys(range(6), "here"), "pjrt")
        feed(diagnostics, dict.fromkeys(range(6), STEP_S), input_s=dict.fromkeys(range(5), waits))
        others = "on rank 0@here, rank 1@here, rank 2@here, 2 more: "
        assert others in found(diagnostics)["starved"].text

    def test_a_rank_between_the_limits_keeps_its_state(self, diagnostics: Diagnostics) -> None:
        between = (STARVED.on + STARVED.off) / 2 * STEP_S
        feed(diagnostics, equal_times(), input_s={0: between, 2: STEP_S / 2}, steps=5 * WINDOW)
        assert found(diagnostics)["starved"].ranks == (2,)
        feed(diagnostics, equal_times(), input_s={0: between, 2: between}, steps=5 * WINDOW)
        assert found(diagnostics)["starved"].ranks == (2,)

    def test_advice_for_a_cell_without_steps_names_no_option(self) -> None:
        diagnostics = Diagnostics(HOSTS, None)
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

    def test_a_finding_ends_and_does_not_flicker(self, diagnostics: Diagnostics) -> None:
        between = (STARVED.on + STARVED.off) / 2
        for share, is_reported in [(between, False), (0.5, True), (between, True), (0.01, False)]:
            feed(diagnostics, equal_times(), input_s=equal_times(share * STEP_S), steps=5 * WINDOW)
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
    diagnostics = Diagnostics(HOSTS, "mirrored", batch=8)
    for message in messages:
        diagnostics.take(message)
        for finding in diagnostics.findings():
            assert 0 < finding.value < float("inf")


@given(bad=st.lists(NUMBERS.filter(lambda x: not 0 <= x < 1e9), min_size=1, max_size=30))
def test_invalid_times_do_not_hide_the_valid_ones(bad: list[float]) -> None:
    """Times are NaN, infinite, or negative as after a clock that jumped."""
    diagnostics = Diagnostics(HOSTS, "mirrored", batch=8)
    feed(diagnostics, equal_times() | {2: 2 * STEP_S}, steps=2 * WINDOW)
    for rank in HOSTS:
        diagnostics.take(rows(rank, ALL, [(x, x, x, x) for x in bad if not x > 0], 1000))
    assert found(diagnostics)["straggler"].ranks == (2,)


def test_a_silent_rank_leaves_findings_unchanged(diagnostics: Diagnostics) -> None:
    feed(diagnostics, equal_times(), network_s=STEP_S)
    before = found(diagnostics)["network"]
    for rank in (0, 1, 2):
        diagnostics.take(rows(rank, ALL, [(STEP_S, 0.0, 0.0, 1.0)] * 200, first=500))
    assert found(diagnostics)["network"] == before


def test_a_recovery_gives_no_findings(diagnostics: Diagnostics) -> None:
    """Times before the recovery do not count.

    The first step after it is slow, most on the new rank.
    """
    feed(diagnostics, equal_times() | {2: 5 * STEP_S}, steps=WINDOW - 1)
    diagnostics.forget()
    feed(
        diagnostics,
        equal_times() | {2: 100 * STEP_S},
        input_s=equal_times(50 * STEP_S),
        steps=1,
        first=10,
    )
    assert found(diagnostics) == {}
    feed(diagnostics, equal_times(), first=11)
    assert found(diagnostics) == {}


def test_stored_rows_are_limited() -> None:
    recent = Recent()
    for message in range(50):
        recent.take(rows(0, ALL, [(0.1, 0.0, 0.0, 1.0)] * (LONGEST_ROWS + 100), 1000 * message))
    assert len(recent.times()[0].step_s) <= 2 * LONGEST_ROWS
