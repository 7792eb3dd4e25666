"""Agreement of ranks on their last step, with a recorder of the commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist.records import SOON, Command, StopAfter, Stopping
from nbdist.utils import stop_agreement as module
from nbdist.utils.stop_agreement import StopAgreement
from tests.clock import Clock, replace_time

if TYPE_CHECKING:
    from collections.abc import Sequence

CELL = 3


class Commands:
    """Recorder of commands.

    Attributes:
        sent: rank, step and limit of each command to stop.
    """

    number = CELL

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, int]] = []

    def send_command(self, command: Command, ranks: Sequence[int]) -> None:
        assert isinstance(command, StopAfter)
        self.sent += [(rank, command.step, command.limit) for rank in ranks]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return replace_time(monkeypatch, module)


def stopping(rank: int, limit: int) -> Stopping:
    return Stopping(rank=rank, cell=CELL, limit=limit)


def test_all_ranks_stop_after_the_last_reached_step(clock: Clock) -> None:
    commands = Commands()
    agreement = StopAgreement(commands, lambda _: 0)
    agreement.send_agreed_step({0, 1})
    agreement.receive(stopping(0, 5))
    agreement.send_agreed_step({0, 1})
    assert commands.sent == []
    agreement.receive(stopping(1, 7))
    agreement.send_agreed_step({0, 1})
    agreement.send_agreed_step({0, 1})
    assert commands.sent == [(0, 7, 0), (1, 7, 0)]


def test_a_rank_that_ended_need_not_agree(clock: Clock) -> None:
    commands = Commands()
    agreement = StopAgreement(commands, lambda _: 0)
    agreement.receive(stopping(2, 3))
    agreement.send_agreed_step({2})
    assert commands.sent == [(2, 3, 0)]


def test_a_rank_that_waits_too_long_continues_to_the_step_of_the_others(clock: Clock) -> None:
    commands = Commands()
    steps = {0: 5, 1: 8}
    agreement = StopAgreement(commands, steps.__getitem__)
    agreement.receive(stopping(0, 5))
    clock.now += 0.5
    agreement.send_agreed_step({0, 1})
    assert commands.sent == []
    clock.now += 0.1
    agreement.send_agreed_step({0, 1})
    agreement.send_agreed_step({0, 1})
    assert commands.sent == [(0, SOON, 9)]
    clock.now += 0.6  # rank 0 has already been sent so far
    agreement.send_agreed_step({0, 1})
    assert commands.sent == [(0, SOON, 9)]
    steps[1] = 9
    clock.now += 0.4
    agreement.send_agreed_step({0, 1})
    assert commands.sent == [(0, SOON, 9)]
    clock.now += 0.2
    agreement.send_agreed_step({0, 1})
    assert commands.sent[1:] == [(0, SOON, 10)]
    agreement.receive(stopping(1, 9))
    agreement.send_agreed_step({0, 1})
    assert commands.sent[2:] == [(0, 10, 0), (1, 10, 0)]
