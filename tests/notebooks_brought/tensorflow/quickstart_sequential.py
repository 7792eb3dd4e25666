# framework: tensorflow
# compare: history.history["loss"]; model.get_weights(); test_loss; probability_model(x_test[:5])

# %% [markdown]
# # Quickstart: classify small images
#
# 1. Load a data set.
# 2. Build a neural network that classifies images.
# 3. Train it.
# 4. Evaluate its accuracy.

# %%
import numpy as np
import tensorflow as tf

print("TensorFlow version:", tf.__version__)

# %% Load the data
tf.keras.utils.set_random_seed(42)
rng = np.random.default_rng(0)


def load_data(n_train=512, n_test=128, num_classes=10, size=12):
    patterns = rng.integers(0, 200, size=(num_classes, size, size))

    def sample(n):
        labels = rng.integers(0, num_classes, size=n)
        images = patterns[labels] + rng.integers(0, 56, size=(n, size, size))
        return images.astype("uint8"), labels.astype("uint8")

    return sample(n_train), sample(n_test)


(x_train, y_train), (x_test, y_test) = load_data()
x_train, x_test = x_train / 255.0, x_test / 255.0
x_train.shape, x_test.shape

# %% [markdown]
# ## Build a model

# %%
model = tf.keras.models.Sequential(
    [
        tf.keras.Input(shape=(12, 12)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dense(10),
    ]
)
model.summary()

# %% The untrained model gives logits
predictions = model(x_train[:1]).numpy()
predictions

# %%
tf.nn.softmax(predictions).numpy()

# %%
loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
loss_fn(y_train[:1], predictions).numpy()

# %%
model.compile(optimizer="adam", loss=loss_fn, metrics=["accuracy"])

# %% [markdown]
# ## Train and evaluate

# %%
history = model.fit(x_train, y_train, epochs=3)

# %%
test_loss, test_acc = model.evaluate(x_test, y_test, verbose=2)
print("\nTest accuracy:", test_acc)

# %% A model that returns probabilities
probability_model = tf.keras.Sequential([model, tf.keras.layers.Softmax()])
probability_model(x_test[:5])
