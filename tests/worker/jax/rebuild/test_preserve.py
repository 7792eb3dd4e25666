"""User arrays and objects survive a rebuild of JAX's backend."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

pytestmark = pytest.mark.processes

BEGIN = """
import hypothesis
import jax, jax.extend, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
from jax._src import dispatch
from nbdist.worker.jax.rebuild.preserve import PreservedArrays
AUTO = jax.sharding.AxisType.Auto
P = jax.P

def new_mesh():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AUTO, AUTO))

def rebuild(namespace):
    preserved = PreservedArrays.take(namespace)
    old = jax.devices()
    dispatch.runtime_tokens.clear()  # else those of a failed callback raise in clear_backends
    jax.extend.backend.clear_backends()
    jax.clear_caches()
    assert jax.devices()[0] is not old[0]
    return preserved.put_back(namespace)

def alive(array):
    assert array.sharding.device_set <= set(jax.devices()), array.sharding
    return array

def raw(array):
    return [(s.device.id, np.asarray(s.data).tobytes()) for s in array.addressable_shards]

mesh = new_mesh()
def on(spec):
    return jax.NamedSharding(mesh, spec)
"""


def run_in_process(program: str, **environment: str) -> None:
    """Run a program in a separate process, whose backend it may tear down; raise its error."""
    code = BEGIN + textwrap.dedent(program)
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_arrays_are_restored_unchanged() -> None:
    """Cover sharded, single-device, key, wide and host-memory arrays, and scalars."""
    run_in_process("""
    grid = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    ns = {
        "sharded": jax.device_put(grid, on(P("data", "model"))),
        "whole": jax.device_put(np.arange(3), on(P())),
        "third": jax.device_put(np.float32(7), jax.devices()[2]),
        "weak": jnp.asarray(3),
        "loose": jnp.ones(3, jnp.bfloat16),
        "key": jax.random.key(5),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 4), on(P("data"))),
        "pinned": jax.device_put(np.ones(4), on(P("data")).with_memory_kind("pinned_host")),
        "numpy": np.ones(2), "rows": on(P("data")), "device": jax.devices()[1],
        "nothing": jax.device_put(np.ones((0, 4), bool), on(P(None, "data"))),
    }
    with jax.enable_x64(True):
        ns["wide"] = jnp.arange(3.0)
    def told(a):
        return (a.shape, a.dtype, a.weak_type if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
                else None, a.committed, str(a.sharding))
    arrays = [n for n, v in ns.items() if isinstance(v, jax.Array)]
    before = {n: told(ns[n]) for n in arrays}
    bits = {n: raw(ns[n]) for n in arrays if "key" not in n}
    drawn = np.asarray(jax.random.normal(ns["key"], 3))
    untouched = ns["numpy"]
    assert rebuild(ns) == ()
    mesh = new_mesh()
    assert {n: told(alive(ns[n])) for n in arrays} == before
    assert {n: raw(ns[n]) for n in bits} == bits
    assert np.array_equal(jax.random.normal(ns["key"], 3), drawn)
    assert jax.random.key_data(ns["keys"]).sharding.mesh is mesh
    assert ns["sharded"].sharding.mesh is mesh and ns["rows"].mesh is mesh
    assert ns["device"] is jax.devices()[1] and ns["numpy"] is untouched
    assert float(jax.jit(jnp.sum)(ns["sharded"])) == 28
    """)


def test_any_shape_type_and_spec_is_restored_exactly() -> None:
    run_in_process("""
    from hypothesis import given, settings, strategies as st
    DTYPES = ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64", "int4",
              "float8_e4m3fn"]
    AXES = [None, "data", "model", ("data", "model"), ("model", "data")]

    @st.composite
    def arrays(draw):
        shape = tuple(4 * n for n in draw(st.lists(st.integers(0, 2), max_size=3)))
        spec = [draw(st.sampled_from(AXES)) for _ in shape]
        names = [n for entry in spec for n in np.atleast_1d(entry) if n is not None]
        hypothesis.assume(len(names) == len(set(names)))
        seed = draw(st.integers(0, 99))
        bits = np.random.default_rng(seed).integers(0, 255, size=(*shape, 16), dtype=np.uint8)
        dtype = jnp.dtype(draw(st.sampled_from(DTYPES)))
        if dtype.name in ("bool", "int4"):
            values = (bits[..., 0] % 2).astype(dtype)
        else:
            values = np.ascontiguousarray(bits[..., : dtype.itemsize]).view(dtype)[..., 0]
        return values, P(*spec)

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(st.lists(arrays(), min_size=1, max_size=4))
    def check(drawn):
        mesh = new_mesh()
        made = [jax.device_put(v, jax.NamedSharding(mesh, spec)) for v, spec in drawn]
        ns = {"arrays": made}
        before = [(raw(a), a.sharding.spec, a.dtype, a.shape) for a in made]
        assert rebuild(ns) == ()
        assert [(raw(alive(a)), a.sharding.spec, a.dtype, a.shape) for a in ns["arrays"]] == before
    check()
    """)


def test_pytrees_keep_shared_arrays() -> None:
    run_in_process("""
    import collections, dataclasses
    import equinox as eqx, optax

    @dataclasses.dataclass
    class Plain:
        w: object
    class Trainer:
        def __init__(self, w): self.w, self.me = w, self

    w = jax.device_put(np.arange(4.0), on(P("data")))
    params = {"w": w, "layers": [(w, None), collections.OrderedDict(b=jnp.zeros(2))]}
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    tx = optax.adam(1e-3)
    loop = [w]; loop.append(loop)
    ns = {"w": w, "params": params, "model": model, "same": model, "tx": tx, "plain": Plain(w),
          "opt": tx.init(eqx.filter(model, eqx.is_array)), "trainer": Trainer(w), "loop": loop,
          "config": {"lr": 0.1, "sizes": (1, 2)}, "pair": (1, "a")}
    pair, layers, plain = ns["pair"], params["layers"], ns["plain"]
    weight = np.asarray(model.weight)
    assert rebuild(ns) == ()
    w = alive(ns["w"])
    assert ns["params"] is params and params["layers"] is layers and ns["plain"] is plain
    assert params["w"] is w and layers[0][0] is w and plain.w is w and ns["trainer"].w is w
    assert ns["loop"] is loop and loop[0] is w and loop[1] is loop
    assert layers[0][1] is None and ns["pair"] is pair
    assert ns["model"] is ns["same"] and type(ns["model"]) is eqx.nn.Linear
    assert np.array_equal(alive(ns["model"].weight), weight)
    grads = eqx.filter_grad(lambda m: m(jnp.ones(2)).sum())(ns["model"])
    updates, _ = tx.update(grads, ns["opt"])
    alive(eqx.apply_updates(ns["model"], updates).weight)
    for leaf in jax.tree.leaves(ns["opt"]): alive(leaf)
    """)


def test_nnx_objects_keep_their_identity() -> None:
    run_in_process("""
    from flax import nnx
    import optax
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(2, 4, rngs=rngs)
            self.more = nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])
            self.tied = self.first.kernel
            self.scale = nnx.data(jnp.ones(3))
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    ns = {"model": model, "optimizer": optimizer, "again": {"m": model}, "rngs": nnx.Rngs(3),
          "state": nnx.state(model)}
    kernel, kept = model.first.kernel, np.asarray(model.first.kernel)
    assert rebuild(ns) == ()
    assert ns["model"] is model and ns["again"]["m"] is model and ns["optimizer"] is optimizer
    assert model.first.kernel is kernel and model.tied is kernel
    assert np.array_equal(alive(kernel.get_raw_value()), kept)
    for leaf in jax.tree.leaves((nnx.state(model), nnx.state(optimizer), nnx.state(ns["rngs"]),
                                 ns["state"], model.scale)):
        alive(leaf)
    @nnx.jit
    def step(model, optimizer, x):
        def loss(m): return (m.first(x) ** 2).sum()
        optimizer.update(model, nnx.grad(loss)(model))
    step(model, optimizer, jnp.ones((1, 2)))
    assert not np.array_equal(kernel.get_raw_value(), kept)
    alive(ns["rngs"].params())
    """)


KERAS = """
import keras
from nbdist.worker.jax.strategy import PjRTStrategy
def build():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dropout(0.5),
                              keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    return model
keras.utils.set_random_seed(1)
strategy = PjRTStrategy()
x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
def variables(model):
    return [*model.variables, *model.optimizer.variables, *model.metrics_variables]
"""


@pytest.mark.full
def test_keras_models_continue_training() -> None:
    run_in_process(
        KERAS
        + textwrap.dedent("""
    with strategy.scope():
        model = build()
        model.fit(x, y, epochs=1, verbose=0)
        drawn = keras.random.uniform((1,))
    ns = {"model": model, "optimizer": model.optimizer, "variable": keras.Variable(np.ones(2)),
          "metric": keras.metrics.Mean(), "layer": model.layers[0], "strategy": strategy,
          "data": strategy.experimental_distribute_dataset([(x, y)])}
    ns["metric"].update_state(3.0)
    before = [np.asarray(v.value) for v in variables(model)]
    objects = variables(model)
    assert rebuild(ns) == ()
    assert ns["model"] is model and all(a is b for a, b in zip(objects, variables(model)))
    for variable, old in zip(variables(model), before):
        assert np.array_equal(alive(variable.value), old)
    alive(ns["variable"].value)
    assert float(ns["metric"].result()) == 3.0
    strategy = PjRTStrategy()
    with strategy.scope():
        model.fit(x, y, epochs=1, verbose=0)
        model.evaluate(x, y, verbose=0)
        model.layers[0].kernel.assign(np.zeros((2, 4)))
        alive(keras.random.uniform((1,)))
    for leaf in jax.tree.leaves(next(iter(ns["data"]))): alive(leaf)
    assert int(model.optimizer.iterations.value) == 2
    """),
        KERAS_BACKEND="jax",
    )


@pytest.mark.full
def test_keras_model_with_cancelled_calls() -> None:
    """`evaluate` holds the values outside the variables; a failed first step has lost them."""
    run_in_process(
        KERAS
        + textwrap.dedent("""
    def batches():
        yield x, y
        yield x, y
        raise ConnectionError
    model, gone = build(), build()
    kernel = np.asarray(model.layers[0].kernel)
    try: model.evaluate(batches(), verbose=0)
    except ConnectionError: pass
    assert model.layers[0].kernel._value is None
    for variable in gone.variables: variable._value = None
    ns = {"model": model, "gone": gone, "layer": gone.layers[0]}
    assert rebuild(ns) == ("gone", "layer")
    assert set(ns) == {"model"}
    assert np.array_equal(alive(model.layers[0].kernel.value), kernel)
    model.fit(x, y, verbose=0)
    """),
        KERAS_BACKEND="jax",
    )


def test_lost_names_are_reported_and_deleted() -> None:
    """Arrays donated to a step or computed by a failed one; every name of a lost module goes."""
    run_in_process("""
    from flax import nnx
    donated = jnp.arange(4.0)
    jax.jit(lambda a: a + 1, donate_argnums=0)(donated)
    def fails(a):
        return jax.pure_callback(lambda v: 1 // 0, jax.ShapeDtypeStruct(a.shape, a.dtype), a)
    each = jax.jit(jax.shard_map(fails, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    failed = each(jax.device_put(np.ones(4), on(P("data"))))
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model.bias.get_raw_value().delete()
    kept = jnp.ones(2)
    ns = {"donated": donated, "failed": failed, "state": {"step": 3, "w": donated, "kept": kept},
          "model": model, "models": [model], "kept": kept, "other": 1}
    lost = rebuild(ns)
    assert lost == ("donated", "failed", "state", "model", "models"), lost
    assert set(ns) == {"kept", "other"}
    alive(ns["kept"])
    """)


def test_unusual_objects_are_unchanged() -> None:
    run_in_process("""
    import types
    class Strange:
        __slots__ = ()
        def __getattr__(self, name): raise RuntimeError(name)
        def __eq__(self, other): raise RuntimeError
        __hash__ = None
    class Node: pass
    def bad(node): raise RuntimeError("flatten")
    jax.tree_util.register_pytree_node(Node, bad, bad)
    def function(a=jnp.ones(2)): return a
    deep = []
    for _ in range(100_000): deep = [deep]
    module = types.ModuleType("theirs"); module.array = jnp.ones(2)
    inside = module.array
    ns = {"strange": Strange(), "node": Node(), "function": function, "deep": deep, "jnp": jnp,
          "module": module, "cls": Strange, "_hidden": inside, "Out": {1: inside}, "mesh": mesh}
    before = dict(ns)
    assert rebuild(ns) == ()
    assert ns.keys() == before.keys() and all(ns[n] is before[n] for n in ns)
    assert module.array is inside
    while deep: deep = deep.pop()
    """)


@pytest.mark.full  # the test above has such names
def test_names_of_ipython_and_nbdist_are_skipped() -> None:
    run_in_process("""
    array = jnp.ones(2)
    ns = dict.fromkeys(["_", "_1", "In", "Out", "strategy", "mesh"], array)
    before = dict(ns)
    assert rebuild(ns) == ()
    assert ns.keys() == before.keys() and all(ns[name] is array for name in ns), ns
    """)


REJOIN = """
import gc
import jax
from jax._src import distributed
from jax.extend.backend import clear_backends
from nbdist.records import PjrtWiring
from nbdist.worker.jax import backend as pjrt
from nbdist.worker.runtime import context
from nbdist.worker.jax.rebuild.preserve import PreservedArrays
from nbdist.worker.runtime.shell import engine_shell

namespace = engine_shell().user_ns
preserved = PreservedArrays.take(namespace)
distributed.global_state.client = None
clear_backends()
jax.clear_caches()
gc.collect()
rank = context.current().rank
pjrt.build(
    PjrtWiring(
        service={address!r},
        address="127.0.0.1",
        rank=rank,
        world_size=2,
        cpu_devices=2,
        compiled="",
    )
)
namespace["lost"] = preserved.put_back(namespace)
namespace["mesh"] = context.current().strategies["pjrt"].mesh
"""


def test_two_ranks_rejoin_and_continue(cluster: nbdist.Cluster, service: str) -> None:
    """Each rank gets its shards of an array back, and the next all-reduce includes all."""
    cluster.run(
        "import jax, jax.numpy as jnp, numpy as np\n"
        "rows = jax.NamedSharding(mesh, jax.P('data'))\n"
        "x = jax.make_array_from_process_local_data(rows, np.arange(2.0) + 10 * rank)\n"
        "whole = jax.device_put(np.ones(3), jax.NamedSharding(mesh, jax.P()))\n"
        "own = jnp.int32(rank)",
        guard=0,
    )
    cluster._worker_group.engines.apply(exec, REJOIN.format(address=service), {})
    run = cluster.run(
        "total = jax.jit(jnp.sum, out_shardings=jax.P())(x)\n"
        "float(total), float(whole.sum()), int(own), x.sharding.mesh is mesh, lost",
        guard=0,
    )
    assert run.results == {rank: f"(22.0, 3.0, {rank}, True, ())" for rank in range(2)}


@pytest.fixture
def cluster() -> Iterator[nbdist.Cluster]:
    """Start a cluster for one test: its ranks leave their coordination service."""
    with clusters.cluster(hosts=2, framework="jax", devices_per_host=2) as running:
        yield running


@pytest.fixture
def service() -> Iterator[str]:
    """Start a second coordination service and return its address."""
    program = (
        "from nbdist.worker.jax.runtime.coordinator import main\n"
        "main({'host': '127.0.0.1', 'world_size': 2},"
        " lambda info: print(info['address'], flush=True))"
    )
    running = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with running:
        assert running.stdout is not None
        yield running.stdout.readline().strip()
        running.kill()
