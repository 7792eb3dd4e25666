"""Rewritten cells compute what the cells compute as written.

A double of the tape counts gradients in plain Python, and a double of the loop calls the step
function on this process. `tests/end_to_end/test_lifted_loops.py` runs real loops on workers.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
import traceback
from textwrap import dedent
from typing import Any

import pytest

from nbdist.cells.loops import LoopError
from nbdist.worker.lifting.callees import Callees
from nbdist.worker.lifting.lifted_loop import LiftedLoop, without_unassigned
from nbdist.worker.lifting.passes import OuterLoop
from nbdist.worker.lifting.rewrite import LIFTED, LIFTS, OUTER, REFUSE, SKIPPED, LoopProgram, lift


class GradientTape:
    """Double of TensorFlow's tape."""

    __module__ = "tensorflow"

    def __enter__(self) -> GradientTape:
        return self

    def __exit__(self, *_: object) -> None: ...

    def gradient(self, loss: float, variables: list[float]) -> list[float]:
        return [loss * v for v in variables]


class Optimizer:
    """Double of an optimizer that records its updates."""

    __module__ = "keras"

    def __init__(self) -> None:
        self.updates: list[list[float]] = []

    def apply_gradients(self, gradients: list[float]) -> None:
        self.updates.append(list(gradients))


class Unread:
    """Value in a batch that only the step may read."""

    def __init__(self, value: Any) -> None:
        self.value = value


def unread(element: Any) -> Any:
    return tuple(map(unread, element)) if isinstance(element, tuple) else Unread(element)


def read(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(read, value))
    return value.value if isinstance(value, Unread) else value


class LocalLoop:
    """Double of a lifted loop that calls the step function in this process."""

    whole = staticmethod(read)
    if_bound = staticmethod(LiftedLoop.if_bound)

    def __init__(self, program: LoopProgram, namespace: dict[str, Any]) -> None:
        self.ran = False
        self.restored: dict[str, Any] = {}
        self.steps = 0
        self._program = program
        self._namespace = namespace
        self._outputs: dict[str, Any] = {}

    def __enter__(self) -> LocalLoop:
        return self

    def __exit__(self, *_: object) -> None: ...

    def batches(self, data: Any) -> Any:
        return map(unread, data)

    def skips(self) -> bool:
        return False

    def exhausted(self) -> bool:
        return False

    def leave(self) -> None: ...

    def step(self, given: tuple[Any, ...], carried: tuple[Any, ...], reads: Any) -> tuple[Any, ...]:
        assert len(given) == len(self._program.loop.given)
        scope = {**self._namespace, **{name: read() for name, read in reads.items()}}
        own: dict[str, Any] = {}
        exec(compile(self._program.source, "cell", "exec"), scope, own)
        _, outputs = own["step"](*map(read, given), *carried)
        self._outputs = without_unassigned(outputs)
        self.ran, self.steps = True, self.steps + 1
        return tuple(self._outputs[name] for name in self._program.returned)

    def assigned(self) -> dict[str, Any]:
        names = self._outputs.keys() & {*self._program.loop.conditional}
        return {name: self._outputs[name] for name in names}

    def last(self) -> tuple[Any, ...]:
        loop = self._program.loop
        return tuple(self._outputs[n] for n in loop.outputs if n not in self._program.returned)


def outer_loop() -> OuterLoop:
    """Return a loop around training loops in a cell without checkpoints."""
    return OuterLoop(None, sys._getframe(1))


SETUP = """
optimizer, other = Optimizer(), Optimizer()
variables, seen, losses = [1.0, 2.0], [], []
data = [(float(i), 2.0 * i) for i in range(1, 9)]
"""

CELLS = {
    "top level": """
        for epoch in range(2):
            for x, y in data:
                with GradientTape() as tape:
                    loss = x + y
                grads = tape.gradient(loss, variables)
                optimizer.apply_gradients(grads)
                losses.append(loss)
            print(epoch, loss, grads)
        """,
    "enumerate, print and break": """
        for step, (x, y) in enumerate(data):
            with GradientTape() as tape:
                loss = x * y
            optimizer.apply_gradients(tape.gradient(loss, variables))
            if step % 2 == 0:
                seen.append((step, loss))
            if step == 5:
                break
        else:
            seen.append("else")
        """,
    "statement of the host before the step on one line": """
        def slope(x):
            with GradientTape() as tape:
                loss = x
            return tape.gradient(loss, variables)
        for x, y in data:
            z = x; slopes = slope(y)
            with GradientTape() as tape: loss = z + len(slopes)
            optimizer.apply_gradients(tape.gradient(loss, variables)); losses.append(loss)
            seen.append(z)
        """,
    "conditional update and host statement on one line": """
        for epoch in range(2):
            for n, (x, y) in enumerate(data):
                with GradientTape() as tape:
                    loss = x + y
                grads = tape.gradient(loss, variables)
                if n % 2 == 0: seen.append("é"); optimizer.apply_gradients(grads); losses.append(n)
                if n % 3 == 0: other.apply_gradients(grads);
                else: seen.append(n)
        """,
    "conditional host statement on one line before an update": """
        for n, (x, y) in enumerate(data):
            with GradientTape() as tape:
                loss = x + y
            grads = tape.gradient(loss, variables)
            if n % 3 == 0: seen.append(n)
            else: optimizer.apply_gradients(grads); seen.append("other")
            if n % 2 == 0:
                other.apply_gradients(grads); losses.append(loss)
        """,
    "results of the step for the host": """
        def train_step(x, y):
            with GradientTape() as tape:
                loss = x + y
            optimizer.apply_gradients(tape.gradient(loss, variables))
            return loss
        class Trainer:
            def update(self, x):
                with GradientTape() as tape:
                    loss = 2 * x
                other.apply_gradients(tape.gradient(loss, variables))
                return loss, x
        trainer, total, log = Trainer(), 0.0, {"loss": []}
        for i in range(4):
            x, y = data[i]
            losses.append(float(train_step(x, y)))
            total += float(
                trainer.update(
                    data[i + 1][0],
                )[0]
            )
            print("loss", train_step(data[i][1], y + 1))
            log["loss"].append(trainer.update(x)[1].conjugate())
            seen.append(i), losses.append(train_step(x, x))
            print(total)
        seen.append(total)
        """,
    "draws of a branch for the update in it": """
        draws = iter(range(100))
        for n, (x, y) in enumerate(data):
            with GradientTape() as tape:
                loss = x + y
            optimizer.apply_gradients(tape.gradient(loss, variables))
            losses.append(loss)
            if n % 3 == 1:
                noise = next(draws)
                scale = noise + 1
                seen.append(noise)
                with GradientTape() as tape:
                    other_loss = scale * noise
                other.apply_gradients(tape.gradient(other_loss, variables))
            else:
                rate = 0.5 * n
                other.apply_gradients([rate])
                losses.append(rate)
        """,
    "values of a branch that a later step needs": """
        for n, (x, y) in enumerate(data):
            with GradientTape() as tape:
                loss = x + y
            optimizer.apply_gradients(tape.gradient(loss, variables))
            if n % 2 == 0:
                with GradientTape() as tape:
                    second = x
                other.apply_gradients(tape.gradient(second, variables))
                seen.append(n)
                rate = float(n)
            with GradientTape() as tape:
                third = x * rate
            optimizer.apply_gradients(tape.gradient(third, variables))
        """,
    "items of one iterator in the step and on the host": """
        draws = iter(range(100))
        for x, y in data:
            other.apply_gradients([y])
            seen.append(next(draws))
            rate = next(draws)
            with GradientTape() as tape:
                loss = x * rate
            optimizer.apply_gradients(tape.gradient(loss, variables))
        """,
    "names of an if between two updates": """
        uses_best = True
        for n, (x, y) in enumerate(data):
            with GradientTape() as tape:
                loss = x + y
            optimizer.apply_gradients(tape.gradient(loss, variables))
            if uses_best:
                best = loss * 2
            if n % 2 == 1:
                last = n
            with GradientTape() as tape:
                loss = y
            other.apply_gradients(tape.gradient(loss, variables))
        """,
    "losses of a loop over optimizers": """
        loss, rules = 0, [optimizer, other]
        for x, y in data:
            for rule in rules:
                with GradientTape() as tape:
                    loss = x + y
                rule.apply_gradients(tape.gradient(loss, variables))
            losses.append(loss)
        for x, y in data:
            for name, rule in {"a": optimizer, "b": other}.items():
                with GradientTape() as tape:
                    newest = x * y
                rule.apply_gradients(tape.gradient(newest, variables))
        losses.append(newest)
        del rule, rules
        """,
    "name of the step that the host assigns again": """
        count = 0
        for x, y in data:
            with GradientTape() as tape:
                loss = x + y
            optimizer.apply_gradients(tape.gradient(loss, variables))
            with GradientTape() as tape:
                loss = x * y
            other.apply_gradients(tape.gradient(loss, variables))
            loss = count
            count += 1
        """,
    "accumulation with a counter": """
        n, total = 0, 0.0
        for x, y in data:
            with GradientTape() as tape:
                loss = x + y
            grads = tape.gradient(loss, variables)
            total = total + grads[0]
            n += 1
            if n == 3:
                optimizer.apply_gradients([total, loss])
                total = 0.0
                n = 0
            losses.append(loss)
        if n:
            optimizer.apply_gradients([total, loss])
        """,
    "condition on what the host counts": """
        for x, y in data:
            with GradientTape() as tape:
                loss = x * y
            grads = tape.gradient(loss, variables)
            seen.append(x)
            count = len(seen)
            if count % 3 == 0:
                optimizer.apply_gradients(grads)
            losses.append(loss)
        """,
    "condition on attributes and items that the host changes": """
        class Trainer:
            def __init__(self):
                self.n, self.log = 0, {"steps": 0}
            def fit(self):
                for x, y in data:
                    with GradientTape() as tape:
                        loss = x * y
                    grads = tape.gradient(loss, variables)
                    self.n += 1
                    if self.n % 3 == 0:
                        optimizer.apply_gradients(grads)
                    self.log["steps"] = self.n
                    if self.log["steps"] % 2 == 0:
                        other.apply_gradients(grads)
                    losses.append(loss)
        trainer = Trainer()
        trainer.fit()
        seen.append((trainer.n, trainer.log))
        """,
    "condition on a list that the step extends later": """
        for x, y in data:
            with GradientTape() as tape:
                loss = x * y
            grads = tape.gradient(loss, variables)
            if len(losses) % 2 == 0:
                optimizer.apply_gradients(grads)
            losses.append(loss)
        """,
    "function with arguments and a local loss": """
        def train(data, rate):
            total = 0.0
            for x, y in data:
                with GradientTape() as tape:
                    loss = rate * (x - y)
                optimizer.apply_gradients(tape.gradient(loss, variables))
                total += loss
            return total / len(data)
        result = [train(data, 0.5), train(data[:3], 2.0)]
        """,
    "step function that returns nothing": """
        def train_step(x, y):
            with GradientTape() as tape:
                loss = x + y
            optimizer.apply_gradients(tape.gradient(loss, variables))
        for batch in data:
            train_step(*batch)
        """,
    "class with methods": """
        class Trainer:
            def __init__(self):
                self.losses = []
            def train_step(self, x, y):
                with GradientTape() as tape:
                    loss = x - y
                optimizer.apply_gradients(tape.gradient(loss, variables))
                return loss
            def fit(self, data, epochs):
                for epoch in range(epochs):
                    for x, y in data:
                        loss = self.train_step(x, y)
                        self.losses.append(loss)
                return self.losses
        result = Trainer().fit(data, 2)
        """,
    "accumulation by hand": """
        accumulated, running = [0.0, 0.0], 0.0
        for step, (x, y) in enumerate(data):
            with GradientTape() as tape:
                loss = x + y
            grads = tape.gradient(loss, variables)
            accumulated = [a + g for a, g in zip(accumulated, grads)]
            running += loss
            if (step + 1) % 4 == 0:
                optimizer.apply_gradients(accumulated)
                accumulated = [0.0, 0.0]
                losses.append(running)
                running = 0.0
                print("update", step)
        """,
    "counter between the parts of a step": """
        count = 0
        for x, y in data:
            with GradientTape() as tape:
                loss = x + y
            grads = tape.gradient(loss, variables)
            count += 1
            if count % 3 == 0:
                optimizer.apply_gradients(grads)
        """,
    "attributes and items between the parts of a step": """
        class State:
            count = 0
        state, log = State(), {}
        for x, y in data:
            with GradientTape() as tape:
                loss = x + y
            state.count += 1
            log["loss"] = loss
            optimizer.apply_gradients(tape.gradient(loss, variables))
        result = [state.count, log]
        """,
    "slices of arrays": """
        xs, ys = list(range(8)), list(range(8, 16))
        def step(x, y):
            with GradientTape() as tape:
                loss = float(sum(x) + sum(y))
            optimizer.apply_gradients(tape.gradient(loss, variables))
            return loss
        for start in range(0, 8, 2):
            end = start + 2
            loss = step(xs[start:end], ys[start:
                end])
            losses.append(loss)
        """,
    "slices in slices, and in a comprehension": """
        xs, order = list(range(8)), list(range(7, -1, -1))
        def step(x, y, z):
            with GradientTape() as tape:
                loss = float(sum(x) + sum(y) + z)
            optimizer.apply_gradients(tape.gradient(loss, variables))
            return loss
        for i in range(6):
            loss = step(xs[order[i]:][i:], [xs[i + j] for j in range(2)], xs[order[i]])
            losses.append(loss)
        """,
    "two statements in one line": """
        def step(x):
            with GradientTape() as tape:
                loss = x
            optimizer.apply_gradients(tape.gradient(loss, variables))
            return loss
        for x, y in data:
            z = "é"; loss = step(x); losses.append(loss); seen.append(z)
        """,
    "step inside of an if": """
        replay = []
        for x, y in data:
            replay.append(x)
            if len(replay) >= 3 and len(replay) % 2:
                sample = replay[-2:]
                with GradientTape() as tape:
                    loss = sum(sample)
                optimizer.apply_gradients(tape.gradient(loss, variables))
                losses.append(loss)
            seen.append(y)
        """,
    "values of updates that only some steps make": """
        def update(one, x):
            with GradientTape() as tape:
                loss = x
            one.apply_gradients(tape.gradient(loss, variables))
            return loss, 2 * x
        def train(data, times):
            for i, (x, y) in enumerate(data):
                for _ in range(times):
                    critic, _ = update(other, x)
                if i % 3 == 0:
                    loss, generator = update(optimizer, y)
                    seen.append(generator)
                else:
                    loss, rest = update(optimizer, x)
                losses.append((critic, loss, generator))
            return critic, generator, rest
        result = train(data, 2)
        """,
    "two updates of one batch": """
        def update(one, x):
            with GradientTape() as tape:
                loss = x
            one.apply_gradients(tape.gradient(loss, variables))
            return loss
        for x, y in data:
            for _ in range(3):
                critic = update(optimizer, x)
            generator = update(other, y)
            losses.append(critic + generator)
        """,
    "next in a counted loop": """
        iterator = iter(data)
        for i in range(6):
            x, y = next(iterator)
            with GradientTape() as tape:
                loss = x * y
            optimizer.apply_gradients(tape.gradient(loss, variables))
            losses.append(loss)
        """,
    "while": """
        i = 0
        while i < len(data):
            x, y = data[i]
            with GradientTape() as tape:
                loss = x + y
            optimizer.apply_gradients(tape.gradient(loss, variables))
            i += 1
            losses.append(loss)
        """,
    "dict of losses, strings and comments": """
        for x, y in data:
            with GradientTape() as tape:
                text = '''a
        b'''
                # comment
                parts = {"a": x,
                         "b": y, "text": text}
                loss = parts["a"] + parts["b"]
            grads = tape.gradient(loss, variables)

            optimizer.apply_gradients(grads)
            seen.append(dict(parts))
        """,
}


def run(
    cell: str, *, lifted: bool, loop: type[LocalLoop] = LocalLoop
) -> tuple[dict[str, Any], list[Any]]:
    """Run a cell as written, or rewritten; return its namespace, and the loops that ran."""
    namespace: dict[str, Any] = {"GradientTape": GradientTape, "Optimizer": Optimizer}
    printed: list[Any] = []
    namespace["print"] = lambda *words: printed.append(words)
    namespace["print"].__module__ = "builtins"  # no function of the user
    exec(SETUP, namespace)
    tree, loops = ast.parse(cell), {}
    if lifted:
        tree, programs = lift(tree, cell, Callees(tree, namespace))
        loops = {
            number: loop(program, namespace)
            for number, program in programs.items()
            if isinstance(program, LoopProgram)
        }
        assert loops, "nothing is lifted"
        namespace |= {
            LIFTS: lambda _number, *_needed: True,
            LIFTED: loops.__getitem__,
            OUTER: outer_loop,
        }
    exec(compile(tree, "cell", "exec"), namespace)
    namespace |= {name: read(value) for name, value in namespace.items()}
    namespace["printed"] = printed
    namespace["optimizer"], namespace["other"] = (
        namespace["optimizer"].updates,
        namespace["other"].updates,
    )
    return namespace, list(loops.values())


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_rewritten_cell_computes_the_same(cell: str) -> None:
    cell = dedent(cell)
    expected, _ = run(cell, lifted=False)
    actual, loops = run(cell, lifted=True)
    assert all(loop.steps > 0 for loop in loops)
    names = {
        name
        for name, value in expected.items()
        if isinstance(value, (int, float, str, list, tuple, dict)) and name != "__builtins__"
    }
    assert {n: actual[n] for n in names} == {n: expected[n] for n in names}


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_loop_as_written_remains(cell: str) -> None:
    """A rank outside of the strategy runs it."""
    cell = dedent(cell)
    tree = ast.parse(cell)
    rewritten, _ = lift(tree, cell, Callees(tree, {}))
    namespace: dict[str, Any] = {"GradientTape": GradientTape, "Optimizer": Optimizer}
    exec(SETUP, namespace)
    namespace |= {LIFTS: lambda _number, *_needed: False, LIFTED: None, OUTER: outer_loop}
    namespace["print"] = lambda *_words: None
    exec(compile(rewritten, "cell", "exec"), namespace)
    expected, _ = run(cell, lifted=False)
    assert namespace["optimizer"].updates == expected["optimizer"]
    assert namespace["losses"] == expected["losses"]


def test_draws_of_a_lambda_of_an_earlier_cell_are_found() -> None:
    namespace: dict[str, Any] = {}
    earlier = "scale = 2.0; blur = dict(\n    noise=lambda x: x + np.random.normal())['noise']\n"
    linecache.cache["earlier"] = len(earlier), None, earlier.splitlines(keepends=True), "earlier"
    exec(compile(earlier, "earlier", "exec"), namespace)
    namespace["blur"].__module__ = "__main__"
    cell = dedent(
        """
        for x, y in data:
            with GradientTape() as tape:
                loss = blur(x)
            optimizer.apply_gradients(tape.gradient(loss, variables))
        """
    )
    tree = ast.parse(cell)
    _, programs = lift(tree, cell, Callees(tree, namespace))
    (error,) = programs.values()
    assert "`np.random.normal()` in `blur` would run only" in str(error)


DRAWS = """
def train_step(x):
    with GradientTape() as tape:
        loss = x
    optimizer.apply_gradients(tape.gradient(loss, variables))
it = iter(data)
for _ in range(4):
    train_step(next(it))
    z = np.random.rand()
    train_step(z)
"""


def test_draws_on_the_host_are_not_compiled() -> None:
    tree = ast.parse(DRAWS)
    _, programs = lift(tree, DRAWS, Callees(tree, {}))
    (program,) = programs.values()
    assert isinstance(program, LoopProgram)
    assert [ast.unparse(statement) for statement in program.loop.before] == ["z = np.random.rand()"]
    assert "next(it)" in [ast.unparse(value) for value in program.loop.given.values()]


CONVERTED = """
def train_step(x, scale=1.0):
    with GradientTape() as tape:
        loss = x * scale
    optimizer.apply_gradients(tape.gradient(loss, variables))
    return loss
for _ in range(4):
    losses.append(train_step({value}))
"""


@pytest.mark.parametrize(
    "value",
    [
        "rng.normal(size=8).astype('float32')",
        "tf.constant(np.random.beta(1.0, 1.0), tf.float32)",
        "tf.convert_to_tensor(rng.normal(size=8), tf.float32)",
        "np.float32(rng.normal(size=8))",
    ],
)
def test_converted_draws_are_values_of_the_loop(value: str) -> None:
    """A compiled step would receive the draw as a tensor, which these functions do not accept."""
    cell = CONVERTED.format(value=value)
    tree = ast.parse(cell)
    _, programs = lift(tree, cell, Callees(tree, {}))
    (program,) = programs.values()
    assert isinstance(program, LoopProgram)
    assert [ast.unparse(given) for given in program.loop.given.values()] == [
        ast.unparse(ast.parse(value))
    ]


REFUSED = {
    "print in the tape": (
        """
        for x, y in data:
            with GradientTape() as tape:
                loss = x + y
                print(loss)
            optimizer.apply_gradients(tape.gradient(loss, variables))
        """,
        "line 5: `print(loss)` is inside the statement that takes the gradient: move it after that",
    ),
    "attribute in the tape": (
        """
        for x, y in data:
            with GradientTape() as tape:
                trainer.loss = x + y
            optimizer.apply_gradients(tape.gradient(trainer.loss, variables))
        """,
        "line 4: `trainer.loss` is inside the statement that takes the gradient",
    ),
    "counter in a function": (
        """
        def train_step(x):
            trainer.count += 1
            with GradientTape() as tape:
                loss = x
            optimizer.apply_gradients(tape.gradient(loss, variables))
        for x, y in data:
            train_step(x)
        """,
        "line 8: `trainer.count` in `train_step` would run only when nbdist compiles the step",
    ),
    "draw in a function": (
        """
        def train_step():
            x = values[np.random.choice(8, 4)]
            with GradientTape() as tape:
                loss = x
            optimizer.apply_gradients(tape.gradient(loss, variables))
        for step in range(4):
            train_step()
        """,
        "line 8: `np.random.choice(8, 4)` in `train_step` would run only when nbdist compiles",
    ),
    "draw in a lambda": (
        """
        blur = lambda x: x + np.random.normal()
        for x, y in data:
            with GradientTape() as tape:
                loss = blur(x)
            optimizer.apply_gradients(tape.gradient(loss, variables))
        """,
        "line 4: `np.random.normal()` in `blur` would run only when nbdist compiles the step",
    ),
    "draw in a function of a dict": (
        """
        blurs = {"noise": lambda x: x + np.random.normal()}
        for x, y in data:
            with GradientTape() as tape:
                loss = blurs["noise"](x)
            optimizer.apply_gradients(tape.gradient(loss, variables))
        """,
        "line 4: `np.random.normal()` in `blurs['noise']` would run only when nbdist compiles",
    ),
    "draw in a lambda of an object": (
        """
        trainer.blur = lambda x: x + np.random.normal()
        for x, y in data:
            with GradientTape() as tape:
                loss = trainer.blur(x)
            optimizer.apply_gradients(tape.gradient(loss, variables))
        """,
        "line 4: `np.random.normal()` in `trainer.blur` would run only when nbdist compiles",
    ),
    "draw behind a computation": (
        """
        for x, y in data:
            with GradientTape() as tape:
                loss = x * 2
                loss = loss + [rng.normal() for _ in range(2)][0]
            optimizer.apply_gradients(tape.gradient(loss, variables))
        """,
        "line 3: `rng.normal()` is inside the statement that takes the gradient, which nbdist",
    ),
    "value of a branch between two gradients": (
        """
        for x, y in data:
            with GradientTape() as tape:
                loss = x + y
            optimizer.apply_gradients(tape.gradient(loss, variables))
            if x > 2:
                y = float(x)
                with GradientTape() as tape:
                    loss = y
                optimizer.apply_gradients(tape.gradient(loss, variables))
        """,
        "line 7: this statement must run before line 6 of the step, and after an earlier line",
    ),
    "value between two gradients": (
        """
        for x, y in data:
            with GradientTape() as tape:
                loss = x + y
            scale = float(loss)
            optimizer.apply_gradients(tape.gradient(loss * scale, variables))
        """,
        "line 5: this statement must run before line 6 of the step, and after an earlier line",
    ),
}


@pytest.mark.parametrize(("cell", "reason"), REFUSED.values(), ids=REFUSED)
def test_loop_that_cannot_be_divided_names_the_line(cell: str, reason: str) -> None:
    cell = dedent(cell)
    tree = ast.parse(cell)
    rewritten, programs = lift(tree, cell, Callees(tree, {}))
    (error,) = programs.values()
    assert isinstance(error, LoopError)
    assert str(error).startswith(reason)
    assert f"{REFUSE}(" in ast.unparse(rewritten)


def test_cell_without_a_training_loop_is_unchanged() -> None:
    cell = "for x in data:\n    total = total + x\n"
    tree = ast.parse(cell)
    assert lift(tree, cell, Callees(tree, {})) == (None, {})


def test_errors_of_a_step_have_the_lines_of_the_cell() -> None:
    cell = dedent(
        """
        for x, y in data:
            with GradientTape() as tape:
                loss = x + y
            optimizer.apply_gradients(
                tape.gradient(loss / 0, variables))
        """
    )
    linecache.cache["cell"] = len(cell), None, cell.splitlines(keepends=True), "cell"
    with pytest.raises(ZeroDivisionError) as raised:
        run(cell, lifted=True)
    lines = [f.lineno for f in traceback.extract_tb(raised.tb) if f.filename == "cell"]
    assert lines == [3, 6], "the call of the step, and the line of the error"


def test_names_of_rewritten_cells_are_no_builtins_yet() -> None:
    """Only a worker defines them, when it runs a cell."""
    assert not any(hasattr(builtins, name) for name in (LIFTS, LIFTED, OUTER, REFUSE, SKIPPED))
