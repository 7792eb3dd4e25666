"""Diagnostics of step times: slow networks, slow ranks, and steps that wait for data.

The measured time of a collective starts when the rank is ready and ends with its result. It
therefore includes the wait for slower ranks. The minimum over ranks is the time of the network. The
rest is waiting for stragglers, which have the smallest times. Ranks are compared by their time
outside collectives: step time minus time in collectives. It includes the wait for data.
"""

from __future__ import annotations

import math
import struct
import threading
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from nbdist.records import PLACE, Finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.records import Columns, FindingTopic, Rows, StrategyName


KEPT_ROWS = 40
"""Number of rows of a table that are kept, if so many were received."""

KEPT_MESSAGES = 2
"""Number of messages that are kept.

With short steps, one message contains more than `KEPT_ROWS` rows. The last messages of two ranks
may then have no step in common.
"""

LONGEST_ROWS = 400
"""Number of rows kept of a long message, for example one that was delayed."""

_TIMES = ("step_s", "input_s", "collective_s")
_EPOCH, _STEP = PLACE.index("epoch"), PLACE.index("step")

Place = tuple[float, float]
"""Epoch and step."""


MOST_S = 1e10
"""Upper limit of a valid time in seconds."""


class Times(msgspec.Struct):
    """Recent seconds of a rank per step, for each measure with a report."""

    step_s: dict[Place, float]
    input_s: dict[Place, float]
    collective_s: dict[Place, float]


class Recent:
    """Last rows with times of every rank. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tails: dict[int, dict[Columns, _Tail]] = {}

    def take(self, rows: Rows) -> None:
        """Store the end of a message without decoding it."""
        with self._lock:
            tails = self._tails.setdefault(rows.rank, {})
            if (tail := tails.get(rows.columns)) is None:
                tail = tails[rows.columns] = _Tail(rows.columns)
            tail.add(rows.values)

    def forget(self) -> None:
        """Discard all rows."""
        with self._lock:
            self._tails.clear()

    def times(self) -> dict[int, Times]:
        """Return the times by rank. Values that are NaN, negative or above `MOST_S` are omitted."""
        with self._lock:
            kept = {r: [(t, t.data()) for t in tails.values()] for r, tails in self._tails.items()}
        return {rank: _times(tails) for rank, tails in sorted(kept.items())}


class _Tail:
    """End of one table of one rank."""

    def __init__(self, columns: Columns) -> None:
        names = columns.names
        self.measured = [(name, names.index(name)) for name in _TIMES if name in columns.measures]
        self.row = struct.Struct(f"<{len(names)}d")
        self._messages: deque[bytes] = deque()
        self._bytes = 0

    def add(self, values: bytes) -> None:
        if not self.measured:
            return
        whole = len(values) - len(values) % self.row.size
        end = values[max(0, whole - LONGEST_ROWS * self.row.size) : whole]
        self._messages.append(end)
        self._bytes += len(end)
        enough = KEPT_ROWS * self.row.size
        while (
            len(self._messages) > KEPT_MESSAGES and self._bytes - len(self._messages[0]) >= enough
        ):
            self._bytes -= len(self._messages.popleft())

    def data(self) -> bytes:
        return b"".join(self._messages)

    def add_to(self, found: dict[str, dict[Place, float]], data: bytes) -> None:
        """Add the seconds of each measure by place. Works by column, much faster than by row."""
        columns = list(zip(*self.row.iter_unpack(data), strict=True))
        if not columns:
            return
        places = list(zip(columns[_EPOCH], columns[_STEP], strict=True))
        for name, column in self.measured:
            seconds = zip(places, columns[column], strict=True)
            found[name].update([pair for pair in seconds if 0 <= pair[1] < MOST_S])


def _times(tails: list[tuple[_Tail, bytes]]) -> Times:
    found: dict[str, dict[Place, float]] = {name: {} for name in _TIMES}
    for tail, data in tails:
        tail.add_to(found, data)
    return Times(**found)


WINDOW = 20
"""Number of steps in a diagnosis, and the minimum required."""

SAMPLES = 10
"""Number of sampled steps in a diagnosis. Half of them are required."""

FLOOR_S = 0.0002
"""Minimum excess of the time outside collectives over the median that makes a rank a straggler."""

NOISE = 6.0
"""Minimum excess in standard errors of the two compared medians.

Measured with two equal ranks, steps of 1 to 5 ms and two busy cores: none of 108 medians over 20
steps exceeded this limit. A fixed limit of 0.5 ms reported 6 of them, and one of 1 ms missed slow
ranks.
"""

MOST_NOISE_S = 0.002
"""Upper limit of the noise. A larger excess means a slow rank, however scattered its times are."""

_FEW = 5
"""Steps required to estimate the step time."""

_NAMED = 3
"""Number of ranks that a finding names. Further ranks are only counted."""

_CLOSE = 0.1
"""Relative change below which a finding keeps its shown number."""


class Limits(msgspec.Struct, frozen=True):
    """Hysteresis of a finding: it appears above `on` and disappears below `off`."""

    on: float
    off: float

    def passed_by(self, value: float, *, held: bool) -> bool:
        return value > (self.off if held else self.on)


NETWORK = Limits(0.20, 0.16)
STRAGGLER = Limits(1.10, 1.05)
STARVED = Limits(0.10, 0.07)


class Pace(msgspec.Struct, frozen=True):
    """Pace of the last steps. Values are None if there are too few steps.

    Attributes:
        step_s: seconds per step, the median over the medians of the ranks.
        collectives: share of a step in collectives.
    """

    step_s: float | None = None
    collectives: float | None = None


class Diagnostics:
    """Diagnostics of the recent steps of one run.

    Args:
        host_of: host of each rank.
        strategy: strategy of the cell.
        batch: samples in a global batch of a step cell, 0 for other cells.

    Attributes:
        pace: pace at the last call of `findings`.
    """

    def __init__(
        self, host_of: Mapping[int, str], strategy: StrategyName | None, batch: int = 0
    ) -> None:
        self._host_of = host_of
        self._advice = _Advice(strategy, batch, one_host=len(set(host_of.values())) < 2)
        self._recent = Recent()
        self._held: dict[FindingTopic, Finding] = {}
        self.pace = Pace()

    def take(self, rows: Rows) -> None:
        """Store the end of a rank's report. Thread-safe."""
        self._recent.take(rows)

    def forget(self) -> None:
        """Discard the times, because the ranks restart. Findings stay until there are new times."""
        self._recent.forget()

    def findings(self) -> tuple[Finding, ...]:
        """Return the current findings. Those that cannot be updated stay unchanged."""
        every = self._recent.times()
        times = {rank: t for rank, t in every.items() if len(t.step_s) >= WINDOW}
        share = _network_share(times)
        self.pace = Pace(_pace(every), share)
        self._look_at_network(share)
        self._look_for_stragglers(times)
        self._look_at_input(times)
        return tuple(self._held.values())

    def _look_at_network(self, share: float | None) -> None:
        if share is None:
            return
        if not NETWORK.passed_by(share, held="network" in self._held):
            self._held.pop("network", None)
            return
        share = self._shown("network", (), share)
        text = f"{share:.0%} of a step is spent in collectives: {self._advice.on_network()}"
        self._hold(Finding(topic="network", text=text, value=share))

    def _look_for_stragglers(self, times: Mapping[int, Times]) -> None:
        own = _own(times)
        if len(own) < 2:
            return
        # For an even number of ranks, use the lower median. With two ranks, this compares the slow
        # one with the other.
        usual = sorted(own.values(), key=lambda o: o.seconds)[(len(own) - 1) // 2]
        before = self._held["straggler"].ranks if "straggler" in self._held else ()
        slow = tuple(r for r, o in own.items() if o.is_slower_than(usual, held=r in before))
        if not slow:
            self._held.pop("straggler", None)
            return
        worst = max(slow, key=lambda rank: own[rank].seconds)
        ratio = self._shown("straggler", slow, own[worst].ratio_to(usual))
        others = f" (and {len(slow) - 1} more ranks are slow)" if len(slow) > 1 else ""
        input_s = times[worst].input_s
        usual_input_s = median(input_s.values()) if input_s else 0.0
        waits = usual_input_s > (own[worst].seconds - usual.seconds) / 2
        text = (
            f"{self._name(worst)} is {ratio:.2g} times slower than the "
            f"median over the last {WINDOW} steps{others}: {self._advice.on_straggler(waits=waits)}"
        )
        self._hold(Finding(topic="straggler", text=text, ranks=slow, value=ratio))

    def _look_at_input(self, times: Mapping[int, Times]) -> None:
        shares = {
            rank: share for rank, t in times.items() if (share := _input_share(t)) is not None
        }
        if not shares:
            return
        held = self._held.get("starved")
        before = (held.ranks or tuple(shares)) if held else ()
        starved = tuple(r for r, s in shares.items() if STARVED.passed_by(s, held=r in before))
        if not starved:
            self._held.pop("starved", None)
            return
        ranks = starved if len(starved) < len(shares) else ()
        share = self._shown("starved", ranks, max(shares.values()))
        where = self._names(starved) if ranks or len(shares) == 1 else "all ranks"
        waits = f"{share:.0%} of a step is waiting for data on {where}"
        text = f"starved: {waits}: {self._advice.on_input()}"
        self._hold(Finding(topic="starved", text=text, ranks=ranks, value=share))

    def _name(self, rank: int) -> str:
        return f"rank {rank}@{self._host_of.get(rank, '?')}"

    def _names(self, ranks: tuple[int, ...]) -> str:
        more = len(ranks) - _NAMED
        rest = [f"{more} more"] if more > 0 else []
        return ", ".join([*map(self._name, ranks[:_NAMED]), *rest])

    def _shown(self, topic: FindingTopic, ranks: tuple[int, ...], value: float) -> float:
        """Return the number already shown if it concerns the same ranks and differs little."""
        held = self._held.get(topic)
        same = held is not None and held.ranks == ranks
        return held.value if held and same and abs(value - held.value) < _CLOSE * value else value

    def _hold(self, finding: Finding) -> None:
        self._held[finding.topic] = finding


class _Advice(msgspec.Struct, frozen=True):
    """Advice with the options that apply to this run."""

    strategy: StrategyName | None
    batch: int
    one_host: bool

    def on_network(self) -> str:
        larger = f"a larger --batch (it is {self.batch:,})" if self.batch else "a larger batch"
        ways = [larger, "gradients accumulated over several batches"]
        if self.strategy == "pjrt":
            ways.append("arrays in bfloat16")
        elif self.strategy == "mirrored":
            ways += ["--precision bfloat16", "%dist_start --communication ring (nccl between GPUs)"]
        ways.append("fewer workers on this machine" if self.one_host else "a faster link")
        return f"try {', '.join(ways[:-1])} or {ways[-1]}"

    def on_straggler(self, *, waits: bool) -> str:
        if waits:
            return f"it waits for its data: {self.on_input()}"
        where = "on this machine" if self.one_host else "on its host"
        return f"check for other processes {where}, fewer cores, or a larger share of the data"

    def on_input(self) -> str:
        ways = ".cache() or .map(..., num_parallel_calls=tf.data.AUTOTUNE)"
        if self.batch:
            return f"use --prefetch auto, or for tf.data {ways}"
        return (
            f"for tf.data, append .prefetch(tf.data.AUTOTUNE), {ways}; "
            "for keras.utils.PyDataset, set workers=4"
        )


class _Own(msgspec.Struct, frozen=True):
    """Time of a rank's steps outside collectives.

    Attributes:
        seconds: median of a step.
        error_s: standard error of the median, from the median absolute deviation.
    """

    seconds: float
    error_s: float

    @classmethod
    def of(cls, measured: list[float]) -> _Own:
        middle = median(measured)
        deviation = median(abs(seconds - middle) for seconds in measured)
        # For a normal distribution, the standard deviation is 1.4826 median absolute deviations.
        # The standard error of a median over n values is 1.2533 standard deviations over the root
        # of n.
        return cls(middle, 1.2533 * 1.4826 * deviation / math.sqrt(len(measured)))

    def ratio_to(self, usual: _Own) -> float:
        return self.seconds / max(usual.seconds, FLOOR_S)

    def is_slower_than(self, usual: _Own, *, held: bool) -> bool:
        """Return True for a straggler. A rank that is already reported skips the noise test."""
        noise = min(MOST_NOISE_S, NOISE * math.hypot(self.error_s, usual.error_s))
        least = FLOOR_S if held else max(FLOOR_S, noise)
        above = self.seconds - usual.seconds > least
        return above and STRAGGLER.passed_by(self.ratio_to(usual), held=held)


def _usual_step(times: Times) -> float:
    return median(times.step_s.values())


def _last(places: set[Place], *, sampled: bool) -> list[Place] | None:
    """Return the last places of the window. None if there are too few."""
    wanted, needed = (SAMPLES, SAMPLES // 2) if sampled else (WINDOW, WINDOW)
    return sorted(places)[-wanted:] if len(places) >= needed else None


def _common(reports: list[dict[Place, float]]) -> set[Place]:
    return set(reports[0]).intersection(*reports[1:])


def _is_sampled(times: Times) -> bool:
    """Return True if collectives are timed at some steps only."""
    return len(times.collective_s.keys() & times.step_s.keys()) < WINDOW


def _pace(times: Mapping[int, Times]) -> float | None:
    """Return seconds per step. None before `_FEW` steps, because the first steps are slower."""
    usual = [_usual_step(t) for t in times.values() if len(t.step_s) >= _FEW]
    return median(usual) if usual else None


def _network_share(times: Mapping[int, Times]) -> float | None:
    """Return the median share of the network in recent steps that all ranks have timed."""
    ranks = list(times.values())
    if len(ranks) < 2:
        return None
    sampled = any(map(_is_sampled, ranks))
    common = _common([t.collective_s for t in ranks])
    if not sampled:
        common &= _common([t.step_s for t in ranks])
    places = _last(common, sampled=sampled)
    usual = median(map(_usual_step, ranks))
    if places is None or usual <= 0:
        return None
    shares = []
    for place in places:
        step_s = median(t.step_s.get(place, usual) for t in ranks)
        network_s = min(t.collective_s[place] for t in ranks)
        shares.append(min(1.0, network_s / step_s) if step_s > 0 else 0.0)
    return median(shares)


def _own(times: Mapping[int, Times]) -> dict[int, _Own]:
    """Return the times outside collectives by rank. Ranks with too few measurements are left out.

    If no rank has timed collectives, whole steps count.
    """
    timed = any(t.collective_s for t in times.values())
    own = {}
    for rank, t in times.items():
        usual, sampled = _usual_step(t), _is_sampled(t)
        known = set(t.collective_s) if sampled else t.collective_s.keys() & t.step_s.keys()
        places = _last(known if timed else set(t.step_s), sampled=timed and sampled)
        if places is not None:
            own[rank] = _Own.of(
                [max(0.0, t.step_s.get(p, usual) - t.collective_s.get(p, 0.0)) for p in places]
            )
    return own


def _input_share(times: Times) -> float | None:
    """Return the median share of the input in recent steps."""
    places = _last(times.input_s.keys() & times.step_s.keys(), sampled=False)
    if places is None:
        return None
    steps = [(times.input_s[place], times.step_s[place]) for place in places]
    return median(min(1.0, waited / step_s) if step_s > 0 else 0.0 for waited, step_s in steps)
