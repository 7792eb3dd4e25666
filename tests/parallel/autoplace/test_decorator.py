"""`@autoplace` on eight devices of one process."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.errors import UsageError
from nbdist.parallel.autoplace import cache as choice_cache
from nbdist.parallel.autoplace.decorator import Autoplaced, autoplace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.records.autoplace import Decision

PLUGIN = """
from jax._src import xla_bridge
from jax._src.lib import xla_client

def initialize():
    xla_bridge.register_backend_factory("zorn", client, priority=500, fail_quietly=False)

def client():
    return xla_client.make_cpu_client(asynchronous=True)
"""
ON_TWO_PLATFORMS = """
import jax, jax.numpy as jnp
from nbdist.parallel.autoplace.decorator import autoplace
double = autoplace(lambda x: jnp.sort(x) * 2)
assert (double(jnp.arange(8.0)) == 2 * jnp.arange(8.0)).all()
(decision,) = double.report().decisions
print(sorted(timed.name for timed in decision.timed), decision.inputs)
"""
ONCE_MORE = """
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 8)
from nbdist.parallel.autoplace import trials
from nbdist.parallel.autoplace.decorator import autoplace
def double(x):
    return x * 2
double.__module__, double.__qualname__ = "tests.kept", "double"
double = autoplace(double)
print(len(double.report().decisions), end=" ")
double(jnp.ones((8, 8)))
(decision,) = double.report().decisions
print(decision.made, decision.chosen, len(decision.timed))
"""


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set the file of decisions to an empty one."""
    path = tmp_path / "placements.sqlite"
    monkeypatch.setenv("NBDIST_PLACEMENTS", str(path))
    choice_cache.users.cache_clear()
    yield path
    choice_cache.users.cache_clear()


def only(function: Autoplaced) -> Decision:
    (decision,) = function.report().decisions
    return decision


def everywhere(shape: tuple[int, ...]) -> jax.Array:
    """Return ones that are replicated on all eight devices, so that each computes everything."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(jnp.ones(shape), jax.NamedSharding(mesh, jax.P()))


def long_work(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 10, lambda _, y: jnp.sort(y + 1, axis=1), x)


def test_a_small_call_keeps_its_place() -> None:
    @autoplace
    def add(a: jax.Array, b: jax.Array) -> jax.Array:
        return a + b

    a = jnp.ones((8, 8))
    assert (add(a, a) == 2).all()
    assert add(a, a).sharding == a.sharding
    decision = only(add)
    assert decision.chosen == "default"
    assert {one.name for one in decision.timed} == {"default", "batch"}


def test_replicated_work_is_sharded_or_moved_to_one_device() -> None:
    work = autoplace(long_work)
    x = everywhere((64, 512))
    for _ in range(5):  # another process may slow down the machine
        work.forget()
        assert np.array_equal(work(x), long_work(np.ones((64, 512), "f")))
        if only(work).chosen != "default":
            break
    decision = only(work)
    assert decision.chosen in {"one device", "batch"}
    medians = {one.name: one.median_s for one in decision.timed}
    assert medians[decision.chosen] < medians["default"]
    assert work(x).sharding != x.sharding
    assert "times as fast as the default" in decision.why


def test_each_kind_of_inputs_is_decided_once() -> None:
    double = autoplace(lambda x: jax.tree.map(lambda y: y * 2, x))
    for _ in range(2):
        double(jnp.ones((8, 8)))
        double(np.ones((8, 8), "f"))
        double(np.ones((8, 8), "i"))
        double({"a": jnp.ones((8, 8))})
        double(2.0)
        double(np.float32(2))
    assert len(double.report().decisions) == 6


def test_random_keys_are_arrays() -> None:
    drawn = autoplace(jax.vmap(jax.random.uniform))
    keys = jax.random.split(jax.random.key(0), 8)
    assert (drawn(keys) == jax.vmap(jax.random.uniform)(keys)).all()
    assert "batch" in {one.name for one in only(drawn).timed}


def test_a_function_with_effects_is_not_tried() -> None:
    calls: list[float] = []

    @autoplace
    def printed(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda total: calls.append(float(total)), x.sum())
        return x + 1

    for _ in range(2):
        printed(jnp.ones((8, 8)))
    jax.effects_barrier()
    assert calls == [64.0, 64.0]
    assert only(printed).chosen == "default"
    assert only(printed).why == "it has effects (DebugEffect), which trials would repeat"
    assert not only(printed).timed


@pytest.mark.processes
def test_a_second_process_makes_no_trials(file: Path) -> None:
    command = [sys.executable, "-c", ONCE_MORE]
    first, second = (
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
        for _ in range(2)
    )
    assert first.startswith("0 ")
    assert second.startswith("1 ")  # the decision of the first process is available before any call
    assert (
        first.split()[1:] == second.split()[1:]
    )  # same time of the decision as in the first process
    assert int(first.split()[3]) > 1


def test_a_forgotten_decision_is_made_again() -> None:
    double = autoplace(lambda x: x * 2)
    double(jnp.ones((8, 8)))
    first = only(double)
    again = autoplace(double.__wrapped__)
    again(jnp.ones((8, 8)))
    assert only(again) == first
    double.forget()
    assert double.report().decisions == ()
    double(jnp.ones((8, 8)))
    assert only(double).made > first.made


@pytest.mark.processes
def test_another_platform_is_a_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "jax_plugins" / "zorn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("JAX_PLATFORMS", "zorn,cpu")
    command = [sys.executable, "-c", ON_TWO_PLATFORMS]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout == "['cpu', 'default'] float32[8] free on zorn 0\n", done.stderr


def test_donated_inputs_are_consumed_by_the_call_only() -> None:
    step = autoplace(jax.jit(lambda state, x: state + x, donate_argnums=0))
    state, x = jnp.ones((8, 8)), jnp.ones((8, 8))
    after = step(state, x)
    assert (after == 2).all()
    assert len(only(step).timed) > 1
    assert state.is_deleted()
    assert not x.is_deleted()
    with pytest.raises(UsageError, match=r"leaf \['state'\] \[8, 8\] was donated"):
        step(state, x)


def test_static_arguments_are_those_of_jit() -> None:
    def power(x: jax.Array, n: int, *, plus: int = 0) -> jax.Array:
        return x**n + plus

    by_name = autoplace(static_argnames=("n", "plus"))(power)
    by_number = autoplace(jax.jit(power, static_argnums=1, static_argnames="plus"))
    for function in (by_name, by_number):
        x = jnp.full(8, 2.0)
        assert (function(x, 3) == 8).all()
        assert (function(x, n=2, plus=1) == 5).all()
        assert len(function.report().decisions) == 2
        moved = everywhere((8,))
        assert (function(moved, 3, plus=2) == 3).all()


def test_a_static_value_that_cannot_be_hashed_is_refused() -> None:
    power = autoplace(static_argnames="n")(lambda x, n: x * n[0])
    with pytest.raises(
        UsageError, match=r"static argument 'n' has type list, which cannot be hashed"
    ):
        power(jnp.ones(8), n=[2])


def test_the_function_is_unchanged_within_jit_and_grad() -> None:
    square = autoplace(lambda x: (x * x).sum())
    x = jnp.arange(8.0)
    assert (jax.grad(square)(x) == 2 * x).all()
    assert jax.jit(lambda y: square(y) + square(np.ones(8, "f")))(x) == (x * x).sum() + 8
    assert (jax.vmap(square)(x[:, None]) == x * x).all()
    assert square.report().decisions == ()
    assert "no measurements yet" in repr(square.report())


def test_inputs_on_different_devices_are_accepted() -> None:
    add = autoplace(lambda a, b: a + b)
    a, b = jax.device_put([np.ones((8, 8), "f")] * 2, list(jax.devices()[2:4]))
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(add.__wrapped__)(a, b)
    assert (add(a, b) == 2).all()
    decision = only(add)
    assert decision.chosen != "default"
    assert {left.name for left in decision.left_out} >= {"default"}


def test_a_jitted_function_with_shardings_is_not_tried() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = jax.NamedSharding(mesh, jax.P("data"))
    double = autoplace(jax.jit(lambda x: x * 2, in_shardings=by_rows))
    assert double(np.ones(8, "f")).sharding.is_equivalent_to(by_rows, 1)
    assert only(double).why == "it was jitted with shardings or a device of its own"


def test_methods_receive_their_instance() -> None:
    class Scaled:
        @functools.partial(autoplace, static_argnames="self")
        def __call__(self, x: jax.Array) -> jax.Array:
            return 3 * x

    assert (Scaled()(jnp.ones(8)) == 3).all()


def test_threads_share_one_decision() -> None:
    double = autoplace(lambda x: x * 2)
    together = threading.Barrier(4)

    def call() -> Any:
        together.wait()
        return double(jnp.ones((8, 8)))

    with ThreadPoolExecutor(4) as pool:
        results = [future.result() for future in [pool.submit(call) for _ in range(4)]]
    assert all((result == 2).all() for result in results)
    assert len(double.report().decisions) == 1


def test_a_tracing_error_is_reported_with_its_line() -> None:
    @autoplace
    def decide(x: jax.Array) -> jax.Array:
        if x.sum() > 0:  # the line
            return x
        return -x

    with pytest.raises(UsageError) as raised:
        decide(jnp.ones(8))
    text = str(raised.value)
    assert "test_decorator.test_a_tracing_error_is_reported_with_its_line" in text
    assert "if x.sum() > 0:  # the line" in text
    assert "jax.lax.cond instead of if" in text
    assert "static_argnames=" in text


def test_an_error_of_the_function_is_raised_unchanged() -> None:
    product = autoplace(lambda a, b: a @ b)
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        product(jnp.ones((2, 3)), jnp.ones((2, 3)))


def test_a_leaf_that_is_not_an_array_is_refused() -> None:
    step = autoplace(lambda parameters, x: x)
    with pytest.raises(UsageError) as raised:
        step({"w": [jnp.ones(2), "text"]}, np.array(["a"]))
    text = str(raised.value)
    assert "leaf ['parameters']['w'][1] has type str" in text
    assert "leaf ['x']" in text


def test_an_object_that_is_not_a_function_is_refused() -> None:
    with pytest.raises(UsageError, match=r"@autoplace got 3, a int: give it a function"):
        autoplace(3)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"got static_argnums for .*, which is jitted"):
        autoplace(static_argnums=0)(jax.jit(lambda x: x))


def test_name_and_docstring_of_the_function_are_kept() -> None:
    def named(x: jax.Array) -> jax.Array:
        """Documentation of the function."""
        return x

    placed = autoplace(named)
    assert placed.__name__ == "named"
    assert placed.__doc__ == "Documentation of the function."
    assert placed.__wrapped__ is named
