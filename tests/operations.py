"""Random operations on a cluster, each with conditions that must hold afterwards.

The same seed gives the same operations. The arrival times of signals depend on the machine.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import nbdist
from nbdist.records import StepOptions
from nbdist.telemetry.run_reader import stored_runs
from nbdist.utils.polling import repeat_until
from nbdist.utils.signals import interrupt_held

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from nbdist.records import StrategyName

BOUND_S = 90.0
"""Time limit of a cell in seconds. It is long because test machines are busy."""

PREPARE = """
import asyncio, time
import numpy as np
from functools import partial
kept = "kept"
def numbers(bad=(), at=5, kind=TypeError, pause_s=0.0):
    for i in range(100_000):
        if pause_s: time.sleep(pause_s)
        if i == at and rank in bad: raise kind(f"a bug of rank {rank}")
        yield np.float32(i)
endless = numbers
slow = partial(numbers, pause_s=0.05)
"""
SETUP: dict[StrategyName, str] = {
    "mirrored": """
import tensorflow as tf, keras
with strategy.scope():
    variable = tf.Variable(0.0)
""",
    "pjrt": "import jax, jax.numpy as jnp, keras\nvariable = jnp.zeros(())",
}
STEP: dict[StrategyName, str] = {
    "mirrored": """
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(batch) * variable
gradient = tape.gradient(loss, variable)
variable.assign_sub(0.01 * gradient)
loss
""",
    "pjrt": "variable = variable + 0.001 * batch.mean()\nloss = variable",
}
UNTRACEABLE: dict[StrategyName, str] = {
    "mirrored": "loss = tf.reduce_mean(batch) * variable\nlen(3)\nloss",
    "pjrt": "variable = variable + len(3)\nloss = variable",
}
TOTAL: dict[StrategyName, str] = {
    "mirrored": "float(strategy.reduce('SUM', strategy.run(lambda: tf.ones(())), axis=None))",
    "pjrt": "rows = jax.NamedSharding(mesh, jax.P('data'))\n"
    "ones = jax.make_array_from_process_local_data(rows, np.ones(1, np.float32))\n"
    "float(jax.jit(jnp.sum, out_shardings=jax.P())(ones))",
}
RAISE = "if rank in {bad}: raise TypeError(f'a bug of rank {{rank}}')"
FIT = """
class Bug(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and rank in {bad}: raise TypeError(f"a bug of rank {{rank}}")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x, y = np.ones((960, 4)), np.ones(960)
model.fit(x, y, batch_size=12, epochs={epochs}, callbacks=[Bug()], verbose=0)
"""


@dataclass(frozen=True)
class Operation:
    """A cell and its outcome without an interrupt.

    Attributes:
        name: name in the log.
        cell: code of the cell.
        step: options if the cell is a step.
        error: name of the error that it ends with. Empty for none.
        bad: ranks that raise the error.
        endless: True if the cell must be cancelled.
    """

    name: str
    cell: str
    step: StepOptions | None = None
    error: str = ""
    bad: tuple[int, ...] = ()
    endless: bool = False


@dataclass(frozen=True)
class Signals:
    """Requests to end a cell.

    Attributes:
        kind: `interrupt` of the kernel, `stop` of a page, or `none`.
        at_s: time of each request in seconds since the start of the cell.
    """

    kind: str
    at_s: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.at_s)


class Asking:
    """Request the end of the cell that runs within this context."""

    def __init__(self, cluster: nbdist.Cluster, signals: Signals) -> None:
        self._cluster = cluster
        self._signals = signals
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._before = {run.id for run in stored_runs(self._cluster.settings.runs_path)}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread. Call again if an interrupt arrived before the first call began."""
        with interrupt_held():
            self._over.set()
            self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        for at_s in (*self._signals.at_s, *self._until_it_ends()):
            if self._over.wait(max(0.0, began + at_s - time.monotonic())):
                return
            if self._signals.kind == "stop" and at_s < BOUND_S:
                self._stop()
            else:
                os.kill(os.getpid(), signal.SIGINT)

    def _until_it_ends(self) -> tuple[float, ...]:
        """Return times beyond the limit, so that a test fails instead of a hang."""
        return tuple(BOUND_S + 5.0 * i for i in range(100))

    def _stop(self) -> None:
        for run in stored_runs(self._cluster.settings.runs_path):
            if run.id not in self._before:
                run.ask_to_stop()


class Operator:
    """Run random operations and check the cluster after each.

    Args:
        cluster: cluster of the workers.
        strategy: strategy of the cells.
        seed: seed of all random choices.
        log: receives a line of the log.
    """

    def __init__(
        self,
        cluster: nbdist.Cluster,
        strategy: StrategyName,
        seed: int,
        log: Callable[[str], None] = print,
    ) -> None:
        self._cluster = cluster
        self._strategy: StrategyName = strategy
        self._random = random.Random(seed)
        self._log = log
        self._ranks = tuple(range(cluster.world_size))
        self._must_set_up = True

    def operate(self, count: int) -> None:
        """Run `count` operations.

        Raises:
            AssertionError: a condition does not hold. The log contains the operations before it.
        """
        for number in range(count):
            if self._must_set_up:
                self._set_up()
            operation, signals = self._drawn()
            began = time.monotonic()
            outcome = self._make(operation, signals)
            took_s = time.monotonic() - began
            asked = f"{signals.kind} {', '.join(f'{s:.3f}' for s in signals.at_s)}"
            self._log(f"{number}: {operation.name} [{asked}] -> {outcome} in {took_s:.1f} s")
            assert took_s < BOUND_S, "it did not end"
            self._check_outcome(operation, signals, outcome)
            if operation.step and sum(at_s < took_s for at_s in signals.at_s) <= 1:
                self._check_steps(outcome)
            if self._random.random() < 0.3:  # before or during the restart of collectives
                self._interrupt_trivial(number)
            self._check_cluster()

    def _run(self, cell: str) -> dict[int, str]:
        """Return each rank's result. A cell that does not end fails."""
        asking = Asking(self._cluster, Signals("none"))
        try:
            with asking:
                return self._cluster.run(cell, strategy=self._strategy).results
        except KeyboardInterrupt:
            raise AssertionError(f"it did not end: {cell}") from None
        finally:
            with contextlib.suppress(KeyboardInterrupt):
                asking.__exit__()

    def _interrupt_trivial(self, number: int) -> None:
        operation = Operation("trivial", "rank")
        signals = Signals("interrupt", (self._random.choice((0.002, 0.02, 0.2, 0.6)),))
        outcome = self._make(operation, signals)
        self._log(f"{number}: then trivial {signals.at_s[0]} -> {outcome}")
        self._check_outcome(operation, signals, outcome)

    def _set_up(self) -> None:
        self._run(PREPARE)
        self._run(SETUP[self._strategy])
        self._must_set_up = False

    # Random choices.

    def _drawn(self) -> tuple[Operation, Signals]:
        draw = self._random
        makers = [
            self._trivial,
            self._prints,
            self._computes,
            self._awaits,
            self._raises,
            self._raises_late,
            self._collective,
            self._raises_amid_collectives,
            self._steps,
            self._step_raises,
            self._step_raises,
            self._untraceable,
            self._exits,
            self._fits,
        ]
        operation = draw.choice(makers)()
        return operation, self._signals(operation)

    def _signals(self, operation: Operation) -> Signals:
        draw = self._random
        kind = draw.choice(("interrupt", "stop", "none"))
        first = draw.choice((draw.uniform(0, 0.02), draw.uniform(0, 0.4), draw.uniform(0, 1.5)))
        gaps = draw.choice(((), (), (draw.uniform(0, 0.01),), (draw.uniform(0.1, 2.5),)))
        if operation.endless and kind == "none":
            kind = "interrupt"
        if kind == "none" or (kind == "stop" and not operation.endless and draw.random() < 0.5):
            return Signals("none")
        at_s = [first]
        for gap in gaps:
            at_s.append(at_s[-1] + gap)
        if operation.endless:  # a Stop may arrive before the run exists
            at_s.extend(at_s[-1] + 3.0 * i for i in range(1, 8))
        return Signals(kind, tuple(at_s))

    def _some(self) -> tuple[int, ...]:
        """Return all ranks or one."""
        return self._random.choice((self._ranks, (self._random.choice(self._ranks),)))

    def _trivial(self) -> Operation:
        return Operation("trivial", "rank")

    def _prints(self) -> Operation:
        lines = self._random.choice((3, 300, 20_000))
        return Operation(f"prints {lines}", f"for i in range({lines}):\n    print('line', i, rank)")

    def _computes(self) -> Operation:
        if self._random.random() < 0.5:
            return Operation("computes", "while True:\n    sum(range(1000))", endless=True)
        return Operation("sleeps", "time.sleep(0.3)")

    def _awaits(self) -> Operation:
        if self._random.random() < 0.5:
            return Operation("awaits", "while True:\n    await asyncio.sleep(0.01)", endless=True)
        bad = self._some()
        cell = f"await asyncio.sleep(0.1)\n{RAISE.format(bad=bad)}"
        return Operation(f"awaits and raises on {bad}", cell, error="TypeError", bad=bad)

    def _raises(self) -> Operation:
        bad = self._some()
        cell = RAISE.format(bad=bad)
        return Operation(f"raises on {bad}", cell, error="TypeError", bad=bad)

    def _raises_late(self) -> Operation:
        bad = (self._random.choice(self._ranks),)
        cell = f"{RAISE.format(bad=bad)}\ntime.sleep(600)"
        return Operation(f"raises on {bad}, others sleep", cell, error="TypeError", bad=bad)

    def _collective(self) -> Operation:
        return Operation("collective", TOTAL[self._strategy])

    def _raises_amid_collectives(self) -> Operation:
        bad = self._some()
        cell = f"{RAISE.format(bad=bad)}\n{TOTAL[self._strategy]}"
        name = f"raises on {bad} before a collective"
        return Operation(name, cell, error="TypeError", bad=bad)

    def _exits(self) -> Operation:
        return Operation("exit()", "exit()", error="SystemExit", bad=self._ranks)

    def _steps(self) -> Operation:
        data = self._random.choice(("endless", "slow"))
        count = self._random.choice((0, 1, 20))
        options = StepOptions(data=data, batch=2 * len(self._ranks), steps=count)
        return Operation(
            f"steps {count} of {data}", STEP[self._strategy], options, endless=not count
        )

    def _step_raises(self) -> Operation:
        bad, at = self._some(), self._random.choice((0, 5, 60))
        options = StepOptions(data="broken", batch=2 * len(self._ranks))
        self._run(f"broken = partial(numbers, {bad}, {at})")
        name = f"data raise on {bad} at {at}"
        return Operation(name, STEP[self._strategy], options, error="TypeError", bad=bad)

    def _untraceable(self) -> Operation:
        options = StepOptions(data="endless", batch=2 * len(self._ranks))
        cell = UNTRACEABLE[self._strategy]
        return Operation("untraceable step", cell, options, error="TypeError", bad=self._ranks)

    def _fits(self) -> Operation:
        bad: tuple[int, ...] = self._random.choice(((), (), self._some()))
        epochs = self._random.choice((1, 1000)) if not bad else 1
        error = "TypeError" if bad else ""
        cell = FIT.format(bad=bad, epochs=epochs)
        return Operation(f"fit {epochs} {bad}", cell, error=error, bad=bad, endless=epochs > 1)

    # Checks.

    def _make(self, operation: Operation, signals: Signals) -> str:
        asking = Asking(self._cluster, signals)
        try:
            with asking:
                self._cluster.run(operation.cell, strategy=self._strategy, step=operation.step)
        except KeyboardInterrupt:
            return "interrupted"
        except nbdist.CellError as error:
            notes = "; ".join(getattr(error, "__notes__", ()) or error.notes)
            return f"{error.ename} on rank {error.rank}: {error.evalue} ({notes})"
        except nbdist.NbdistError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            with contextlib.suppress(KeyboardInterrupt):
                asking.__exit__()
        return "ok"

    def _check_outcome(self, operation: Operation, signals: Signals, outcome: str) -> None:
        assert "still running" not in outcome, "ranks did not end"
        assert not outcome.startswith(("WorkerError", "RanksLostError", "UsageError")), outcome
        if not signals:
            if operation.error:
                assert outcome.startswith(f"{operation.error} on rank "), outcome
                named = int(outcome.partition(" on rank ")[2].partition(":")[0])
                assert named in operation.bad, outcome
                self._check_counted(operation, outcome)
            else:
                assert outcome == "ok", outcome
        elif not operation.error:
            assert outcome in {"ok", "interrupted"}, outcome

    def _check_counted(self, operation: Operation, outcome: str) -> None:
        """Check that an error of all ranks counts on each rank, without a stop by request."""
        if operation.bad == self._ranks:
            words = ("the same error", "stopped because of it", "waited for it in a collective")
            assert any(word in outcome for word in words), outcome
            assert not re.search(r": stopped(?! with it)", outcome), outcome

    def _check_steps(self, outcome: str) -> None:
        """Check that all ranks completed the same steps, if they ended or were stopped once."""
        if outcome in {"ok", "interrupted"}:
            last = {m.rank: m.step for m in self._cluster.last_run.metrics if m.step > 0}
            assert len({*last.values()}) <= 1, f"ranks ended after other steps: {last}"

    def _check_cluster(self) -> None:
        is_free = repeat_until(lambda: not self._cluster._runner.busy(), BOUND_S)
        assert is_free, f"in a cell: {self._cluster._runner.busy()}"
        assert self._run("rank") == {rank: str(rank) for rank in self._ranks}
        whole = self._run("{'kept', 'numbers', 'variable'} <= globals().keys()")
        is_whole = {*whole.values()} == {"True"}  # an aborted step may have lost its arrays
        self._must_set_up = not is_whole
        if self._random.random() < 0.3:
            if self._must_set_up:
                self._set_up()
            assert {*self._run(TOTAL[self._strategy]).values()} == {f"{len(self._ranks):.1f}"}
