# framework: jax
# compare: train_losses; val_losses; accs; stopped_at; best_params

# %% [markdown]
# # Softmax regression with early stopping
#
# `has_aux=True` gives us the logits next to the loss. We stop when the validation loss no longer
# gets better.

# %%
import jax
import jax.numpy as jnp
import numpy as np

# %%
np.random.seed(7)
num_classes, dim = 3, 16
centers = 0.6 * np.random.randn(num_classes, dim)


def make_data(n):
    y = np.random.randint(0, num_classes, size=n)
    x = centers[y] + np.random.randn(n, dim)
    return x.astype(np.float32), y


x_train, y_train = make_data(96)
x_val, y_val = make_data(64)

# %% Cut the training set into batches once
batch_size = 16
xs = x_train.reshape(-1, batch_size, dim)
ys = y_train.reshape(-1, batch_size)
print(xs.shape, ys.shape)


# %%
def loss_fn(params, x, y):
    logits = x @ params["W"] + params["b"]
    logp = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(logp, y[:, None], axis=1).mean()
    return nll, logits


params = {
    "W": 0.01 * jax.random.normal(jax.random.PRNGKey(0), (dim, num_classes)),
    "b": jnp.zeros(num_classes),
}

# %% Train
lr = 0.5
patience = 2
min_delta = 1e-3

best_val, best_params, bad_epochs = float("inf"), params, 0
train_losses, val_losses, accs = [], [], []
stopped_at = None

for epoch in range(20):
    epoch_losses, hits = [], 0
    for x, y in zip(xs, ys):
        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x, y)
        params = jax.tree.map(lambda p, g: p - lr * g, params, grads)
        epoch_losses.append(loss)
        hits += int((logits.argmax(-1) == y).sum())
    train_losses.append(np.mean(epoch_losses))
    accs.append(hits / len(x_train))

    val_loss, _ = loss_fn(params, x_val, y_val)
    val_losses.append(float(val_loss))
    print(f"epoch {epoch}: train {train_losses[-1]:.4f} acc {accs[-1]:.2f} val {val_loss:.4f}")

    if val_loss < best_val - min_delta:
        best_val, best_params, bad_epochs = val_loss, params, 0
    else:
        bad_epochs += 1
    if bad_epochs >= patience:
        stopped_at = epoch
        print("no progress, stop")
        break

# %%
_, logits = loss_fn(best_params, x_val, y_val)
print("validation accuracy of the best parameters:", (logits.argmax(-1) == y_val).mean())
