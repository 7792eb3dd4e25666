"""Diagnostics of step times: slow networks, slow ranks, and steps that wait for data.

The measured time of a collective starts when the rank is ready and ends with its result. It
therefore includes the wait for slower ranks. The minimum over ranks is the time of the network. The
rest is waiting for stragglers, which have the smallest times. Ranks are compared by their time
outside collectives: step time minus time in collectives. It includes the wait for data.

A finding needs 5 ms, a share of the step, and confidence: the median over the last `WINDOW` steps
must exceed these limits by a sign test (`confidence.py`), for `LASTING_S` without a break. Short
loads of the machine do not last so long.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import msgspec

from nbdist.records import Finding
from nbdist.telemetry.confidence import exceeds
from nbdist.telemetry.step_times import Recent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.records import FindingTopic, Rows, StepOptions, StrategyName
    from nbdist.telemetry.step_times import Place, Times


WINDOW = 50
"""Number of steps in a diagnosis, and the minimum required."""

LASTING_S = 5.0
"""Seconds for which a cost exceeds the limits before it is a finding."""

LEAST_S = 0.005
"""Minimum of the seconds per step in a finding."""

_FEW = 5
"""Steps required to estimate a time. A finding needs `WINDOW` steps, and 20 of them measured."""

_NAMED = 3
"""Number of ranks that a finding names. Further ranks are only counted."""

_ORDER: tuple[FindingTopic, ...] = ("straggler", "starved", "network")
"""Order of findings: the cause that can be removed most easily is first."""

_CLOSE = 0.1
"""Relative change below which a finding keeps its shown number."""


class Limits(msgspec.Struct, frozen=True):
    """Hysteresis of a finding: it appears above `on` and disappears below `off`."""

    on: float
    off: float

    def passed_by(self, value: float, *, held: bool) -> bool:
        return value > (self.off if held else self.on)


class Cost(msgspec.Struct, frozen=True):
    """Seconds per step that something takes, measured in several steps, and the steps' times."""

    seconds: tuple[float, ...]
    step_s: tuple[float, ...]

    def passes(self, limits: Limits, *, held: bool) -> bool:
        """Return True if the cost is a finding. A held finding needs no confidence."""
        least_s = LEAST_S / 2 if held else LEAST_S
        shares = self.shares
        if median(self.seconds) < least_s or not limits.passed_by(median(shares), held=held):
            return False
        return held or (exceeds(self.seconds, least_s) and exceeds(shares, limits.on))

    @property
    def shares(self) -> list[float]:
        """The share of each step, at most 1."""
        steps = zip(self.seconds, self.step_s, strict=True)
        return [min(1.0, seconds / step_s) if step_s > 0 else 0.0 for seconds, step_s in steps]

    @property
    def share(self) -> float:
        """The median share of a step."""
        return median(self.shares)


NETWORK = Limits(0.20, 0.16)
STRAGGLER = Limits(0.10, 0.05)
STARVED = Limits(0.10, 0.07)
"""Limits of shares of the step: time in collectives, excess of the slow rank, wait for data."""


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
        batch: samples in a global batch; 0 if unknown.
        step: options of a step cell; None for other cells.

    Attributes:
        pace: pace at the last call of `findings`.
    """

    def __init__(
        self,
        host_of: Mapping[int, str],
        strategy: StrategyName | None,
        batch: int = 0,
        step: StepOptions | None = None,
    ) -> None:
        self._host_of = host_of
        self._advice = _Advice(strategy, batch, step, one_host=len(set(host_of.values())) < 2)
        self._recent = Recent()
        self._held: dict[FindingTopic, Finding] = {}
        self._since: dict[tuple[FindingTopic, int], float] = {}
        self._at_s = 0.0
        self.pace = Pace()

    def take(self, rows: Rows) -> None:
        """Store the end of a rank's report. Thread-safe."""
        self._recent.take(rows)

    def forget(self) -> None:
        """Discard the times, because the ranks restart. Findings stay until there are new times."""
        self._recent.forget()
        self._since.clear()

    def findings(self) -> tuple[Finding, ...]:
        """Return the current findings, the most useful first.

        Those that cannot be updated stay unchanged.
        """
        every = self._recent.times()
        known = _network({rank: t for rank, t in every.items() if len(t.step_s) >= _FEW})
        self.pace = Pace(_pace(every), known.share if known is not None else None)
        times = {rank: t for rank, t in every.items() if len(t.step_s) >= WINDOW}
        self._at_s = max((t.at_s for t in times.values()), default=0.0)
        self._look_at_network(_network(times))
        self._look_at_input(times)
        self._look_for_stragglers(times)
        return tuple(self._held[topic] for topic in _ORDER if topic in self._held)

    def _look_at_network(self, network: Cost | None) -> None:
        if network is None:
            return
        if not self._lasts(network, NETWORK, "network", held="network" in self._held):
            self._held.pop("network", None)
            return
        share = self._shown("network", (), network.share)
        text = f"{share:.0%} of a step is spent in collectives: {self._advice.on_network()}"
        self._hold(Finding(topic="network", text=text, value=share))

    def _look_for_stragglers(self, times: Mapping[int, Times]) -> None:
        own = _own(times)
        if len(own) < 2:
            return
        before = self._held["straggler"].ranks if "straggler" in self._held else ()
        excess = _excess(own, times)
        starved = self._held.get("starved")
        starving = (starved.ranks or tuple(own)) if starved else ()
        slow = tuple(
            rank
            for rank, cost in excess.items()
            if self._lasts(cost, STRAGGLER, "straggler", rank, held=rank in before)
            and not (rank in starving and _is_input(cost, times[rank]))  # it is starved instead
        )
        if not slow:
            self._held.pop("straggler", None)
            return
        worst = max(slow, key=lambda rank: median(excess[rank].seconds))
        mine = median(own[worst].values())
        usual = mine - median(excess[worst].seconds)
        ratio = self._shown("straggler", slow, mine / max(usual, LEAST_S / 10))
        more = len(slow) - 1
        others = f" (and {more} more rank{'s' * (more > 1)})" if more else ""
        text = (
            f"{self._name(worst)} computes {ratio:.2g} times longer than the other ranks "
            f"({1000 * mine:.3g} instead of {1000 * usual:.3g} ms a step){others}: "
            f"{self._advice.on_straggler()}"
        )
        self._hold(Finding(topic="straggler", text=text, ranks=slow, value=ratio))

    def _look_at_input(self, times: Mapping[int, Times]) -> None:
        waits = {rank: wait for rank, t in times.items() if (wait := _input(t)) is not None}
        if not waits:
            return
        held = self._held.get("starved")
        before = (held.ranks or tuple(waits)) if held else ()
        starved = tuple(
            rank
            for rank, wait in waits.items()
            if self._lasts(wait, STARVED, "starved", rank, held=rank in before)
        )
        if not starved:
            self._held.pop("starved", None)
            return
        ranks = starved if len(starved) < len(waits) else ()
        share = self._shown("starved", ranks, max(waits[rank].share for rank in starved))
        where = self._names(starved) if ranks or len(waits) == 1 else "all ranks"
        text = (
            f"starved: {share:.0%} of a step is waiting for data on {where}: "
            f"{self._advice.on_input()}"
        )
        self._hold(Finding(topic="starved", text=text, ranks=ranks, value=share))

    def _lasts(
        self, cost: Cost, limits: Limits, topic: FindingTopic, rank: int = -1, *, held: bool
    ) -> bool:
        """Return True if a cost has exceeded the limits for `LASTING_S`, or is still reported."""
        if not cost.passes(limits, held=held):
            self._since.pop((topic, rank), None)
            return False
        return held or self._at_s - self._since.setdefault((topic, rank), self._at_s) >= LASTING_S

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
    """Advice with the options that apply to this run and are not in effect."""

    strategy: StrategyName | None
    batch: int
    step: StepOptions | None
    one_host: bool

    def on_network(self) -> str:
        larger = "a larger --batch" if self.step is not None else "a larger batch"
        ways = [f"{larger} (it is {self.batch:,})" if self.batch else larger]
        ways.append("gradients accumulated over several batches")
        if self.strategy == "pjrt":
            ways.append("arrays in bfloat16")
        ways.append("fewer workers on this machine" if self.one_host else "a faster link")
        return f"try {', '.join(ways[:-1])} or {ways[-1]}"

    def on_straggler(self) -> str:
        if self.one_host:
            return "check for other processes on this machine"
        return "check for other processes on its host, or a slower processor"

    def on_input(self) -> str:
        ways = ".cache() or .map(..., num_parallel_calls=tf.data.AUTOTUNE)"
        if self.step is None:
            return (
                f"for tf.data, append .prefetch(tf.data.AUTOTUNE), {ways}; "
                "for keras.utils.PyDataset, set workers=4"
            )
        if self.step.prefetch:
            return (
                f"its batches take longer than the steps: prepare them faster, in tf.data by {ways}"
            )
        return f"use --prefetch auto, or for tf.data {ways}"


def _last(places: set[Place]) -> list[Place] | None:
    """Return the last places of the window. None if there are too few."""
    return sorted(places)[-WINDOW:] if len(places) >= _FEW else None


def _usual_step(times: Times) -> float:
    return median(times.step_s.values())


def _common(reports: Iterable[Iterable[Place]]) -> set[Place]:
    first, *others = reports
    return set(first).intersection(*others)


def _is_sampled(times: Times) -> bool:
    """Return True if collectives are timed at some steps only."""
    return len(times.collective_s.keys() & times.step_s.keys()) < WINDOW


def _pace(times: Mapping[int, Times]) -> float | None:
    """Return seconds per step. None before `_FEW` steps, because the first steps are slower."""
    usual = [_usual_step(t) for t in times.values() if len(t.step_s) >= _FEW]
    return median(usual) if usual else None


def _network(times: Mapping[int, Times]) -> Cost | None:
    """Return the time of the network in recent steps that all ranks have timed."""
    ranks = list(times.values())
    if len(ranks) < 2:
        return None
    common = _common(t.collective_s for t in ranks)
    if not any(map(_is_sampled, ranks)):
        common &= _common(t.step_s for t in ranks)
    places = _last(common)
    if places is None:
        return None
    usual = median(map(_usual_step, ranks))
    return Cost(
        tuple(min(t.collective_s[place] for t in ranks) for place in places),
        tuple(median(t.step_s.get(place, usual) for t in ranks) for place in places),
    )


def _own(times: Mapping[int, Times]) -> dict[int, dict[Place, float]]:
    """Return the seconds outside collectives by rank and place, in steps that all have timed.

    If no rank has timed collectives, whole steps count. Empty if there are too few steps.
    """
    timed = any(t.collective_s for t in times.values())
    known = [t.collective_s if timed else t.step_s for t in times.values()]
    places = _last(_common(known)) if known else None
    if places is None:
        return {}
    return {rank: _outside(t, places) for rank, t in times.items()}


def _outside(times: Times, places: list[Place]) -> dict[Place, float]:
    usual = _usual_step(times)
    return {
        p: max(0.0, times.step_s.get(p, usual) - times.collective_s.get(p, 0.0)) for p in places
    }


def _excess(
    own: Mapping[int, Mapping[Place, float]], times: Mapping[int, Times]
) -> dict[int, Cost]:
    """Return the time of each rank above that of the others, step by step.

    The others have the lower median of all ranks. Of two ranks, the slow one is thus compared with
    the other.
    """
    middle = (len(own) - 1) // 2
    places = next(iter(own.values())).keys()
    usual = {place: sorted(one[place] for one in own.values())[middle] for place in places}
    costs = {}
    for rank, mine in own.items():
        usual_s = _usual_step(times[rank])
        costs[rank] = Cost(
            tuple(mine[place] - usual[place] for place in places),
            tuple(times[rank].step_s.get(place, usual_s) for place in places),
        )
    return costs


def _is_input(excess: Cost, times: Times) -> bool:
    """Return True if waiting for data explains most of the excess of a rank."""
    waits = times.input_s.values()
    return bool(waits) and median(waits) > median(excess.seconds) / 2


def _input(times: Times) -> Cost | None:
    """Return the wait for data in recent steps."""
    places = _last(times.input_s.keys() & times.step_s.keys())
    if places is None:
        return None
    return Cost(
        tuple(times.input_s[place] for place in places),
        tuple(times.step_s[place] for place in places),
    )
