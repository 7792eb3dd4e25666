# framework: jax
# compare: trainer.log; trainer.state.params; test_acc; trainer.best

# %% [markdown]
# # A reusable `Trainer`
#
# Hide the loop in a class: it builds the model, compiles the steps, trains, evaluates, and
# remembers the best validation score. We test it on a CNN for tiny pictures.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state


# %%
class SimpleCNN(nn.Module):
    num_classes: int
    c_hidden: int = 8

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.c_hidden, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(4, 4), strides=(4, 4))
        x = x.reshape((x.shape[0], -1))
        return nn.Dense(self.num_classes)(x)


# %%
class DataLoader:
    """Like the loader of another framework, but with arrays only."""

    def __init__(self, images, labels, batch_size, shuffle=False, seed=0):
        self.images, self.labels = images, labels
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return int(np.ceil(len(self.labels) / self.batch_size))

    def __iter__(self):
        order = np.arange(len(self.labels))
        if self.shuffle:
            self.rng.shuffle(order)
        for i in range(len(self)):
            idx = order[i * self.batch_size : (i + 1) * self.batch_size]
            yield self.images[idx], self.labels[idx]


# %%
class Trainer:
    def __init__(self, model, exmp_imgs, lr=1e-2, seed=42):
        self.model = model
        self.seed = seed
        self.lr = lr
        self.log = {"train_loss": [], "train_acc": [], "val_acc": []}
        self.best = 0.0
        self.create_functions()
        self.init_model(exmp_imgs)

    def create_functions(self):
        def calculate_loss(params, batch):
            imgs, labels = batch
            logits = self.model.apply({"params": params}, imgs)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            acc = (logits.argmax(axis=-1) == labels).mean()
            return loss, acc

        def train_step(state, batch):
            (loss, acc), grads = jax.value_and_grad(calculate_loss, has_aux=True)(
                state.params, batch
            )
            return state.apply_gradients(grads=grads), loss, acc

        def eval_step(state, batch):
            return calculate_loss(state.params, batch)[1]

        self.train_step = jax.jit(train_step)
        self.eval_step = jax.jit(eval_step)

    def init_model(self, exmp_imgs):
        variables = jax.jit(self.model.init)(jax.random.PRNGKey(self.seed), exmp_imgs)
        self.state = train_state.TrainState.create(
            apply_fn=self.model.apply,
            params=variables["params"],
            tx=optax.adamw(self.lr, weight_decay=1e-4),
        )

    def train_model(self, train_loader, val_loader, num_epochs):
        for epoch_idx in range(1, num_epochs + 1):
            self.train_epoch(train_loader)
            if epoch_idx % 2 == 0:
                val_acc = self.eval_model(val_loader)
                self.log["val_acc"].append(val_acc)
                self.best = max(self.best, val_acc)
                print(f"epoch {epoch_idx}: val accuracy {val_acc:.3f}")

    def train_epoch(self, loader):
        losses, accs = [], []
        for batch in loader:
            self.state, loss, acc = self.train_step(self.state, batch)
            losses.append(loss)
            accs.append(acc)
        self.log["train_loss"].append(np.stack(jax.device_get(losses)).mean())
        self.log["train_acc"].append(np.stack(jax.device_get(accs)).mean())

    def eval_model(self, loader):
        correct, count = 0.0, 0
        for batch in loader:
            acc = self.eval_step(self.state, batch)
            correct += float(acc) * batch[0].shape[0]
            count += batch[0].shape[0]
        return correct / count


# %% Data: checkerboards, stripes, plain
def textures(n, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, size=n)
    row, col = np.indices((8, 8))
    patterns = np.stack([(row + col) % 2, row % 2, np.full((8, 8), 0.5)])
    images = patterns[labels] + 0.3 * rng.normal(size=(n, 8, 8))
    return jnp.asarray(images[..., None], dtype=jnp.float32), jnp.asarray(labels)


train_loader = DataLoader(*textures(165, 0), batch_size=20, shuffle=True)
val_loader = DataLoader(*textures(60, 1), batch_size=20)
test_loader = DataLoader(*textures(60, 2), batch_size=20)

# %% Run
trainer = Trainer(SimpleCNN(num_classes=3), exmp_imgs=next(iter(val_loader))[0])
trainer.train_model(train_loader, val_loader, num_epochs=6)

# %%
test_acc = trainer.eval_model(test_loader)
print(f"test accuracy {test_acc:.3f}, best validation accuracy {trainer.best:.3f}")
