# framework: tensorflow
# compare: history.history["loss"]; model.get_weights()[-4:]; new_price; normalizer.mean

# %% [markdown]
# # Used cars: numbers and categories in one model
#
# A table with numbers and strings, preprocessed by Keras layers.

# %%
import csv
import pathlib
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

# %% Write a CSV file
rng = np.random.default_rng(2024)
path = pathlib.Path(tempfile.mkdtemp()) / "cars.csv"

fuels = ["petrol", "diesel", "electric"]
with path.open("w", newline="") as f:
    writer = csv.writer(f)
    writer.writerow(["age", "km", "power", "fuel", "wheels", "price"])
    for _ in range(300):
        age = int(rng.integers(0, 15))
        km = int(rng.integers(1, 20) * 1000 * (age + 1))
        power = int(rng.integers(50, 200))
        fuel = fuels[rng.integers(0, 3)]
        wheels = int(rng.choice([3, 5]))
        price = 30 - 1.5 * age - km / 40000 + 0.05 * power + 4 * (fuel == "electric")
        writer.writerow([age, km, power, fuel, wheels, round(price + rng.normal(), 2)])

# %%
with path.open() as f:
    rows = list(csv.DictReader(f))

numeric_names = ["age", "km", "power"]
table = {name: np.array([[float(r[name])] for r in rows], "float32") for name in numeric_names}
table["fuel"] = np.array([[r["fuel"]] for r in rows])
table["wheels"] = np.array([[int(r["wheels"])] for r in rows])
target = np.array([float(r["price"]) for r in rows], "float32")


# %%
def df_to_dataset(columns, labels, shuffle=True, batch_size=32):
    ds = tf.data.Dataset.from_tensor_slices((columns, labels))
    if shuffle:
        ds = ds.shuffle(buffer_size=len(labels), seed=5)
    return ds.batch(batch_size).prefetch(batch_size)


train_ds = df_to_dataset({k: v[:240] for k, v in table.items()}, target[:240])
test_ds = df_to_dataset({k: v[240:] for k, v in table.items()}, target[240:], shuffle=False)

# %%
[(batch_features, label_batch)] = train_ds.take(1)
print("Every feature:", list(batch_features.keys()))
print("A batch of fuels:", batch_features["fuel"][:3])

# %% [markdown]
# ## Preprocessing layers

# %%
tf.keras.utils.set_random_seed(3)

normalizer = layers.Normalization(axis=-1)
normalizer.adapt(np.concatenate([table[name][:240] for name in numeric_names], axis=1))

fuel_lookup = layers.StringLookup(output_mode="one_hot")
fuel_lookup.adapt(train_ds.map(lambda x, y: x["fuel"]))
print(fuel_lookup.get_vocabulary())

wheels_lookup = layers.IntegerLookup(vocabulary=[3, 5], output_mode="one_hot")

# %%
inputs = {name: tf.keras.Input(shape=(1,), name=name) for name in numeric_names}
inputs["fuel"] = tf.keras.Input(shape=(1,), name="fuel", dtype="string")
inputs["wheels"] = tf.keras.Input(shape=(1,), name="wheels", dtype="int64")

numbers = normalizer(layers.Concatenate()([inputs[name] for name in numeric_names]))
encoded = [numbers, fuel_lookup(inputs["fuel"]), wheels_lookup(inputs["wheels"])]

x = layers.Concatenate()(encoded)
x = layers.Dense(16, activation="relu")(x)
output = layers.Dense(1)(x)

model = tf.keras.Model(inputs, output)
model.compile(optimizer=tf.keras.optimizers.Adam(0.05), loss="mae")

# %%
history = model.fit(train_ds, epochs=3, validation_data=test_ds, verbose=2)

# %%
sample = {"age": 3.0, "km": 42000.0, "power": 110.0, "fuel": "electric", "wheels": 5}
input_dict = {name: tf.convert_to_tensor([[value]]) for name, value in sample.items()}
new_price = model.predict(input_dict)
print(f"This car should cost about {new_price[0, 0]:.1f} thousand.")
