"""Detection of dead ranks, of steps without progress, and of collectives that cannot end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from nbdist.cluster.heartbeats import Heartbeats
from nbdist.execution.cancellation import POLL_S, QUIET_LOOKS
from nbdist.execution.failures import hang, lone_collective_error, lost_error, stuck_error
from nbdist.records import Diagnose, RankPosition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from nbdist.cluster.engines import Engines
    from nbdist.execution.cancellation import Cancellation
    from nbdist.execution.context import RunContext
    from nbdist.execution.failures import CellOutcome
    from nbdist.execution.sending import CellSender
    from nbdist.records import CellEnded, Event, StrategyName
    from nbdist.settings import Settings

_ARRIVAL_S = 1.0
"""The time that the last record of a process may take to arrive."""

_LONGER_WAITS = "if the ranks may wait longer between two steps: --hang-after SECONDS"

_EVERY_S = 0.25
_FIRST_S = 1.0
"""Time after the first end of a rank before nbdist asks. Usually, the others end too."""

_WAIT_S = 1.8
"""The time that all ranks must be idle before nbdist cancels the collective."""

_STALE_S = 1.0
_MOST_BUSY = 0.1
"""The share of a core that an idle process may use (measured on 2 cores: 0.003 to 0.007)."""

_NOISE_S = 0.05
_MAIN_NOISE_S = 0.005
"""The processor time that a waiting main thread may use. An endless wait uses none."""


@dataclass
class _Idle:
    """An idle rank.

    Attributes:
        first: the first answer since which the rank is idle.
        last: the last answer.
        received_at: the time at which the last answer arrived, by this process's clock.
    """

    first: RankPosition
    last: RankPosition
    received_at: float

    @property
    def seconds(self) -> float:
        return self.last.clock_s - self.first.clock_s


class CollectiveDeadlocks:
    """Detection of collectives that cannot end.

    nbdist asks the ranks after one of them has ended the cell. A collective cannot end if all other
    ranks wait in a collective and all processes are idle. A rank that computes, sleeps or saves
    may still join: nbdist waits for it.

    Args:
        sender: sends to the ranks of the cell.
        ranks: the ranks of the cell.
    """

    def __init__(self, sender: CellSender, ranks: Iterable[int]) -> None:
        self._sender = sender
        self._ranks = sorted(ranks)
        self._idle: dict[int, _Idle] = {}
        self._asked_at = 0.0
        self._since: float | None = None

    def receive(self, where: RankPosition) -> None:
        """Store a rank's answer."""
        if not where.clock_s:
            return  # the answer to another request
        idle = self._idle.get(where.rank)
        if idle is None or not _stays_idle(idle.first, where):
            idle = self._idle[where.rank] = _Idle(where, where, 0.0)
        idle.last, idle.received_at = where, time.monotonic()

    def deadlocked(self, ended: Mapping[int, CellEnded]) -> dict[int, RankPosition]:
        """Return the ranks whose collective cannot end, each with its position.

        Args:
            ended: the ends of the cell, by rank.

        Returns:
            Empty if the ranks may wait for another reason.
        """
        running = sorted(self._sender.running)
        if not running or not any(end.status == "ok" for end in ended.values()):
            return {}
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since >= _FIRST_S and now - self._asked_at >= _EVERY_S:
            self._asked_at = now
            self._sender.send_command(Diagnose(number=self._sender.number, waits=True), self._ranks)
        idle = self._idle
        if not all(
            rank in idle
            and idle[rank].seconds >= _WAIT_S
            and now - idle[rank].received_at < _STALE_S
            for rank in self._ranks
        ):
            return {}
        where = {rank: idle[rank].last for rank in running}
        busy = any(idle[rank].last.under_way for rank in self._ranks)
        return {} if busy or not all(one.collective for one in where.values()) else where


def _stays_idle(first: RankPosition, where: RankPosition) -> bool:
    """Return True if the rank has been idle since its first answer."""
    used_s = where.process_s - first.process_s
    main_s = where.cpu_s - first.cpu_s
    return (
        (first.collective, first.under_way, first.step, first.place, first.stack)
        == (where.collective, where.under_way, where.step, where.place, where.stack)
        and used_s <= _NOISE_S + _MOST_BUSY * (where.clock_s - first.clock_s)
        and main_s <= _MAIN_NOISE_S
    )


class RankHealth:
    """Monitor of the ranks' health. It ends a cell that cannot continue.

    Args:
        context: the cell.
        outcome: the ends of the ranks so far.
        sender: sends to the ranks of the cell.
        cancellation: cancels the cell.
        engines: return the state of a rank's process.
        settings: the time limits.
        show: processes the records of the ranks for a number of seconds.

    Attributes:
        heartbeats: the signs of life of the ranks.
        has_steps: True if the cell runs steps.
    """

    def __init__(
        self,
        context: RunContext,
        outcome: CellOutcome,
        sender: CellSender,
        cancellation: Cancellation,
        engines: Engines,
        settings: Settings,
        show: Callable[[float], None],
    ) -> None:
        self.heartbeats = Heartbeats(context.host_of, context.cell.options.hang_after_s)
        self.has_steps = False
        self._context = context
        self._outcome = outcome
        self._sender = sender
        self._cancellation = cancellation
        self._deadlocks = CollectiveDeadlocks(sender, context.host_of)
        self._engines = engines
        self._settings = settings
        self._show = show

    def receive(self, record: Event) -> None:
        """Store a sign of life."""
        self.heartbeats.receive(record)
        if isinstance(record, RankPosition):
            self._deadlocks.receive(record)
            self._cancellation.positions.receive(record)

    def begin_steps(self) -> None:
        """Measure the time between steps from now on."""
        self.has_steps = True
        self.heartbeats.begin_steps()

    def check_alive(self) -> None:
        """End the cell if a rank has died, because it cannot report its end.

        Raises:
            RanksLostError: nbdist has ended the cell.
        """
        dead = self._dead()
        if self._outcome.preempted.intersection(dead):  # its last records may arrive later
            deadline = time.monotonic() + _ARRIVAL_S
            while (dead := self._dead()) and time.monotonic() < deadline:
                self._show(POLL_S)
        if dead:
            self._context.live.lost(dead)
            self._cancellation.end(self._settings.interrupt_grace_s, at_once=True)
            words = self._engines.describe_end(dead[0], lines=5)
            step, end_verb = self.heartbeats.step(dead[0]), self._engines.describe_loss(dead[0])
            raise lost_error(
                dead, self._context.host_of, self._sender.running, step, words, end_verb
            )

    def _dead(self) -> list[int]:
        """Return the ranks of the cell that died before they reported its end."""
        unfinished = self._context.host_of.keys() - self._outcome.ended.keys()
        return [rank for rank in self._engines.dead() if rank in unfinished]

    def check_progress(self) -> None:
        """End the cell if a rank is frozen or no rank makes a step.

        A silent rank that is not frozen may hold the interpreter's lock: nbdist waits for it.

        Raises:
            RanksLostError: nbdist has ended the cell.
        """
        running, show_message = self._sender.running, self._context.view.show_message
        silent = self.heartbeats.silent(running)
        for rank in filter(self._engines.is_frozen, silent):
            self._give_up(f"{self._outcome.name(rank)} was stopped by a signal {self.after(rank)}")
        for rank in self.heartbeats.newly_silent(silent):
            why = self._engines.describe_silence(rank)
            show_message(f"{self._outcome.name(rank)} does not respond {self.after(rank)}; {why}")
            if not self._engines.is_unreachable(rank):  # the cell may not have reached it
                self._sender.request_status([rank])
        if self.heartbeats.stalled_s():
            self._check_stall()

    def _check_stall(self) -> None:
        """End the cell if no rank computes and none makes a step while nbdist looks."""
        positions = self._cancellation.positions
        for _ in range(QUIET_LOOKS):
            computes = bool(positions.computing(on_any_thread=True))
            stalled_s, running = self.heartbeats.stalled_s(), self._sender.running
            if not stalled_s or not running:
                return
            if computes:
                break
        host_of = {rank: self._context.host_of[rank] for rank in running}
        where = hang(positions.where, host_of)
        if not computes:
            self._give_up(f"no step for {stalled_s:.0f} s: {where}\n{_LONGER_WAITS}")
        message = f"no step for {stalled_s:.0f} s: {where.splitlines()[0]}, computing"
        self._context.view.show_message(message)
        self.heartbeats.restart_wait()

    def _give_up(self, reason: str) -> NoReturn:
        self._cancellation.end(self._settings.cell_grace_s)
        raise stuck_error(self._sender.running, reason)

    def check_collectives(self) -> None:
        """End the cell if a collective waits for a rank that has ended it.

        Raises:
            CellError: nbdist has ended the cell.
        """
        where = self._deadlocks.deadlocked(self._outcome.ended)
        if not where:
            return
        waiting: dict[StrategyName, list[int]] = {}
        for rank, one in where.items():
            if one.collective is not None:
                waiting.setdefault(one.collective, []).append(rank)
        for strategy, ranks in waiting.items():
            self._cancellation.abort_collectives(strategy, ranks)
        self._cancellation.end(self._settings.interrupt_grace_s, at_once=True)
        broken = self._cancellation.broken
        raise lone_collective_error(where, self._outcome.ended, self._context.host_of, broken)

    def after(self, rank: int) -> str:
        """Return the last step that the rank began in words, such as "after step 3"."""
        step = self.heartbeats.step(rank)
        none = "before its first step" if self.has_steps else "in the cell"
        return f"after step {step}" if step else none
