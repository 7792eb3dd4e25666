# framework: tensorflow
# compare: train_losses; val_losses; model.get_weights(); test_loss; best_epoch

# %% [markdown]
# # Early stopping without callbacks
#
# A custom loop with a validation pass after each epoch. It stops when the validation loss does
# not improve, and the best weights are restored.

# %%
import numpy as np
import tensorflow as tf
from tensorflow.keras.layers import Dense
from tensorflow.keras.losses import Huber
from tensorflow.keras.optimizers import Adam

tf.keras.utils.set_random_seed(77)

# %% Few noisy samples, so the model overfits
rng = np.random.default_rng(77)
x = rng.uniform(-2, 2, size=(164, 1)).astype("float32")
y = (np.sin(2 * x) + 0.6 * rng.normal(size=x.shape)).astype("float32")

x_train, x_val, x_test = x[:100], x[100:132], x[132:]
y_train, y_val, y_test = y[:100], y[100:132], y[132:]

train_ds = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(16)
val_ds = tf.data.Dataset.from_tensor_slices((x_val, y_val)).batch(16)


# %%
class Net(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.d1 = Dense(32, activation="tanh")
        self.d2 = Dense(32, activation="tanh")
        self.out = Dense(1)

    def call(self, x):
        return self.out(self.d2(self.d1(x)))


model = Net()
loss_object = Huber()
schedule = tf.keras.optimizers.schedules.CosineDecay(0.02, decay_steps=140, alpha=0.05)
optimizer = Adam(schedule)

train_loss = tf.keras.metrics.Mean(name="train_loss")
val_loss = tf.keras.metrics.Mean(name="val_loss")


# %%
@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        predictions = model(x, training=True)
        loss = loss_object(y, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_loss(loss)


@tf.function
def val_step(x, y):
    predictions = model(x, training=False)
    val_loss(loss_object(y, predictions))


# %%
EPOCHS = 20
patience = 2
wait = 0
best = float("inf")
best_epoch = -1
best_weights = None
train_losses, val_losses = [], []

for epoch in range(EPOCHS):
    train_loss.reset_state()
    val_loss.reset_state()

    for xb, yb in train_ds:
        train_step(xb, yb)

    for xb, yb in val_ds:
        val_step(xb, yb)

    train_losses.append(train_loss.result().numpy())
    val_losses.append(val_loss.result().numpy())
    print(f"Epoch {epoch + 1}, Loss: {train_losses[-1]:.4f}, Val Loss: {val_losses[-1]:.4f}")

    if val_losses[-1] < best - 1e-3:
        best = val_losses[-1]
        best_epoch = epoch
        best_weights = model.get_weights()
        wait = 0
    else:
        wait += 1
        if wait >= patience:
            print("Early stopping, best epoch was", best_epoch + 1)
            break

# %%
model.set_weights(best_weights)
test_loss = float(loss_object(y_test, model(x_test)))
test_loss
