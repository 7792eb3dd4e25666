# framework: tensorflow
# compare: mean_losses; embedding.get_weights(); distances; threshold_acc

# %% [markdown]
# # Siamese network with a contrastive loss
#
# Both images of a pair pass the same network. Pairs of one class move together, others apart.

# %%
import random

import keras
import numpy as np
import tensorflow as tf
from keras import ops

keras.utils.set_random_seed(5)

# %%
NUM_CLASSES = 4
prototypes = np.random.rand(NUM_CLASSES, 10, 10)
y = np.arange(160) % NUM_CLASSES
x = (prototypes[y] + 0.3 * np.random.rand(160, 10, 10)).astype("float32")


def make_pairs(x, y):
    """Creates one matching and one other pair for each image."""
    digit_indices = [np.where(y == i)[0] for i in range(NUM_CLASSES)]
    pairs, labels = [], []
    for idx1 in range(len(x)):
        label1 = y[idx1]
        idx2 = random.choice(digit_indices[label1])
        pairs += [[x[idx1], x[idx2]]]
        labels += [0]

        label2 = random.randint(0, NUM_CLASSES - 1)
        while label2 == label1:
            label2 = random.randint(0, NUM_CLASSES - 1)
        idx2 = random.choice(digit_indices[label2])
        pairs += [[x[idx1], x[idx2]]]
        labels += [1]
    return np.array(pairs), np.array(labels).astype("float32")


pairs, labels = make_pairs(x, y)
x_left, x_right = pairs[:, 0], pairs[:, 1]
print(x_left.shape, x_right.shape, labels[:8])

# %%
embedding = keras.Sequential(
    [
        keras.Input((10, 10)),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="tanh"),
        keras.layers.Dense(8),
        keras.layers.UnitNormalization(),
    ],
    name="embedding",
)


def euclidean_distance(a, b):
    sum_square = ops.sum(ops.square(a - b), axis=1)
    return ops.sqrt(ops.maximum(sum_square, 1e-6))


def contrastive_loss(label, distance, margin=1.0):
    same = (1 - label) * ops.square(distance)
    other = label * ops.square(ops.maximum(margin - distance, 0.0))
    return ops.mean(same + other)


# %%
optimizer = keras.optimizers.Adam(0.002)


def train_step(left, right, label):
    with tf.GradientTape() as tape:
        d = euclidean_distance(embedding(left), embedding(right))
        loss = contrastive_loss(label, d)
    grads = tape.gradient(loss, embedding.trainable_variables)
    optimizer.apply(grads, embedding.trainable_variables)
    return loss


# %% Train
batch_size = 32
n_train = 256
mean_losses = []

for epoch in range(1, 4):
    batch_losses = []
    for start in range(0, n_train, batch_size):
        end = start + batch_size
        loss = train_step(x_left[start:end], x_right[start:end], labels[start:end])
        batch_losses.append(loss.numpy())
    mean_losses.append(np.mean(batch_losses))
    print(f"epoch {epoch}: {mean_losses[-1]:.4f}")

# %%
distances = euclidean_distance(embedding(x_left[n_train:]), embedding(x_right[n_train:])).numpy()
threshold_acc = float(np.mean((distances > 0.5) == labels[n_train:]))
print("accuracy of the test pairs:", threshold_acc)
