# framework: jax
# compare: losses; eval_loss; state.params; text; state.step

# %% [markdown]
# # A tiny character model
#
# A decoder with one block, written in Linen, trained with `TrainState`. Dropout is set to zero
# because the model is so small.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

# %% The "book"
book = "the cat sat on the mat. the dog sat on the log. a bird is in the tree. " * 12
chars = sorted(set(book))
stoi = {ch: i for i, ch in enumerate(chars)}
itos = dict(enumerate(chars))
data = jnp.array([stoi[ch] for ch in book], dtype=jnp.int32)
split = int(0.9 * len(data))
train_data, val_data = data[:split], data[split:]
print(len(data), "characters,", len(chars), "different")

# %% Settings
block_size = 16
batch_size = 16
n_embd = 32
n_head = 2
n_layer = 1
dropout = 0.0
max_iters = 40


# %%
@jax.jit
def get_batch(key, source):
    ix = jax.random.randint(key, (batch_size,), 0, len(source) - block_size - 1)
    offsets = ix[:, None] + jnp.arange(block_size)
    return source[offsets], source[offsets + 1]


xb, yb = get_batch(jax.random.key(0), train_data)
print(repr("".join(itos[int(i)] for i in xb[0])))


# %% The model
class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask, *, training):
        h = nn.LayerNorm()(x)
        h = nn.MultiHeadDotProductAttention(
            num_heads=n_head, use_bias=False, dropout_rate=dropout, deterministic=not training
        )(h, h, mask=mask)
        x = x + h
        h = nn.LayerNorm()(x)
        h = nn.Dense(4 * n_embd)(h)
        h = nn.Dense(n_embd)(nn.relu(h))
        return x + nn.Dropout(dropout, deterministic=not training)(h)


class GPT(nn.Module):
    vocab: int

    @nn.compact
    def __call__(self, tokens, *, training=False):
        _, t = tokens.shape
        x = nn.Embed(self.vocab, n_embd)(tokens)
        x = x + nn.Embed(block_size, n_embd)(jnp.arange(t))
        mask = nn.make_causal_mask(tokens)
        for _ in range(n_layer):
            x = Block()(x, mask, training=training)
        return nn.Dense(self.vocab)(x)


model = GPT(vocab=len(chars))
variables = jax.jit(model.init)(jax.random.key(1), xb)
n_params = sum(p.size for p in jax.tree.leaves(variables))
print(f"{n_params:,} parameters")

# %%
state = TrainState.create(
    apply_fn=model.apply,
    params=variables["params"],
    tx=optax.adamw(3e-3),
)


@jax.jit
def train_step(state, x, y, dropout_key):
    dropout_key = jax.random.fold_in(dropout_key, state.step)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, x, training=True, rngs={"dropout": dropout_key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def eval_step(state, x, y):
    logits = state.apply_fn({"params": state.params}, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


# %% Train
key = jax.random.key(1337)
dropout_key = jax.random.key(2)
losses = []
for it in range(max_iters):
    key, subkey = jax.random.split(key)
    xb, yb = get_batch(subkey, train_data)
    state, loss = train_step(state, xb, yb, dropout_key)
    losses.append(loss.item())
    if it % 10 == 0 or it == max_iters - 1:
        print(f"iter {it}: loss {loss:.3f}")

# %% Evaluate
eval_loss = np.mean(
    [eval_step(state, *get_batch(jax.random.key(100 + i), val_data)) for i in range(4)]
)
print("validation loss", eval_loss)

# %% Write some text (greedy)
jitted_apply = jax.jit(model.apply)
context = [stoi[ch] for ch in "the cat sat on t"]
for _ in range(12):
    window = jnp.array([context[-block_size:]])
    logits = jitted_apply({"params": state.params}, window)
    context.append(int(logits[0, -1].argmax()))
text = context
print("".join(itos[i] for i in text))
