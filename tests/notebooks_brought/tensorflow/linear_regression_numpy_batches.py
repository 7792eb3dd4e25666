# framework: tensorflow
# compare: w.numpy(); b.numpy(); epoch_loss; predict(X[:7]).numpy()

# %% [markdown]
# # Linear regression from scratch
#
# No Keras: two variables, a loss, a tape, and gradient descent by hand.

# %%
import numpy as np
import tensorflow as tf

# %%
np.random.seed(0)
tf.random.set_seed(0)

num_examples = 250
X = np.random.normal(size=(num_examples, 3)).astype(np.float32)
true_w = np.array([[2.0], [-3.4], [0.7]], dtype=np.float32)
true_b = 4.2
y = X @ true_w + true_b + 0.01 * np.random.normal(size=(num_examples, 1))
y = y.astype(np.float32)

# %% Initialize parameters
w = tf.Variable(tf.random.normal(shape=(3, 1), mean=0, stddev=0.01), trainable=True)
b = tf.Variable(tf.zeros(1), trainable=True)


# %%
def predict(x):
    return tf.matmul(x, w) + b


def squared_loss(y_hat, y):
    return tf.reduce_mean(tf.square(y_hat - y)) / 2


def sgd(params, grads, lr):
    """Minibatch stochastic gradient descent."""
    for param, grad in zip(params, grads):
        param.assign_sub(lr * grad)


# %%
lr = 0.1
num_epochs = 3
batch = 16
epoch_loss = []

for epoch in range(num_epochs):
    order = np.random.permutation(num_examples)
    Xs, ys = X[order], y[order]
    for i in range(0, len(Xs), batch):
        xb = Xs[i : i + batch]
        yb = ys[i : i + batch]
        with tf.GradientTape() as g:
            loss = squared_loss(predict(xb), yb)
        dw, db = g.gradient(loss, [w, b])
        sgd([w, b], [dw, db], lr)
    train_l = squared_loss(predict(X), y)
    epoch_loss.append(float(train_l))
    print(f"epoch {epoch + 1}, loss {float(train_l):f}")

# %%
print("error in w", true_w.ravel() - w.numpy().ravel())
print("error in b", true_b - b.numpy())
