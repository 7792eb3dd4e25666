# framework: jax
# compare: losses; accs; val_acc; trainable_variables; model.get_weights()

# %% [markdown]
# # A training loop for a Keras model, written in JAX
#
# With `stateless_call` and `stateless_apply` a Keras model and a Keras optimizer become pure
# functions of their variables. The input comes from `tf.data`.

# %%
import os

# Must be set before Keras is imported.
os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)


# %%
def get_model():
    inputs = keras.Input(shape=(16,), name="digits")
    x1 = keras.layers.Dense(32, activation="relu")(inputs)
    x1 = keras.layers.LayerNormalization()(x1)
    x2 = keras.layers.Dense(32, activation="relu")(x1)
    outputs = keras.layers.Dense(4, name="predictions")(x2)
    return keras.Model(inputs=inputs, outputs=outputs)


model = get_model()

# %% Data
batch_size = 32
rng = np.random.default_rng(0)
prototypes = rng.normal(size=(4, 16))
y_all = rng.integers(0, 4, size=320)
x_all = (prototypes[y_all] + 0.8 * rng.normal(size=(320, 16))).astype("float32")

x_train, y_train = x_all[:256], y_all[:256]
x_val, y_val = x_all[256:], y_all[256:]

train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
train_dataset = train_dataset.shuffle(buffer_size=256, seed=2).batch(batch_size)
val_dataset = tf.data.Dataset.from_tensor_slices((x_val, y_val)).batch(batch_size)

# %%
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(learning_rate=5e-3)
train_acc_metric = keras.metrics.SparseCategoricalAccuracy()
val_acc_metric = keras.metrics.SparseCategoricalAccuracy()


# %%
def compute_loss_and_updates(trainable_variables, non_trainable_variables, metric_variables, x, y):
    y_pred, non_trainable_variables = model.stateless_call(
        trainable_variables, non_trainable_variables, x
    )
    loss = loss_fn(y, y_pred)
    metric_variables = train_acc_metric.stateless_update_state(metric_variables, y, y_pred)
    return loss, (non_trainable_variables, metric_variables)


grad_fn = jax.value_and_grad(compute_loss_and_updates, has_aux=True)


@jax.jit
def train_step(state, data):
    trainable_variables, non_trainable_variables, optimizer_variables, metric_variables = state
    x, y = data
    (loss, (non_trainable_variables, metric_variables)), grads = grad_fn(
        trainable_variables, non_trainable_variables, metric_variables, x, y
    )
    trainable_variables, optimizer_variables = optimizer.stateless_apply(
        optimizer_variables, grads, trainable_variables
    )
    return loss, (
        trainable_variables,
        non_trainable_variables,
        optimizer_variables,
        metric_variables,
    )


@jax.jit
def eval_step(state, data):
    trainable_variables, non_trainable_variables, metric_variables = state
    x, y = data
    y_pred, non_trainable_variables = model.stateless_call(
        trainable_variables, non_trainable_variables, x
    )
    metric_variables = val_acc_metric.stateless_update_state(metric_variables, y, y_pred)
    return trainable_variables, non_trainable_variables, metric_variables


# %% Build the optimizer variables, then train
optimizer.build(model.trainable_variables)

trainable_variables = [v.value for v in model.trainable_variables]
non_trainable_variables = [v.value for v in model.non_trainable_variables]
optimizer_variables = [v.value for v in optimizer.variables]
metric_variables = [v.value for v in train_acc_metric.variables]
state = trainable_variables, non_trainable_variables, optimizer_variables, metric_variables

losses, accs = [], []
for epoch in range(3):
    for step, (x, y) in enumerate(train_dataset):
        loss, state = train_step(state, (x.numpy(), y.numpy()))
        losses.append(float(loss))
        if step % 4 == 0:
            print(f"Training loss (for 1 batch) at step {step}: {float(loss):.4f}")
    _, _, _, metric_variables = state
    for variable, value in zip(train_acc_metric.variables, metric_variables):
        variable.assign(value)
    accs.append(float(train_acc_metric.result()))
    print(f"Training accuracy up to epoch {epoch}: {accs[-1]:.4f}")

# %% Evaluation loop
trainable_variables, non_trainable_variables, _, _ = state
eval_state = (
    trainable_variables,
    non_trainable_variables,
    [v.value for v in val_acc_metric.variables],
)
for data in val_dataset.as_numpy_iterator():
    eval_state = eval_step(eval_state, data)
for variable, value in zip(val_acc_metric.variables, eval_state[2]):
    variable.assign(value)
val_acc = float(val_acc_metric.result())
print(f"Validation accuracy: {val_acc:.4f}")

# %% Write the result back into the model
for variable, value in zip(model.trainable_variables, trainable_variables):
    variable.assign(value)
