from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from nbdist.records import AnyServerMessage, StateMessage
from nbdist.telemetry.tail import Tail
from tests.runs import losses, new_run, read, recover

if TYPE_CHECKING:
    from pathlib import Path


def test_a_recovery_is_sent_before_the_rows_that_replace_others(tmp_path: Path) -> None:
    """Also if the recovery happens while the earlier state is being sent."""
    run = new_run(tmp_path)
    run.take(losses(1, 7))
    run.flush()
    news = Tail(read(run)).news()
    recoveries = list[int]()

    def look(message: str | bytes) -> None:
        update = (
            msgspec.json.decode(message, type=AnyServerMessage) if isinstance(message, str) else 0
        )
        if isinstance(update, StateMessage):
            recoveries.append(len(update.state.recoveries))

    look(next(news))
    run.update(recoveries=(recover(7, 4, time_s=2.0),))
    run.take(losses(5, 9, lost_s=1.6))
    run.flush()
    recoveries_before: list[list[int]] = []
    for message in news:
        look(message)
        if isinstance(message, bytes):
            steps = np.frombuffer(message[8:], "<f8").reshape(-1, 5)[:, 2]
            assert list(steps) == [*range(1, 8), *range(5, 10)]
            recoveries_before.append(list(recoveries))
    assert recoveries_before == [[0, 1]]
    run.close()
