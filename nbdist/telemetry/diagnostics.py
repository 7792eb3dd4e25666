"""What the times of a run say: a slow network, a slow rank, steps that wait for data.

A collective lasts from when a rank is ready for it until its result is there, and so contains the
wait for slower ranks. The least over the ranks is the network's; what is above it is the wait for
stragglers, who have the least. A rank's own time is therefore its step less its collectives.
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
"""How many rows of a table are kept at least, once there are so many."""

KEPT_MESSAGES = 2
"""Messages that are kept at least: of short steps one holds more rows than `KEPT_ROWS`, and the
last ones of two ranks need not have a step in common."""

LONGEST_ROWS = 400
"""Of a longer message, as one that had to wait, only the end is kept."""

_TIMES = ("step_s", "input_s", "collective_s")
_EPOCH, _STEP = PLACE.index("epoch"), PLACE.index("step")

Place = tuple[float, float]
"""Epoch and step."""


MOST_S = 1e10
"""What takes longer is no time that was measured."""


class Times(msgspec.Struct):
    """A rank's recent seconds by step, for every measure where it was reported."""

    step_s: dict[Place, float]
    input_s: dict[Place, float]
    collective_s: dict[Place, float]


class Recent:
    """The last rows of every rank that hold times. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tails: dict[int, dict[Columns, _Tail]] = {}

    def take(self, rows: Rows) -> None:
        """Keep the end of a message; nothing of it is decoded."""
        with self._lock:
            tails = self._tails.setdefault(rows.rank, {})
            if (tail := tails.get(rows.columns)) is None:
                tail = tails[rows.columns] = _Tail(rows.columns)
            tail.add(rows.values)

    def forget(self) -> None:
        """As if nothing had been taken."""
        with self._lock:
            self._tails.clear()

    def times(self) -> dict[int, Times]:
        """By rank; numbers that are no seconds (NaN, negative, or of centuries) are left out."""
        with self._lock:
            kept = {r: [(t, t.data()) for t in tails.values()] for r, tails in self._tails.items()}
        return {rank: _times(tails) for rank, tails in sorted(kept.items())}


class _Tail:
    """The end of one table of one rank."""

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
        """The seconds of each measure by place; by columns, which is much faster than by rows."""
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
"""Steps that are looked at, and that there must be."""

SAMPLES = 10
"""Steps that are looked at where collectives are timed now and then; half must be there."""

FLOOR_S = 0.0002
"""Less own time than this above the median makes no straggler, whatever the ratio."""

NOISE = 6.0
"""Nor does less than so many standard errors of the two medians that are compared.

Of two ranks alike with steps of 1 to 5 ms on two busy cores, none of 108 medians over 20 steps was
told; with a fixed 0.5 ms in its place 6 were, and with 1 ms slow ranks were missed.
"""

MOST_NOISE_S = 0.002
"""What is above that is slowness, however the rank's times scatter."""

_FEW = 5
"""Steps that tell how long one takes."""

_NAMED = 3
"""Ranks that a line names; more are counted."""

_CLOSE = 0.1
"""A number that moved by less than this part of itself is shown as it was."""


class Limits(msgspec.Struct, frozen=True):
    """A finding comes above `on` and goes below `off`, so that it does not flicker."""

    on: float
    off: float

    def passed_by(self, value: float, *, held: bool) -> bool:
        return value > (self.off if held else self.on)


NETWORK = Limits(0.20, 0.16)
STRAGGLER = Limits(1.10, 1.05)
STARVED = Limits(0.10, 0.07)


class Pace(msgspec.Struct, frozen=True):
    """Of the last steps; None where there are too few.

    Attributes:
        step_s: seconds between two, the median of the ranks' medians.
        collectives: the share that is spent in collectives.
    """

    step_s: float | None = None
    collectives: float | None = None


class Diagnostics:
    """Looks at the recent steps of one run.

    Args:
        host_of: the host of each rank that runs it.
        strategy: whose scope it runs in.
        batch: samples in a global batch of a step cell; 0 where the cell is none.

    Attributes:
        pace: when `findings` was asked last.
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
        """Keep the end of what a rank reports; may be called on another thread."""
        self._recent.take(rows)

    def forget(self) -> None:
        """What was reported is of no use: ranks begin again. Findings stay until there is more."""
        self._recent.forget()

    def findings(self) -> tuple[Finding, ...]:
        """What is to be said now; what cannot be told at the moment stays as it was."""
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
        # Of an even number the lower one: of two ranks the slow one is measured by the other.
        usual = sorted(own.values(), key=lambda o: o.seconds)[(len(own) - 1) // 2]
        before = self._held["straggler"].ranks if "straggler" in self._held else ()
        slow = tuple(r for r, o in own.items() if o.is_slower_than(usual, held=r in before))
        if not slow:
            self._held.pop("straggler", None)
            return
        worst = max(slow, key=lambda rank: own[rank].seconds)
        ratio = self._shown("straggler", slow, own[worst].ratio_to(usual))
        others = f" (and {len(slow) - 1} more ranks are slow)" if len(slow) > 1 else ""
        waits = _usual_input(times[worst]) > (own[worst].seconds - usual.seconds) / 2
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
        before = self._before_starved(shares)
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

    def _before_starved(self, shares: Mapping[int, float]) -> tuple[int, ...]:
        held = self._held.get("starved")
        return (held.ranks or tuple(shares)) if held else ()

    def _name(self, rank: int) -> str:
        return f"rank {rank}@{self._host_of.get(rank, '?')}"

    def _names(self, ranks: tuple[int, ...]) -> str:
        more = len(ranks) - _NAMED
        rest = [f"{more} more"] if more > 0 else []
        return ", ".join([*map(self._name, ranks[:_NAMED]), *rest])

    def _shown(self, topic: FindingTopic, ranks: tuple[int, ...], value: float) -> float:
        """The value that is shown already, where it is about the same ranks and close."""
        held = self._held.get(topic)
        same = held is not None and held.ranks == ranks
        return held.value if held and same and abs(value - held.value) < _CLOSE * value else value

    def _hold(self, finding: Finding) -> None:
        self._held[finding.topic] = finding


class _Advice(msgspec.Struct, frozen=True):
    """What to type, as far as it can be typed for this run."""

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
            return f"it waits for its data; {self.on_input()}"
        where = "on this machine" if self.one_host else "on its host"
        return (
            f"look for other processes {where}, fewer cores, or more work in its part of the data"
        )

    def on_input(self) -> str:
        ways = ".cache() or .map(..., num_parallel_calls=tf.data.AUTOTUNE)"
        if self.batch:
            return f"type --prefetch auto, or for tf.data {ways}"
        return (
            f"for tf.data type .prefetch(tf.data.AUTOTUNE) at its end, {ways}; "
            "for keras.utils.PyDataset workers=4"
        )


class _Own(msgspec.Struct, frozen=True):
    """What of a rank's steps is its own.

    Attributes:
        seconds: of a step, the median.
        error_s: the standard error of that, from the median deviation.
    """

    seconds: float
    error_s: float

    @classmethod
    def of(cls, measured: list[float]) -> _Own:
        middle = median(measured)
        deviation = median(abs(seconds - middle) for seconds in measured)
        # A normal distribution's standard deviation is 1.4826 median deviations, and the error of a
        # median over n is 1.2533 standard deviations over the root of n.
        return cls(middle, 1.2533 * 1.4826 * deviation / math.sqrt(len(measured)))

    def ratio_to(self, usual: _Own) -> float:
        return self.seconds / max(usual.seconds, FLOOR_S)

    def is_slower_than(self, usual: _Own, *, held: bool) -> bool:
        """A straggler that is told already is not asked again whether it is noise."""
        noise = min(MOST_NOISE_S, NOISE * math.hypot(self.error_s, usual.error_s))
        least = FLOOR_S if held else max(FLOOR_S, noise)
        above = self.seconds - usual.seconds > least
        return above and STRAGGLER.passed_by(self.ratio_to(usual), held=held)


def _usual_step(times: Times) -> float:
    return median(times.step_s.values())


def _usual_input(times: Times) -> float:
    return median(times.input_s.values()) if times.input_s else 0.0


def _last(places: set[Place], *, sampled: bool) -> list[Place] | None:
    """The last places to look at; None where they are too few."""
    wanted, needed = (SAMPLES, SAMPLES // 2) if sampled else (WINDOW, WINDOW)
    return sorted(places)[-wanted:] if len(places) >= needed else None


def _common(reports: list[dict[Place, float]]) -> set[Place]:
    return set(reports[0]).intersection(*reports[1:])


def _is_sampled(times: Times) -> bool:
    """Whether collectives are timed at some steps only."""
    return len(times.collective_s.keys() & times.step_s.keys()) < WINDOW


def _pace(times: Mapping[int, Times]) -> float | None:
    """Seconds of a step, once a few have been made: the first ones are no measure."""
    usual = [_usual_step(t) for t in times.values() if len(t.step_s) >= _FEW]
    return median(usual) if usual else None


def _network_share(times: Mapping[int, Times]) -> float | None:
    """Of a step, the median over recent ones that all ranks have timed."""
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
    """By rank, what of a step is not in collectives; ranks of which that is unknown are left out.

    Where no rank has timed any, there are none that we know of: ranks go each at their own pace.
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
    """Of a step, the median over recent ones."""
    places = _last(times.input_s.keys() & times.step_s.keys(), sampled=False)
    if places is None:
        return None
    steps = [(times.input_s[place], times.step_s[place]) for place in places]
    return median(min(1.0, waited / step_s) if step_s > 0 else 0.0 for waited, step_s in steps)
