"""Step cells with Flax NNX, Equinox, Optax and bare pytrees: the numbers of one device."""

from __future__ import annotations

import re
import textwrap
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from nbdist.records import StepOptions
from tests import clusters, references
from tests import jax_programs as programs
from tests.clusters import evaluate
from tests.references import Outcome, Training

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAINING = StepOptions(data="train", epochs=programs.EPOCHS, batch=programs.BATCH)
SMALL = StepOptions(data="ones", batch=8)
SETUP = programs.X64 + "import numpy as np\nones = np.ones(16)\n"


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param, framework="jax") as running:
        running.run(programs.DATA + SETUP, strategy="pjrt")
        yield running


@pytest.fixture(scope="module")
def pair() -> Iterator[nbdist.Cluster]:
    """Cluster of two workers for tests that do not depend on their number."""
    with clusters.cluster(hosts=2, framework="jax") as running:
        running.run(SETUP, strategy="pjrt")
        yield running


@cache
def reference_outcome(program: programs.Program) -> Outcome:
    training = Training(
        setup=programs.DATA + program.setup + program.train_step,
        step=program.plain,
        after=program.weights,
        epochs=programs.EPOCHS,
        batch=programs.BATCH,
    )
    return references.by_hand({"it": training})["it"]


def step(cluster: nbdist.Cluster, cell: str, options: StepOptions = SMALL) -> nbdist.Run:
    return cluster.run(cell, step=options, strategy="pjrt")


def losses(run: nbdist.Run) -> list[float]:
    return [m.shared["loss"] for m in run.metrics if m.rank == 0 and m.step > 0]


def assert_close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-9, atol=1e-12)


def assert_weights_close(
    cluster: nbdist.Cluster, program: programs.Program, theirs: list[Any]
) -> None:
    cluster.run(f"weights = {program.weights}", strategy="pjrt")
    for objects in cluster.pull(["weights"]).values():
        for one, other in zip(objects["weights"], theirs, strict=True):
            assert_close(one, other)


def test_flax_nnx_gives_the_numbers_of_one_device(cluster: nbdist.Cluster) -> None:
    """The model has batch statistics, dropout, metrics and frozen layers; objects keep identity."""
    reference = reference_outcome(programs.NNX)
    cluster.run(programs.NNX.setup, strategy="pjrt")
    cluster.run("net, parts = model, [model.first, optimizer]", strategy="pjrt")
    run = step(cluster, programs.NNX.step, TRAINING)
    assert_close(losses(run), reference.reports["loss"])
    assert_weights_close(cluster, programs.NNX, reference.after)
    expression = "net is model and parts[0] is net.first, int(model.drop.rngs.count[...])"
    assert evaluate(cluster, expression) == "(True, 22)"
    mean = float(evaluate(cluster, "float(metrics.compute()['mean'])"))
    assert mean == pytest.approx(np.mean(reference.reports["loss"]), rel=1e-5)
    assert evaluate(cluster, "model(features(images[:3])).shape") == "(3, 10)"


@pytest.mark.full  # NNX covers state, random numbers and Optax
def test_equinox_gives_the_numbers_of_one_device(cluster: nbdist.Cluster) -> None:
    """The model has state, dropout, a schedule and MultiSteps; one trace for each batch shape."""
    reference = reference_outcome(programs.EQUINOX)
    cluster.run(programs.EQUINOX.setup, strategy="pjrt")
    run = step(cluster, programs.EQUINOX.step, TRAINING)
    assert_close(losses(run), reference.reports["loss"])
    assert_weights_close(cluster, programs.EQUINOX, reference.after)
    assert evaluate(cluster, "sorted(set(traced)), len(traced)") == "([(41, 64), (96, 64)], 2)"
    apply = "eqx.nn.inference_mode(model)(images[0], state, None)[0].shape"
    assert evaluate(cluster, apply) == "(10,)"


NNX = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import dataclasses
ones = np.ones(16)
class Count(nnx.Module):
    def __init__(self):
        self.total = nnx.Variable(jnp.zeros(()))
        self.calls = nnx.Variable(0)
        self.kind = "a"
    def add(self, x):
        self.total[...] += x.sum()
        self.calls.set_value(self.calls.get_value() + 1)
        return self.total[...]
count = Count()
pair = {"first": count, "others": [count, Count()]}
class Holder:
    def __init__(self):
        self.count = count
holder = Holder()
def adds(x):
    return count.add(x)
"""


def test_nnx_objects_in_containers_stay_shared(pair: nbdist.Cluster) -> None:
    evaluate(pair, NNX)
    cell = "pair['first'].add(batch)\npair['others'][0].add(batch)\npair['others'][1].add(batch)\n"
    step(pair, cell + "loss = count.add(batch)")
    message = (
        "float(count.total[...]), int(count.calls.get_value()), float(pair['others'][1].total[...])"
    )
    assert evaluate(pair, f"({message}, pair['first'] is count)") == "(48.0, 6, 16.0, True)"


def test_nnx_object_is_read_and_assigned(pair: nbdist.Cluster) -> None:
    """An object keeps its identity, and a new object leaves the old one unchanged."""
    evaluate(pair, NNX + "def added(c, x):\n    c.add(x)\n    return c\nold = count")
    step(pair, "count = added(count, batch)\nloss = count.total[...]")
    assert evaluate(pair, "float(count.total[...]), old is count") == "(16.0, True)"
    step(pair, "count = added(nnx.clone(count), batch)\nloss = count.total[...]")
    assert evaluate(pair, "float(count.total[...]), float(old.total[...])") == "(32.0, 16.0)"


def test_functional_nnx_state_is_carried(pair: nbdist.Cluster) -> None:
    evaluate(pair, NNX + "graph, state = nnx.split(count)\nfirst = state")
    cell = "c = nnx.merge(graph, state)\nloss = c.add(batch)\nstate = nnx.state(c)"
    step(pair, cell)
    message = "float(state['total'][...]), float(first['total'][...]), float(count.total[...])"
    assert evaluate(pair, message) == "(16.0, 0.0, 0.0)"


FUNCTIONAL = (
    programs.X64
    + """
import optax
from flax import nnx
net = nnx.Linear(64, 10, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
graph, state = nnx.split(net)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.MultiSteps(optax.adam(0.01), 2))
opt_state = tx.init(state)
"""
)
FUNCTIONAL_STEP = """
x, y = batch
def loss_fn(state):
    logits = nnx.merge(graph, state)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
loss, grads = jax.value_and_grad(loss_fn)(state)
updates, opt_state = tx.update(grads, opt_state, state)
state = optax.apply_updates(state, updates)
"""
FUNCTIONAL_ON_ONE_DEVICE = (
    "@jax.jit\ndef train_step(state, opt_state, batch):"
    + textwrap.indent(FUNCTIONAL_STEP, "    ")
    + "    return loss, state, opt_state\n"
)


@pytest.mark.full  # tests/worker/jax/step/test_nnx.py covers Optax with such a state
def test_functional_nnx_with_optax_gives_the_numbers_of_one_device(
    cluster: nbdist.Cluster,
) -> None:
    weights = "[np.asarray(a).tolist() for a in jax.tree.leaves((state, opt_state))]"
    plain = "loss, state, opt_state = train_step(state, opt_state, batch)"
    program = programs.Program(
        FUNCTIONAL, FUNCTIONAL_STEP, FUNCTIONAL_ON_ONE_DEVICE, plain, weights
    )
    reference = reference_outcome(program)
    cluster.run(FUNCTIONAL, strategy="pjrt")
    run = step(cluster, FUNCTIONAL_STEP, TRAINING)
    assert_close(losses(run), reference.reports["loss"])
    assert_weights_close(cluster, program, reference.after)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("count.new = batch.sum()\nloss = count.new", r"`count` \(line 2\) .*\.new is new"),
        ("count.kind = 'b'\nloss = count.add(batch)", r"`count` .*\.kind changes from 'a' to 'b'"),
        pytest.param(
            "count.total = nnx.Variable(batch)\nloss = batch.sum()",
            r"\['total'\]\.value changes from float64\[\]",
            marks=pytest.mark.full,
        ),
        ("del count.total\nloss = batch.sum()", r"`count` \(line 2\) .*\.total is missing"),
        (
            "count.add(batch)\nloss = holder.count.add(batch)",
            r"`holder` \(line 3\) contains NNX obj",
        ),
        pytest.param(
            "loss = count.add(batch) + adds(batch)",
            r"`adds` \(line 2\) reads `count` from outside",
            marks=pytest.mark.full,
        ),
    ],
)
def test_unsupported_changes_of_nnx_objects_are_refused(
    pair: nbdist.Cluster, cell: str, message: str
) -> None:
    evaluate(pair, NNX)
    with pytest.raises(nbdist.CellError, match=message):
        step(pair, cell)
    assert evaluate(pair, "float(count.total[...]), count.kind") == "(0.0, 'a')"


BARE = """
import jax, jax.numpy as jnp, numpy as np, dataclasses, collections, functools
ones = np.ones(16)
Pair = collections.namedtuple("Pair", "mean none")
@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "step"], meta_fields=["tag"])
@dataclasses.dataclass
class State:
    w: jax.Array
    step: int
    tag: str
pair = Pair(np.zeros(2), None)
state = State(jnp.zeros(3), 0, "t")
count, total, flag, rate, fixed = 0, 0, True, 0.5, 3
key, raw = jax.random.key(1), jax.random.PRNGKey(2)
keys, raws = key, raw
options = {"train": True, "n": 3}
original = pair.mean
"""

BARE_STEP = """
key, one = jax.random.split(key)
raw, two = jax.random.split(raw)
pair = Pair(pair.mean + batch.mean() + 0 * jax.random.normal(one), pair.none)
state = dataclasses.replace(state, w=state.w + 1, step=state.step + 1)
count += 1
total = total + batch.sum()
flag = flag & (batch.sum() < 0)
rate = rate * 0.5
fixed = fixed if options["train"] else 0
loss = state.w.sum() * len(range(fixed)) + 0 * jax.random.normal(two)
"""


def test_bare_pytrees_numbers_and_keys_are_carried(pair: nbdist.Cluster) -> None:
    """Changed numbers become arrays, and unchanged numbers stay numbers."""
    evaluate(pair, BARE)
    run = step(pair, BARE_STEP)
    assert losses(run) == [9.0, 18.0]
    seen = "pair.mean.tolist(), pair.none, state.w.tolist(), int(state.step), state.tag"
    assert evaluate(pair, seen) == "([2.0, 2.0], None, [2.0, 2.0, 2.0], 2, 't')"
    numbers = "int(count), float(total), bool(flag), float(rate), fixed, original.tolist()"
    assert evaluate(pair, numbers) == "(2, 16.0, False, 0.125, 3, [0.0, 0.0])"
    split = "for _ in range(2): keys, raws = jax.random.split(keys)[0], jax.random.split(raws)[0]\n"
    alike = "bool((jax.random.key_data(keys) == jax.random.key_data(key)).all())"
    assert evaluate(pair, f"{split}{alike}, bool((raws == raw).all())") == "(True, True)"


def test_numbers_keep_the_types_of_arrays_beside_them(pair: nbdist.Cluster) -> None:
    """A number does not widen a float32, as in plain JAX."""
    evaluate(pair, "rate, w, start = 0.5, jnp.ones(3, jnp.float32), jnp.asarray(0.5)")
    step(pair, "rate = rate * 0.5\nstart = start * 0.5\nw = w * rate * start\nloss = w.sum()")
    assert evaluate(pair, "w.dtype.name, float(rate)") == "('float32', 0.125)"


def test_carried_arrays_are_not_copied(pair: nbdist.Cluster) -> None:
    """The buffer keeps its address at the start and end of runs."""
    address = "w.addressable_data(0).unsafe_buffer_pointer()"
    evaluate(pair, f"w = jnp.ones(1000)\nplaces = [{address}]")
    for _ in range(2):
        step(pair, "w = w + batch.mean()\nloss = w[0]")
        expression = f"places.append({address})\nlen(set(places)), float(w[0])"
        after = evaluate(pair, expression)
    assert after == "(1, 5.0)"


def test_arrays_with_other_references_survive_the_run(pair: nbdist.Cluster) -> None:
    """The step donates carried arrays, and copies those with other references first."""
    evaluate(
        pair, NNX + "w = jnp.ones(5)\nfirst, best, target = w, {'w': w}, w\nc = nnx.clone(count)"
    )
    step(pair, "w = w + 1\ntarget = target + 0.5 * w\nloss = (w - first).sum() + count.add(batch)")
    message = "float(w[0]), float(best['w'][0]), float(first[0]), float(target[0])"
    assert evaluate(pair, f"({message}, float(c.total[...]))") == "(3.0, 1.0, 1.0, 3.5, 0.0)"


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            "store['w'] = batch\nloss = batch.sum()",
            r"`store\['w'\]` \(line 2\) .* changes from float64\[3\]",
        ),
        ("history.append(batch.sum())\nloss = batch.sum()", r"`history\[0\]` \(line 2\) is new,"),
        ("w = w + helper(batch)\nloss = w", r"`helper` \(line 2\) reads `w` from outside"),
        pytest.param(
            "w = None\nloss = batch.sum() if w is None else w", r".", marks=pytest.mark.full
        ),
        pytest.param(
            "store = {**store, 'x': 1}\nloss = batch.sum()",
            r"`store` .*\['x'\] is new",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "w = w + 1j\nloss = batch.sum()",
            r"`w` .* the value changes from float64\[\] to complex128\[\]",
            marks=pytest.mark.full,
        ),
    ],
)
def test_changes_that_a_step_would_lose_are_refused(
    pair: nbdist.Cluster, cell: str, message: str
) -> None:
    evaluate(pair, "store, history, w = {'w': jnp.ones(3)}, [], jnp.zeros(())")
    evaluate(pair, "def helper(x):\n    return x.sum() * w")
    if message == ".":
        step(pair, cell)
        return
    with pytest.raises(nbdist.CellError, match=message):
        step(pair, cell)
    assert evaluate(pair, "sorted(store), history, float(w)") == "(['w'], [], 0.0)"


def test_arrays_that_are_only_read_are_arguments(pair: nbdist.Cluster) -> None:
    """Frozen modules and arrays are arguments of the program instead of constants."""
    evaluate(pair, "import equinox as eqx\nfrom flax import nnx\ndumped = []")
    evaluate(
        pair,
        "frozen = eqx.nn.Linear(7, 7, key=jax.random.key(0))\n"
        "other = nnx.Linear(7, 7, rngs=nnx.Rngs(0))\ntable = np.arange(7.0)\n"
        "before = np.asarray(other.kernel[...])\n"
        "def looks(*leaves):\n"
        "    dumped.extend(isinstance(x, jax.core.Tracer) for x in leaves)\n1",
    )
    cell = "looks(frozen.weight, other.kernel[...], table)\n"
    step(pair, cell + "loss = frozen(other(table)).sum() * batch.sum()")
    assert evaluate(pair, "dumped, bool((before == other.kernel[...]).all())") == (
        "([True, True, True], True)"
    )


def test_array_read_by_a_helper_is_a_constant(pair: nbdist.Cluster) -> None:
    """The array is a constant, as in jax.jit; nbdist refuses arrays sharded over processes."""
    evaluate(pair, "table = jnp.arange(4.0)\ndef helper(x):\n    return x * table.sum()")
    step(pair, "table = table + 1\nloss = batch.sum()")
    assert losses(step(pair, "loss = helper(batch).sum()")) == [112.0, 112.0]
    evaluate(pair, "table = jax.device_put(table, jax.NamedSharding(mesh, jax.P('data')))")
    with pytest.raises(nbdist.CellError, match=r"`helper` \(line 2\) reads `table` from outside"):
        step(pair, "loss = helper(batch).sum()")
    cell = "def scaled(x, table):\n    return x * table.sum()\nloss = scaled(batch, table).sum()"
    assert losses(step(pair, cell)) == [112.0, 112.0]


CONTROL = """
def halve(carry):
    return carry[0] / 2, carry[1] + 1
small, halvings = lax.while_loop(lambda carry: carry[0] > 1, halve, (batch.sum(), 0))
w = lax.cond(halvings > 2, lambda w: w + 1, lambda w: w - 1, w)
sums, _ = lax.scan(lambda total, x: (total + x, None), 0.0, batch)
{"loss": sums, "halvings": halvings}
"""


def test_jax_control_flow_works(pair: nbdist.Cluster) -> None:
    evaluate(pair, "from jax import lax\nw = jnp.zeros(2)")
    run = step(pair, CONTROL)
    assert (run.last("loss"), run.last("halvings")) == (8.0, 3.0)
    assert evaluate(pair, "w.tolist()") == "[2.0, 2.0]"


def test_if_on_an_array_points_at_its_line(pair: nbdist.Cluster) -> None:
    cell = "x = batch.sum()\nif x > 1:\n    x = x + 1\nloss = x"
    with pytest.raises(nbdist.CellError, match="TracerBoolConversionError") as error:
        pair.run(cell, step=SMALL, strategy="pjrt", label=5)
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.value.traceback))
    assert re.search(r"In\[5\].*line 3", text)
    assert "in step" in text
    assert "jax.lax.cond" in str(error.value)


def test_step_is_compiled_once(pair: nbdist.Cluster) -> None:
    """A number that becomes an array, or a lost weak type, causes no second compilation."""
    evaluate(
        pair,
        "compiled = []\n"
        "def hear(event, seconds, **about):\n"
        "    if 'backend_compile' in event:\n"
        "        compiled.append(about.get('fun_name'))\n"
        "jax.monitoring.register_event_duration_secs_listener(hear)\n"
        "count, weak = 0, jnp.asarray(0.0)",
    )
    options = StepOptions(data="ones", batch=8, epochs=3)
    step(pair, "count += 1\nweak = weak + batch.mean()\nloss = weak", options)
    assert evaluate(pair, "[name for name in compiled if '_pure' in str(name)]") == "['jit(_pure)']"
