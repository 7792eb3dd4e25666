# framework: tensorflow
# compare: history.history["loss"]; model.get_weights(); forecast; val_performance

# %% [markdown]
# # Time series forecast with sliding windows
#
# A year of hourly temperatures is too long for a demo, so we use 20 days.

# %%
import numpy as np
import tensorflow as tf

# %%
tf.keras.utils.set_random_seed(0)  # also seeds NumPy

hours = np.arange(20 * 24)
temperature = (
    12
    + 6 * np.sin(2 * np.pi * hours / 24)
    + 2 * np.sin(2 * np.pi * hours / (24 * 7))
    + np.random.normal(scale=0.5, size=len(hours))
)
pressure = 1000 + np.cumsum(np.random.normal(scale=0.3, size=len(hours)))
features = np.stack(
    [
        temperature,
        pressure,
        np.sin(2 * np.pi * hours / 24),
        np.cos(2 * np.pi * hours / 24),
    ],
    axis=1,
).astype("float32")

# %% Split and normalize
n = len(features)
train_df = features[: int(n * 0.8)]
val_df = features[int(n * 0.8) :]

mean = train_df.mean(axis=0)
std = train_df.std(axis=0)
train_df = (train_df - mean) / std
val_df = (val_df - mean) / std
print(train_df.shape, val_df.shape)

# %% [markdown]
# ## Windows
# Each window has 12 hours of input and the temperature of the next hour as the label.

# %%
WINDOW = 12


def make_dataset(data):
    return tf.keras.utils.timeseries_dataset_from_array(
        data=data[:-WINDOW],
        targets=data[WINDOW:, 0],
        sequence_length=WINDOW,
        batch_size=32,
        shuffle=False,
    )


train_ds = make_dataset(train_df)
val_ds = make_dataset(val_df)

for xb, yb in train_ds:
    print(xb.shape, yb.shape)

# %%
model = tf.keras.models.Sequential(
    [
        tf.keras.layers.LSTM(12, return_sequences=False),
        tf.keras.layers.Dense(units=1),
    ]
)


# %%
def compile_and_fit(model, train, val, patience=2):
    early_stopping = tf.keras.callbacks.EarlyStopping(
        monitor="val_loss", patience=patience, mode="min"
    )
    model.compile(
        loss=tf.keras.losses.MeanSquaredError(),
        optimizer=tf.keras.optimizers.Adam(learning_rate=0.01),
        metrics=["mae"],
    )
    return model.fit(train, epochs=3, validation_data=val, callbacks=[early_stopping])


history = compile_and_fit(model, train_ds, val_ds)

# %%
val_performance = model.evaluate(val_ds, verbose=0, return_dict=True)
val_performance

# %% Forecast the next hour, in degrees
last_window = val_df[-WINDOW:][np.newaxis, ...]
forecast = model(last_window).numpy() * std[0] + mean[0]
print("next hour: %.2f degrees" % forecast[0, 0])
