# framework: jax
# compare: loss_history; params; forecast; val_loss

# %% [markdown]
# # A GRU from scratch
#
# `jax.lax.scan` runs the cell over time. The task: predict the next value of a noisy wave.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

# %% Windows of a wave
np.random.seed(0)
T = 24
t = np.arange(152 + T)
wave = np.sin(0.25 * t) + 0.5 * np.sin(0.11 * t) + 0.03 * np.random.randn(len(t))
windows = np.stack([wave[i : i + T + 1] for i in range(152)]).astype("float32")
seq_in, seq_out = windows[:, :-1, None], windows[:, 1:, None]
train_in, val_in = seq_in[:128], seq_in[128:]
train_out, val_out = seq_out[:128], seq_out[128:]
train_in.shape, val_in.shape


# %% The cell
def gru_cell(p, h, x):
    xh = jnp.concatenate([x, h], axis=-1)
    z = jax.nn.sigmoid(xh @ p["Wz"] + p["bz"])
    r = jax.nn.sigmoid(xh @ p["Wr"] + p["br"])
    candidate = jnp.tanh(jnp.concatenate([x, r * h], axis=-1) @ p["Wh"] + p["bh"])
    return (1 - z) * h + z * candidate


def init_gru(rng_key, n_in=1, n_hidden=16, n_out=1):
    kz, kr, kh, ko = jax.random.split(rng_key, 4)
    glorot = jax.nn.initializers.glorot_uniform()
    shape = (n_in + n_hidden, n_hidden)
    return {
        "cell": {
            "Wz": glorot(kz, shape),
            "Wr": glorot(kr, shape),
            "Wh": glorot(kh, shape),
            "bz": jnp.zeros(n_hidden),
            "br": jnp.zeros(n_hidden),
            "bh": jnp.zeros(n_hidden),
        },
        "readout": glorot(ko, (n_hidden, n_out)),
    }


def rnn(params, xs):
    """xs has the shape (batch, time, features)."""
    h0 = jnp.zeros((xs.shape[0], params["readout"].shape[0]))

    def step(h, x):
        h = gru_cell(params["cell"], h, x)
        return h, h @ params["readout"]

    _, ys = jax.lax.scan(step, h0, jnp.swapaxes(xs, 0, 1))
    return jnp.swapaxes(ys, 0, 1)


# %% Loss and update
def loss_fn(params, xs, ys):
    return jnp.mean((rnn(params, xs) - ys) ** 2)


schedule = optax.exponential_decay(1e-2, transition_steps=10, decay_rate=0.9)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


@jax.jit
def update(params, opt_state, xs, ys):
    loss, grads = jax.value_and_grad(loss_fn)(params, xs, ys)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


# %% Training
params = init_gru(jax.random.PRNGKey(42))
opt_state = optimizer.init(params)
batch_size = 32
n_batches = len(train_in) // batch_size

loss_history = []
for _epoch in tqdm(range(10), desc="epochs"):
    order = np.random.permutation(len(train_in))
    running = 0.0
    for b in range(n_batches):
        pick = order[b * batch_size : (b + 1) * batch_size]
        params, opt_state, loss = update(params, opt_state, train_in[pick], train_out[pick])
        running += float(loss)
    loss_history.append(running / n_batches)
print(loss_history)

# %% Validation
val_loss = jax.jit(loss_fn)(params, val_in, val_out)
print(f"validation loss {val_loss:.4f}")


# %% Continue the wave
def continue_wave(params, start, n):
    window = jnp.asarray(start)[None]
    out = []
    for _ in range(n):
        nxt = rnn_jit(params, window)[:, -1:]
        out.append(nxt[0, 0, 0])
        window = jnp.concatenate([window[:, 1:], nxt], axis=1)
    return jnp.stack(out)


rnn_jit = jax.jit(rnn)
forecast = continue_wave(params, val_in[0], 10)
print(forecast)
