# framework: tensorflow
# compare: history; weights; after

# %% [markdown]
# # Meta-learning with nested tapes
#
# The outer tape records one inner gradient step, written with explicit weights.

# %%
import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(4)
INNER_LR = 0.05

# %% Tasks
rng = np.random.default_rng(8)


def make_task(points=16):
    amplitude, phase = rng.uniform(0.5, 3.0), rng.uniform(0, np.pi)
    x = rng.uniform(-5, 5, (2, points, 1)).astype("float32")
    y = (amplitude * np.sin(x + phase)).astype("float32")
    return x[0], y[0], x[1], y[1]


# %% Weights as variables
def dense(n, m):
    initial = tf.random.normal((n, m), stddev=n**-0.5, seed=n + m)
    return [tf.Variable(initial), tf.Variable(tf.zeros(m))]


weights = [*dense(1, 16), *dense(16, 16), *dense(16, 1)]


def forward(x, w):
    h = tf.nn.tanh(x @ w[0] + w[1])
    h = tf.nn.tanh(h @ w[2] + w[3])
    return h @ w[4] + w[5]


def mse(x, y, w):
    return tf.reduce_mean(tf.square(forward(x, w) - y))


# %% Meta-training
optimizer = tf.keras.optimizers.Adam(5e-3)
history = []
for iteration in range(40):
    x_support, y_support, x_query, y_query = make_task()
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner_loss = mse(x_support, y_support, weights)
        grads = inner.gradient(inner_loss, weights)
        fast = [w - INNER_LR * g for w, g in zip(weights, grads)]
        meta_loss = mse(x_query, y_query, fast)
    meta_grads = outer.gradient(meta_loss, weights)
    optimizer.apply_gradients(zip(meta_grads, weights))
    history.append(float(meta_loss))
    if iteration % 10 == 0:
        print(iteration, history[-1])

# %% A new task
x_support, y_support, x_query, y_query = make_task()
with tf.GradientTape() as tape:
    loss = mse(x_support, y_support, weights)
fast = [w - INNER_LR * g for w, g in zip(weights, tape.gradient(loss, weights))]
after = [float(mse(x_query, y_query, weights)), float(mse(x_query, y_query, fast))]
print(after)
