"""Steps with objects and functional state of Flax NNX, on the devices of this process."""

from __future__ import annotations

import builtins
import textwrap
from typing import Any

import jax
import numpy as np
import pytest

from nbdist.cells.step_program import compile_step
from nbdist.errors import StepError
from nbdist.records import StepOptions, StepRequest
from nbdist.worker.data.batches import Batch
from nbdist.worker.jax.step.step import PjrtStep
from nbdist.worker.jax.strategy import PjRTStrategy

SETUP = """
import dataclasses
from typing import Any, NamedTuple
import flax, jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from flax.training import train_state

class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.down = nnx.Linear(4, 1, rngs=rngs)
    def __call__(self, x):
        return self.down(jnp.tanh(self.norm(self.up(x))))

net = Net(nnx.Rngs(0))
graphdef, state, rest = nnx.split(net, nnx.Param, ...)

def loss_of(state, x):
    return (nnx.merge(graphdef, state, rest, copy=True)(x) ** 2).mean()

class Tuple(NamedTuple):
    state: Any
    opt: Any
    step: Any

@flax.struct.dataclass
class Struct:
    state: Any
    opt: Any
    step: Any

@dataclasses.dataclass
class Plain:
    state: Any
    opt: Any
    step: Any
"""

STEP = """
loss, grads = jax.value_and_grad(loss_of)(state, batch)
updates, opt_state = tx.update(grads, opt_state, state)
state = optax.apply_updates(state, updates)
"""

ALL = """
loss, grads = jax.value_and_grad(loss_of)(train.state, batch)
updates, opt = tx.update(grads, train.opt, train.state)
train = {}
"""
BATCHES = [np.random.default_rng(n).normal(size=(8, 3)).astype(np.float32) for n in range(3)]


def in_steps(setup: str, body: str) -> dict[str, Any]:
    """Run a step cell over the batches; returns the namespace."""
    namespace = in_order(setup, "")
    program = compile_step("# %%dist_run --data data\n" + body, given=("batch",), carries=True)
    namespace["data"] = np.concatenate(BATCHES)

    def define(source: str) -> Any:
        exec(source, namespace)
        return namespace.pop("step")

    strategy = PjRTStrategy()
    request = StepRequest(program, StepOptions(data="data", batch=8))
    with jax.set_mesh(strategy.mesh):
        step = PjrtStep(request, define, namespace, strategy)
        for index in range(len(BATCHES)):
            step.step(_batch(index))
            if index == 1:
                step.write_back()
        step.finish()
    return namespace


def in_order(setup: str, body: str) -> dict[str, Any]:
    """Run the same code without nbdist."""
    namespace: dict[str, Any] = {"__builtins__": builtins, "__name__": "__main__"}
    exec(SETUP + textwrap.dedent(setup), namespace)
    for namespace["batch"] in BATCHES:
        exec(body, namespace)
    return namespace


def _batch(index: int) -> Batch:
    values = (BATCHES[index],)
    return Batch(values, 8, whole=False, everything=lambda: values)


def assert_equal(setup: str, body: str, after: str) -> dict[str, Any]:
    ours, theirs = in_steps(setup, body), in_order(setup, body)
    one, other = eval(after, ours), eval(after, theirs)
    for mine, reference in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-5, atol=1e-6)
    return ours


OPTIMIZERS = {
    "multi_steps": """
        decay = optax.add_decayed_weights(0.1)
        matrices = lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
        tx = optax.MultiSteps(optax.chain(optax.masked(decay, matrices), optax.adam(0.1)), 2)
    """,
    "multi_transform": """
        rate = lambda path, leaf: "slow" if "down" in jax.tree_util.keystr(path) else "fast"
        labels = jax.tree.map_with_path(rate, state)
        tx = optax.multi_transform({"slow": optax.sgd(0.1), "fast": optax.adam(0.1)}, labels)
    """,
}


@pytest.mark.parametrize(
    "name", ["multi_steps", pytest.param("multi_transform", marks=pytest.mark.full)]
)
def test_state_of_an_optax_optimizer_is_carried_with_the_state_of_a_model(name: str) -> None:
    setup = textwrap.dedent(OPTIMIZERS[name]) + "\nopt_state = tx.init(state)"
    ours = assert_equal(setup, STEP, "state, opt_state")
    assert isinstance(ours["state"]["up"]["kernel"], ours["nnx"].Param)


@pytest.mark.full
def test_lookahead_parameters_with_functional_state_are_carried() -> None:
    setup = """
        tx = optax.lookahead(optax.sgd(0.1, momentum=0.9), 2, 0.5)
        params = optax.LookaheadParams.init_synced(state)
        opt_state = tx.init(params)
    """
    body = """
loss, grads = jax.value_and_grad(loss_of)(params.fast, batch)
updates, opt_state = tx.update(grads, opt_state, params)
params = optax.apply_updates(params, updates)
"""
    assert_equal(setup, body, "params, opt_state")


FIELDS = "state=optax.apply_updates(train.state, updates), opt=opt, step=train.step + 1"


@pytest.mark.parametrize(
    ("kind", "new"),
    [
        pytest.param("Tuple", f"Tuple({FIELDS})", marks=pytest.mark.full),
        pytest.param("Struct", f"train.replace({FIELDS})", marks=pytest.mark.full),
        ("Plain", f"dataclasses.replace(train, {FIELDS})"),
    ],
)
def test_record_with_functional_state_is_carried(kind: str, new: str) -> None:
    setup = f"tx = optax.adam(0.1)\ntrain = {kind}(state, tx.init(state), 0)"
    ours = assert_equal(setup, ALL.format(new), "train.state, train.opt")
    assert int(ours["train"].step) == len(BATCHES)


@pytest.mark.full
def test_fields_of_a_record_with_functional_state_are_assigned() -> None:
    setup = "tx = optax.adam(0.1)\ntrain = Plain(state, tx.init(state), 0)\nold = train"
    body = """
loss, grads = jax.value_and_grad(loss_of)(train.state, batch)
updates, train.opt = tx.update(grads, train.opt, train.state)
train.state = optax.apply_updates(train.state, updates)
"""
    ours = assert_equal(setup, body, "train.state, train.opt")
    assert ours["old"] is ours["train"]


def test_train_state_of_flax_with_functional_state_is_carried() -> None:
    setup = """
        class Training(train_state.TrainState):
            graphdef: Any = flax.struct.field(pytree_node=False)
            rest: Any
        train = Training.create(
            apply_fn=None, graphdef=graphdef, params=state, rest=rest, tx=optax.adam(0.1))
    """
    body = """
def loss_fn(params):
    model = nnx.merge(train.graphdef, params, train.rest, copy=True)
    return (model(batch) ** 2).mean(), nnx.state(model, nnx.Not(nnx.Param))
(loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(train.params)
train = train.apply_gradients(grads=grads, rest=rest)
"""
    ours = assert_equal(setup, body, "train.params, train.opt_state, train.rest")
    assert int(ours["train"].step) == len(BATCHES)


def test_rest_of_a_split_is_carried_or_read() -> None:
    body = """
def loss_fn(state):
    model = nnx.merge(graphdef, state, rest, copy=True)
    loss = (model(batch) ** 2).mean()
    return loss, nnx.split(model, nnx.Param, ...)[2]
(loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(state)
updates, opt_state = tx.update(grads, opt_state)
state = optax.apply_updates(state, updates)
with_rest = nnx.merge(graphdef, teacher[0], rest, copy=True)
loss = loss + teacher[1] * (with_rest(batch) ** 2).mean()
"""
    setup = """
        tx = optax.adam(0.1)
        opt_state = tx.init(state)
        weight = jnp.ones(())
        teacher = state, weight
    """
    ours = assert_equal(setup, body, "state, opt_state, rest, teacher")
    assert ours["teacher"][0]["up"]["kernel"] is ours["net"].up.kernel
    assert float(ours["weight"]) == 1.0  # another name of an array in a tuple with NNX variables


@pytest.mark.parametrize(
    ("name", "get", "new"),
    [
        ("pair", "net, opt = pair", "net, opt"),
        pytest.param(
            *("table", "net, opt = table['net'], table['opt']", '{"net": net, "opt": opt}'),
            marks=pytest.mark.full,
        ),
    ],
    ids=["tuple", "dict"],
)
def test_live_model_is_updated_with_carried_state(name: str, get: str, new: str) -> None:
    """The tuple and the dict of the model are new in each step, and the model is the same."""
    setup = """
        tx = optax.adam(0.1)
        pair = net, tx.init(state)
        table = {"net": net, "opt": tx.init(state)}
    """
    body = f"""
def train_once():
    {get}
    loss, grads = nnx.value_and_grad(lambda model: (model(batch) ** 2).mean())(net)
    updates, opt = tx.update(grads, opt)
    nnx.update(net, optax.apply_updates(nnx.state(net, nnx.Param), updates))
    return loss, ({new})
loss, {name} = train_once()
"""
    first = "pair[0]" if name == "pair" else "table['net']"
    ours = assert_equal(setup, body, f"jax.tree.leaves(nnx.to_pure_dict(nnx.state({name})))")
    assert eval(first, ours) is ours["net"]


def test_item_of_a_container_with_nnx_objects_is_replaced_in_place() -> None:
    setup = """
        tx = optax.adam(0.1)
        table = {"net": net, "state": nnx.clone(state), "opt": tx.init(state)}
        old = table
    """
    body = """
def loss_fn(state):
    return (nnx.merge(graphdef, state, rest, copy=True)(batch) ** 2).mean()
loss, grads = jax.value_and_grad(loss_fn)(table["state"])
updates, table["opt"] = tx.update(grads, table["opt"])
table["state"] = optax.apply_updates(table["state"], updates)
"""
    ours = assert_equal(setup, body, "table['state'], table['opt']")
    assert ours["old"] is ours["table"]
    assert ours["table"]["net"] is ours["net"]


@pytest.mark.parametrize(
    ("setup", "change"),
    [
        pytest.param(
            "teacher = state", "teacher['up']['kernel'][...] *= 2.0", marks=pytest.mark.full
        ),
        ("teacher = {'it': (state, 1)}", "teacher['it'][0]['up']['kernel'][...] *= 2.0"),
        ("teacher = state", "teacher['up']['kernel'][...] *= 2.0\nteacher = state"),
    ],
)
def test_change_of_a_variable_that_carried_state_shares_is_refused(setup: str, change: str) -> None:
    setup = f"tx = optax.sgd(0.1)\nopt_state = tx.init(state)\n{setup}"
    message = (
        r"shares variables with `\w+`, and the step changes them in place: make `\w+` separate"
    )
    with pytest.raises(StepError, match=message):
        in_steps(setup, f"{change}\n{STEP}")


def test_state_that_the_step_separates_from_a_live_model_is_refused() -> None:
    """The first step would see changes of the model in the state, and later steps would not."""
    body = (
        "loss = batch.mean()\nnnx.update(net, state)\nstate = jax.tree.map(jnp.add, state, state)"
    )
    message = r"`state` .* changes from a part of another value \(use nnx.clone in an earlier cell"
    with pytest.raises(StepError, match=message):
        in_steps("", body)
    assert_equal("state = nnx.clone(state)", body, "state, nnx.state(net, nnx.Param)")


def test_object_with_arrays_in_a_tuple_is_refused() -> None:
    setup = "net.pair = nnx.data((jnp.ones(2), jnp.ones(2)))"
    with pytest.raises(StepError, match=r"`net` \(line 2\) contains arrays that nnx.update cannot"):
        in_steps(setup, "loss = net(batch).sum()")
