# framework: tensorflow
# compare: h1.history["loss"]; h2.history["loss"]; model.get_weights(); model2.get_weights(); scores

# %% [markdown]
# # Imbalanced data: class weights and sample weights
#
# One sample in ten is a fraud. Also shows `steps_per_execution` and gradient accumulation in the
# optimizer.

# %%
import numpy as np
import tensorflow as tf
from tensorflow import keras

keras.utils.set_random_seed(90)

# %%
rng = np.random.default_rng(90)
n = 512
fraud = (rng.random(n) < 0.1).astype("float32")
features = (rng.normal(size=(n, 14)) + 0.8 * fraud[:, None]).astype("float32")
amount = rng.gamma(2.0, 50.0, size=n).astype("float32")

x_train, x_test = features[:384], features[384:]
y_train, y_test = fraud[:384], fraud[384:]

# %%
neg, pos = np.bincount(y_train.astype(int))
print(f"Examples:\n    Total: {neg + pos}\n    Positive: {pos}")

# Scaling by total/2 keeps the loss at a similar magnitude
weight_for_0 = (1 / neg) * (neg + pos) / 2.0
weight_for_1 = (1 / pos) * (neg + pos) / 2.0
class_weight = {0: weight_for_0, 1: weight_for_1}
print(class_weight)


# %%
def make_model(output_bias=None):
    if output_bias is not None:
        output_bias = keras.initializers.Constant(output_bias)
    return keras.Sequential(
        [
            keras.Input((x_train.shape[-1],)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(1, activation="sigmoid", bias_initializer=output_bias or "zeros"),
        ]
    )


METRICS = [
    keras.metrics.BinaryAccuracy(name="accuracy"),
    keras.metrics.Precision(name="precision"),
    keras.metrics.Recall(name="recall"),
    keras.metrics.AUC(name="auc"),
]

# %% Class weights
model = make_model(output_bias=np.log([pos / neg]).item())
model.compile(
    optimizer=keras.optimizers.Adam(1e-2),
    loss="binary_crossentropy",
    metrics=METRICS,
    steps_per_execution=4,
)
h1 = model.fit(
    x_train,
    y_train,
    batch_size=32,
    epochs=2,
    class_weight=class_weight,
    validation_data=(x_test, y_test),
    verbose=2,
)

# %% Sample weights: a fraud costs as much as its amount
sample_weight = np.ones(len(y_train), "float32")
sample_weight[y_train == 1] = amount[:384][y_train == 1] / 20

train_ds = tf.data.Dataset.from_tensor_slices((x_train, y_train, sample_weight)).batch(32)

model2 = make_model()
model2.compile(
    optimizer=keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2),
    loss="binary_crossentropy",
    weighted_metrics=["accuracy"],
)
h2 = model2.fit(train_ds, epochs=2, verbose=2)

# %%
scores = model.evaluate(x_test, y_test, batch_size=64, verbose=0)
for name, value in zip(["loss", *[m.name for m in METRICS]], scores):
    print(name, ": ", round(value, 4))
