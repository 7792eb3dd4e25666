"""Eight models as users write them for one device: small, but with realistic structure.

The CNN has a second version with a grouped convolution.
"""

from __future__ import annotations

import textwrap
from typing import NamedTuple

BATCH, STEPS = 16, 6


class Program(NamedTuple):
    """A training whose set-up cell creates `train`, with `BATCH * STEPS` rows, and carried values.

    Attributes:
        setup: set-up cell. Run it again to restart the training.
        step: step cell that assigns `loss`.
        given: names that the step takes in addition to `batch`.
        left: the names among them that the step assigns.
        jit: decorator that compiles the step.
    """

    setup: str
    step: str
    given: str
    left: str
    jit: str = "jax.jit"

    @property
    def plain(self) -> str:
        """Return the training as a one-device program that assigns `losses`."""
        lines = [
            self.setup,
            f"@{self.jit}",
            f"def train_step({self.given}, batch):",
            textwrap.indent(self.step, "    "),
            f"    return loss, ({self.left})",
            "losses = []",
            f"for start in range(0, {BATCH * STEPS}, {BATCH}):",
            f"    batch = jax.tree.map(lambda array: array[start:start + {BATCH}], train)",
            f"    loss, ({self.left}) = train_step({self.given}, batch)",
            "    losses.append(float(loss))",
        ]
        return "\n".join(lines)


def _text(source: str) -> str:
    return textwrap.dedent(source)


_SETUP = _text(f"""
    import jax, jax.numpy as jnp, numpy as np, optax
    ROWS = {BATCH * STEPS}
    rng = np.random.default_rng(0)
    def normal(*shape, scale=None):
        scale = shape[-2] ** -0.5 if scale is None else scale
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)
""")

_UPDATE = _text("""
    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
""")

_TOKENS = _text("""
    tokens = rng.integers(0, VOCABULARY, (ROWS, LENGTH + 1))
    train = tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
""")

MLP = Program(
    setup=_SETUP
    + _text("""
    params = dict(
        w1=normal(32, 128), b1=jnp.zeros(128), w2=normal(128, 64), b2=jnp.zeros(64),
        w3=normal(64, 16), b3=jnp.zeros(16),
    )
    velocity = jax.tree.map(jnp.zeros_like, params)
    train = np.float32(rng.normal(size=(ROWS, 32))), np.float32(rng.normal(size=(ROWS, 16)))
    """),
    step=_text("""
    x, y = batch
    def loss_of(p):
        h = jax.nn.relu(x @ p["w1"] + p["b1"])
        h = jnp.tanh(h @ p["w2"] + p["b2"])
        return jnp.mean((h @ p["w3"] + p["b3"] - y) ** 2)
    loss, grads = jax.value_and_grad(loss_of)(params)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - 0.05 * v, params, velocity)
    """),
    given="params, velocity",
    left="params, velocity",
)

CNN = Program(
    setup=_SETUP
    + _text("""
    from flax import nnx
    GROUPS = 1

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Conv(3, 16, (3, 3), rngs=rngs)
            self.norm = nnx.GroupNorm(16, num_groups=4, rngs=rngs)
            self.middle = nnx.Conv(16, 16, (3, 3), feature_group_count=GROUPS, rngs=rngs)
            self.second = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
            self.layer_norm = nnx.LayerNorm(32, rngs=rngs)
            self.hidden = nnx.Linear(128, 64, rngs=rngs)
            self.last = nnx.Linear(64, 16, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.first(x)))
            x = nnx.max_pool(x + self.middle(x), (2, 2), strides=(2, 2))
            x = nnx.relu(self.layer_norm(self.second(x)))
            x = nnx.avg_pool(x, (2, 2), strides=(1, 1))
            x = x[:, :2, :2].reshape(x.shape[0], -1)
            return self.last(nnx.relu(self.hidden(x)))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    images = np.float32(rng.normal(size=(ROWS, 12, 12, 3)))
    train = images, rng.integers(0, 16, ROWS).astype(np.int32)
    """),
    step=_text("""
    x, y = batch
    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    """),
    given="model, optimizer",
    left="",
    jit="nnx.jit",
)

DEPTHWISE = CNN._replace(setup=CNN.setup.replace("GROUPS = 1", "GROUPS = 16"))

TRANSFORMER = Program(
    setup=_SETUP
    + _text("""
    LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 2, 32, 8, 16, 64
    def layer():
        return dict(
            norm1=jnp.ones(WIDTH), norm2=jnp.ones(WIDTH),
            q=normal(WIDTH, WIDTH), k=normal(WIDTH, WIDTH), v=normal(WIDTH, WIDTH),
            o=normal(WIDTH, WIDTH), up=normal(WIDTH, 4 * WIDTH), up_bias=jnp.zeros(4 * WIDTH),
            down=normal(4 * WIDTH, WIDTH), down_bias=jnp.zeros(WIDTH),
        )
    params = dict(
        embedding=normal(VOCABULARY, WIDTH, scale=0.1), positions=normal(LENGTH, WIDTH, scale=0.1),
        layers=[layer() for _ in range(LAYERS)], norm=jnp.ones(WIDTH),
        head=normal(WIDTH, VOCABULARY),
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = tx.init(params)
    """)
    + _TOKENS
    + _text("""
    def normed(x, scale):
        x = x - x.mean(-1, keepdims=True)
        return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def attention(p, x):
        def heads(y):
            return y.reshape(*y.shape[:-1], HEADS, WIDTH // HEADS)
        q, k, v = heads(x @ p["q"]), heads(x @ p["k"]), heads(x @ p["v"])
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
        scores = jnp.where(mask, scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return mixed.reshape(x.shape) @ p["o"]

    def forward(p, tokens):
        x = p["embedding"][tokens] + p["positions"]
        for own in p["layers"]:
            x = x + attention(own, normed(x, own["norm1"]))
            h = jax.nn.gelu(normed(x, own["norm2"]) @ own["up"] + own["up_bias"])
            x = x + h @ own["down"] + own["down_bias"]
        return normed(x, p["norm"]) @ p["head"]
    """),
    step=_text("""
    x, y = batch
    def loss_of(p):
        return optax.softmax_cross_entropy_with_integer_labels(forward(p, x), y).mean()
    """)
    + _UPDATE,
    given="params, state",
    left="params, state",
)

TIED = Program(
    setup=_SETUP
    + _text("""
    LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 4, 32, 8, 16, 64
    params = dict(
        embedding=normal(VOCABULARY, WIDTH, scale=0.1),
        layers=dict(
            norm1=jnp.ones((LAYERS, WIDTH)), norm2=jnp.ones((LAYERS, WIDTH)),
            qkv=normal(LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS, scale=WIDTH**-0.5),
            o=normal(LAYERS, HEADS, WIDTH // HEADS, WIDTH, scale=WIDTH**-0.5),
            gate=normal(LAYERS, WIDTH, 64), up=normal(LAYERS, WIDTH, 64),
            down=normal(LAYERS, 64, WIDTH),
        ),
        norm=jnp.ones(WIDTH),
    )
    tx = optax.sgd(optax.warmup_constant_schedule(0.1, 0.5, 3), momentum=0.9)
    state = tx.init(params)
    """)
    + _TOKENS
    + _text("""
    angles = jnp.arange(LENGTH)[:, None] / 100 ** (jnp.arange(WIDTH // HEADS // 2) * HEADS / WIDTH)

    def normed(x, scale):
        return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def turned(x):
        a, b = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    @jax.checkpoint
    def block(x, p):
        qkv = jnp.einsum("btw,wchd->cbthd", normed(x, p["norm1"]), p["qkv"])
        q, k, v = turned(qkv[0]), turned(qkv[1]), qkv[2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + jnp.einsum("bqhd,hdw->bqw", mixed, p["o"])
        y = normed(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def forward(p, tokens):
        x = jnp.take(p["embedding"], tokens, axis=0)
        x, _ = jax.lax.scan(block, x, p["layers"])
        return normed(x, p["norm"]) @ p["embedding"].T
    """),
    step=_text("""
    x, y = batch
    def loss_of(p):
        logits = jax.nn.log_softmax(forward(p, x))
        return -jnp.take_along_axis(logits, y[..., None], axis=-1).mean()
    """)
    + _UPDATE,
    given="params, state",
    left="params, state",
)

EXPERTS = Program(
    setup=_SETUP
    + _text("""
    WIDTH, HIDDEN, EXPERTS, CHOSEN, LENGTH, VOCABULARY = 32, 64, 8, 2, 8, 64
    ROOM = 2 * CHOSEN * LENGTH // EXPERTS
    params = dict(
        embedding=normal(VOCABULARY, WIDTH, scale=0.3), router=normal(WIDTH, EXPERTS),
        up=normal(EXPERTS, WIDTH, HIDDEN), down=normal(EXPERTS, HIDDEN, WIDTH),
        head=normal(WIDTH, VOCABULARY),
    )
    tx = optax.adam(1e-3)
    state = tx.init(params)
    """)
    + _TOKENS
    + _text("""
    def routed(p, x):
        chances = jax.nn.softmax(x @ p["router"])
        best, which = jax.lax.top_k(chances, CHOSEN)
        picked = jax.nn.one_hot(which, EXPERTS)  # rows, tokens, choice, expert
        inline = picked.astype(jnp.int32).reshape(x.shape[0], -1, EXPERTS)
        place = (jnp.cumsum(inline, axis=1) - inline).reshape(picked.shape)
        slots = picked[..., None] * jax.nn.one_hot(place, ROOM)  # zero if there is no room
        sent = slots.sum(2)
        share = picked.mean((0, 1, 2)) * chances.mean((0, 1)) * EXPERTS
        return sent, (slots * best[..., None, None]).sum(2), share.sum()

    def forward(p, tokens):
        x = p["embedding"][tokens]
        sent, weights, balance = routed(p, x)
        own = jnp.einsum("btec,btw->ebcw", sent, x)
        own = jax.nn.relu(jnp.einsum("ebcw,ewh->ebch", own, p["up"]))
        own = jnp.einsum("ebch,ehw->ebcw", own, p["down"])
        x = x + jnp.einsum("btec,ebcw->btw", weights, own)
        return x @ p["head"], balance
    """),
    step=_text("""
    x, y = batch
    def loss_of(p):
        logits, balance = forward(p, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean() + 0.01 * balance
    """)
    + _UPDATE,
    given="params, state",
    left="params, state",
)

LSTM = Program(
    setup=_SETUP
    + _text("""
    import equinox as eqx
    LENGTH, VOCABULARY = 8, 64

    class Net(eqx.Module):
        embedding: eqx.nn.Embedding
        cell: eqx.nn.LSTMCell
        last: eqx.nn.Linear

        def __init__(self, key):
            one, two, three = jax.random.split(key, 3)
            self.embedding = eqx.nn.Embedding(VOCABULARY, 32, key=one)
            self.cell = eqx.nn.LSTMCell(32, 32, key=two)
            self.last = eqx.nn.Linear(32, VOCABULARY, key=three)

        def __call__(self, tokens):
            def later(carry, x):
                carry = self.cell(x, carry)
                return carry, carry[0]
            start = jnp.zeros(32), jnp.zeros(32)
            _, hidden = jax.lax.scan(later, start, jax.vmap(self.embedding)(tokens))
            return jax.vmap(self.last)(hidden)

    model = Net(jax.random.key(0))
    tx = optax.rmsprop(1e-3)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    """)
    + _TOKENS,
    step=_text("""
    x, y = batch
    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()
    loss, grads = eqx.filter_value_and_grad(loss_of)(model)
    updates, state = tx.update(grads, state)
    model = eqx.apply_updates(model, updates)
    """),
    given="model, state",
    left="model, state",
    jit="eqx.filter_jit",
)

RECOMMENDER = Program(
    setup=_SETUP
    + _text("""
    USERS, ITEMS, WIDTH, BASKET = 8192, 1024, 16, 4
    params = dict(
        users=normal(USERS, WIDTH, scale=0.1), items=normal(ITEMS, WIDTH, scale=0.1),
        bias=jnp.zeros(ITEMS), w1=normal(2 * WIDTH + 8, 64), w2=normal(64, 32), w3=normal(32, 1),
    )
    tx = optax.adagrad(0.05)
    state = tx.init(params)
    train = dict(
        user=rng.integers(0, USERS, ROWS).astype(np.int32),
        basket=rng.integers(0, ITEMS, (ROWS, BASKET)).astype(np.int32),
        numbers=np.float32(rng.normal(size=(ROWS, 8))),
        clicked=np.float32(rng.integers(0, 2, ROWS)),
    )
    """),
    step=_text("""
    def loss_of(p):
        bought = p["items"][batch["basket"]].mean(1)
        x = jnp.concatenate([p["users"][batch["user"]], bought, batch["numbers"]], axis=1)
        x = jax.nn.relu(jax.nn.relu(x @ p["w1"]) @ p["w2"])
        logits = (x @ p["w3"])[:, 0] + p["bias"][batch["basket"]].sum(1)
        return optax.sigmoid_binary_cross_entropy(logits, batch["clicked"]).mean()
    """)
    + _UPDATE,
    given="params, state",
    left="params, state",
)

UNET = Program(
    setup=_SETUP
    + _text("""
    def conv(inside, outside, size=3):
        scale = (size * size * inside) ** -0.5
        return normal(size, size, inside, outside, scale=scale), jnp.zeros(outside)
    params = dict(
        inlet=conv(1, 16), down1=conv(16, 32), down2=conv(32, 64), middle=conv(64, 64),
        up2=conv(64, 32, 2), join2=conv(64, 32), up1=conv(32, 16, 2), join1=conv(32, 16),
        outlet=conv(16, 1, 1),
    )
    tx = optax.sgd(0.05, momentum=0.9, nesterov=True)
    state = tx.init(params)
    images = np.float32(rng.normal(size=(ROWS, 8, 8, 1)))
    train = images, np.float32(images.mean((1, 2), keepdims=True) > images)

    LAYOUT = "NHWC", "HWIO", "NHWC"
    def convolved(x, p, stride=1):
        kernel, bias = p
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=LAYOUT) + bias
    def grown(x, p):
        return jax.lax.conv_transpose(x, p[0], (2, 2), "SAME", dimension_numbers=LAYOUT) + p[1]
    def joined(low, skip, up, join, p):
        low = jax.nn.silu(grown(low, p[up]))
        return jax.nn.silu(convolved(jnp.concatenate([low, skip], axis=-1), p[join]))

    def forward(p, x):
        top = jax.nn.silu(convolved(x, p["inlet"]))
        half = jax.nn.silu(convolved(top, p["down1"], 2))
        low = jax.nn.silu(convolved(half, p["down2"], 2))
        low = jax.nn.silu(convolved(low, p["middle"]))
        half = joined(low, half, "up2", "join2", p)
        return convolved(joined(half, top, "up1", "join1", p), p["outlet"])
    """),
    step=_text("""
    x, y = batch
    def loss_of(p):
        return optax.sigmoid_binary_cross_entropy(forward(p, x), y).mean()
    """)
    + _UPDATE,
    given="params, state",
    left="params, state",
)

PROGRAMS = {
    "MLP": MLP,
    "CNN": CNN,
    "depthwise CNN": DEPTHWISE,
    "transformer": TRANSFORMER,
    "tied transformer": TIED,
    "experts": EXPERTS,
    "LSTM": LSTM,
    "recommender": RECOMMENDER,
    "U-Net": UNET,
}
