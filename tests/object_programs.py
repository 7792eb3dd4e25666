"""Steps that keep their state in Python objects, as JAX tutorials do."""

from __future__ import annotations

import textwrap

from tests.references import Training

SETUP = textwrap.dedent("""
    import collections, dataclasses, functools, types
    import jax, jax.numpy as jnp, numpy as np, optax
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    train = rng.normal(size=(48, 3)), rng.normal(size=48)

    def start():
        return {"w": jnp.full(3, 0.1), "b": jnp.zeros(())}

    def loss_of(params, batch):
        x, y = batch
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    def descend(params, batch, rate=0.1):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return loss, jax.tree.map(lambda p, g: p - rate * g, params, grads)

    def plain(tree):
        return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(tree)]
""")

TRAINER = """
class Trainer:
    steps_of_all = 0
    def __init__(self, rate=0.1):
        self.tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
        self.params = start()
        self.opt_state = self.tx.init(self.params)
        self.steps, self.total, self.ema = 0, [0.0], start()
        self.history = {"loss": jnp.zeros(()), "steps": 0}
    @functools.partial(jax.jit, static_argnums=0)
    def gradients(self, params, batch):
        return jax.value_and_grad(loss_of)(params, batch)
    def step(self, batch):
        loss, grads = self.gradients(self.params, batch)
        updates, self.opt_state = self.tx.update(grads, self.opt_state, self.params)
        previous, self.params = self.params, optax.apply_updates(self.params, updates)
        self.ema = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, self.ema, previous)
        self.steps += 1
        self.total[0] = self.total[0] + loss
        self.history["loss"] += loss
        self.history["steps"] += 1
        Trainer.steps_of_all = Trainer.steps_of_all + 1
        return loss
trainer = Trainer()
alias = {"trainer": trainer}
"""
TRAINER_AFTER = (
    "[plain(trainer.params), plain(trainer.ema), plain(trainer.opt_state), trainer.steps, "
    "float(trainer.total[0]), plain(trainer.history), Trainer.steps_of_all]"
)

STATES = """
@dataclasses.dataclass(frozen=True)
class Frozen:
    params: dict
    velocity: dict
    step: int = 0
@dataclasses.dataclass
class Inner:
    params: dict
    step: int = 0
class Outer:
    def __init__(self):
        self.state = Inner(start())
    def step(self, batch):
        loss, self.state.params = descend(self.state.params, batch)
        self.state.step += 1
        return loss
    def renew(self, batch):
        loss, params = descend(self.state.params, batch)
        self.state = dataclasses.replace(self.state, params=params, step=self.state.step + 1)
        return loss
    def chained(self, batch):
        self.step(batch)
        return self
frozen, outer, renewed, chained = Frozen(start(), start()), Outer(), Outer(), Outer()
inner = outer.state
space = types.SimpleNamespace(params=start(), nested=types.SimpleNamespace(count=jnp.zeros(())))
"""
STATES_STEP = """
first, params = descend(frozen.params, batch)
velocity = jax.tree.map(lambda v, p: 0.9 * v + p, frozen.velocity, params)
frozen = dataclasses.replace(frozen, params=params, velocity=velocity, step=frozen.step + 1)
second = outer.step(batch)
second = second + inner.params["w"].sum()
third = renewed.renew(batch)
chained = chained.chained(batch)
fourth, space.params = descend(space.params, batch, rate=0.01)
space.nested.count = space.nested.count + 1
loss = first + second + third + fourth
"""
STATES_AFTER = (
    "[plain(frozen.params), plain(frozen.velocity), frozen.step, plain(outer.state.params), "
    "outer.state is inner, inner.step, plain(renewed.state.params), renewed.state.step, "
    "plain(chained.state.params), plain(space.params), float(space.nested.count)]"
)

ITEMS = """
class Slotted:
    __slots__ = ("_params", "count")
    def __init__(self):
        self._params, self.count = start(), jnp.zeros((), jnp.int32)
    @property
    def params(self):
        return self._params
    @params.setter
    def params(self, value):
        self._params = value
def maker():
    params, calls = start(), 0
    def step(batch):
        nonlocal params, calls
        loss, params = descend(params, batch)
        calls += 1
        return loss
    def read():
        return params, calls
    return step, read
def globally(batch):
    global everywhere
    loss, everywhere = descend(everywhere, batch)
    return loss
store = {"params": start(), "table": np.arange(3.0), "deep": [{"w": jnp.ones(2)}]}
stats, window = [jnp.zeros(()), jnp.ones(3)], collections.deque([0.0, 0.0], maxlen=2)
pair = ({"count": jnp.zeros(())}, 3)
numbers = types.SimpleNamespace(array=np.zeros(2), pair=(jnp.zeros(2), 0), kind="train")
users = collections.UserDict(w=jnp.ones(2))
slotted, everywhere, swapped = Slotted(), start(), [jnp.ones(2), jnp.zeros(2)]
(step_inside, read_inside), same_store = maker(), store
"""
ITEMS_STEP = """
loss, store["params"] = descend(store["params"], batch)
store["deep"][0]["w"] = store["deep"][0]["w"] * 0.5 + same_store["table"][:2]
stats[0] = stats[0] + loss
window[1] = window[1] + loss
pair[0]["count"] = pair[0]["count"] + pair[1]
second, slotted.params = descend(slotted.params, batch)
slotted.count = slotted.count + 1
third = step_inside(batch) + globally(batch)
third = third + everywhere["w"].sum()
swapped[0], swapped[1] = swapped[1] + loss, swapped[0]
numbers.array += 1
numbers.pair, numbers.kind = (numbers.pair[0] + loss, numbers.pair[1] + 1), "eval"
users["w"], numbers.kind = users["w"] * 0.5 + numbers.array, "train"
loss = loss + second + third
"""
ITEMS_AFTER = (
    "[plain(store), same_store is store, plain(stats), plain(list(window)), plain(pair), "
    "plain(slotted.params), int(slotted.count), plain(read_inside()[0]), read_inside()[1], "
    "plain(everywhere), plain(swapped), plain(numbers.array), plain(numbers.pair), "
    "plain(users['w'])]"
)


def training(setup: str, step: str, after: str) -> Training:
    return Training(setup=SETUP + setup, step=step, after=after, epochs=3, batch=20)


TRAININGS = {
    "trainer": training(TRAINER, "loss = alias['trainer'].step(batch)", TRAINER_AFTER),
    "states": training(STATES, STATES_STEP, STATES_AFTER),
    "items": training(ITEMS, ITEMS_STEP, ITEMS_AFTER),
}

CLASSIC = """
import equinox as eqx
from flax import linen as nn
from flax.training import train_state
class Network(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        x = nn.relu(nn.Dense(8, param_dtype=jnp.float64)(x))
        x = nn.Dropout(0.25, deterministic=not training)(x)
        return nn.Dense(1, param_dtype=jnp.float64)(x)[:, 0]
class ClassicTrainer:
    def __init__(self, seed=0):
        self.model, self.key = Network(), jax.random.key(seed)
        self.key, init = jax.random.split(self.key)
        params = self.model.init(init, train[0][:1], training=False)["params"]
        schedule = optax.cosine_decay_schedule(1e-2, 10)
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
        self.state = train_state.TrainState.create(
            apply_fn=self.model.apply, params=params, tx=tx)
        self.metrics = {"loss": 0.0, "count": 0}
        self.log = []
    @functools.partial(jax.jit, static_argnums=0)
    def update(self, state, key, batch):
        x, y = batch
        def loss_fn(params):
            drawn = state.apply_fn({"params": params}, x, training=True, rngs={"dropout": key})
            return jnp.mean((drawn - y) ** 2)
        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss
    def train_step(self, batch):
        self.key, key = jax.random.split(self.key)
        self.state, loss = self.update(self.state, key, batch)
        self.metrics["loss"] += loss * len(batch[1])
        self.metrics["count"] += len(batch[1])
        jax.debug.callback(lambda loss: self.log.append(float(loss)), loss, ordered=True)
        return loss
class Module(eqx.Module):
    weight: jax.Array
    name: str = eqx.field(static=True)
    def __call__(self, x):
        return x @ self.weight
class Layered:
    class Layer:
        def __init__(self, size):
            self.w, self.calls = jnp.full((size, size), 0.1), 0
        def __call__(self, x):
            self.calls += 1
            return jnp.tanh(x @ self.w)
    def __init__(self):
        self.layers = [self.Layer(3), self.Layer(3)]
        self.head = Module(jnp.ones(3), "head")
        self.best = float("inf")
    def train(self, batch):
        x, y = batch
        params = [layer.w for layer in self.layers]
        def loss_fn(params, head):
            for w in params:
                hidden = jnp.tanh(x @ w)
            return jnp.mean((head(hidden) - y) ** 2)
        loss, (grads, head) = jax.value_and_grad(loss_fn, argnums=(0, 1))(params, self.head)
        for layer, g in zip(self.layers, grads):
            layer.w -= 0.1 * g
            layer.calls += 1
        self.head = eqx.apply_updates(self.head, jax.tree.map(lambda g: -0.1 * g, head))
        self.best = jnp.minimum(self.best, loss)
        return loss
classic, layered, history = ClassicTrainer(), Layered(), {"loss": []}
"""
CLASSIC_STEP = """
first, second = classic.train_step(batch), layered.train(batch)
loss = first + second
jax.debug.callback(lambda value: history["loss"].append(round(float(value), 9)), loss)
"""
CLASSIC_AFTER = (
    "jax.effects_barrier() or [plain(classic.state.params), int(classic.state.step), classic.log, "
    "plain(jax.random.key_data(classic.key)), plain(classic.metrics), history['loss'], "
    "[plain(layer.w) for layer in layered.layers], [layer.calls for layer in layered.layers], "
    "plain(layered.head), float(layered.best)]"
)
TRAININGS["classic"] = training(CLASSIC, CLASSIC_STEP, CLASSIC_AFTER)
