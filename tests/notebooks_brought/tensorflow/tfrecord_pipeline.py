# framework: tensorflow
# compare: history.history["loss"][0]; num_records

# %% [markdown]
# # TFRecords from start to end
#
# We write two shards of serialized examples, read them back and train on them.

# %%
import os
import tempfile

import numpy as np
import tensorflow as tf

AUTOTUNE = tf.data.AUTOTUNE
BATCH_SIZE = 16
FEATURES = 20

tf.keras.utils.set_random_seed(31)

# %%
rng = np.random.default_rng(31)
signals = rng.standard_normal((288, FEATURES)).astype("float32")
classes = np.argmax(signals[:, :3] + signals[:, 3:6], axis=1)
names = [f"signal_{i}" for i in range(len(signals))]


# %% The following functions convert a value to a type compatible with tf.train.Example
def _bytes_feature(value):
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def _float_feature(values):
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


def _int64_feature(value):
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))


def serialize_example(signal, label, name):
    feature = {
        "signal": _float_feature(signal),
        "label": _int64_feature(int(label)),
        "name": _bytes_feature(name.encode("utf-8")),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


# %%
out_dir = tempfile.mkdtemp()
shards = {"train-0": (0, 128), "train-1": (128, 256), "valid-0": (256, 288)}

for shard, (start, stop) in shards.items():
    with tf.io.TFRecordWriter(os.path.join(out_dir, shard + ".tfrec")) as writer:
        for i in range(start, stop):
            writer.write(serialize_example(signals[i], classes[i], names[i]))

# %% Look at one raw record
filenames = sorted(tf.io.gfile.glob(os.path.join(out_dir, "*.tfrec")))
for raw_record in tf.data.TFRecordDataset(filenames).take(1):
    example = tf.train.Example()
    example.ParseFromString(raw_record.numpy())
    print(example.features.feature["name"])

# %%
feature_description = {
    "signal": tf.io.FixedLenFeature([FEATURES], tf.float32),
    "label": tf.io.FixedLenFeature([], tf.int64),
    "name": tf.io.FixedLenFeature([], tf.string, default_value=""),
}


def read_tfrecord(serialized):
    example = tf.io.parse_single_example(serialized, feature_description)
    return example["signal"], example["label"]


def get_dataset(pattern, shuffle=False):
    files = tf.data.Dataset.list_files(os.path.join(out_dir, pattern), shuffle=False)
    dataset = files.interleave(tf.data.TFRecordDataset, cycle_length=2)
    dataset = dataset.map(read_tfrecord, num_parallel_calls=AUTOTUNE)
    if shuffle:
        dataset = dataset.shuffle(256, seed=31)
    return dataset.batch(BATCH_SIZE).prefetch(AUTOTUNE)


# %%
train_ds = get_dataset("train-*.tfrec", shuffle=True)
valid_ds = get_dataset("valid-*.tfrec")
num_records = sum(1 for _ in tf.data.TFRecordDataset(filenames))
print(num_records, "records in", len(filenames), "files")

# %% [markdown]
# ## Train

# %%
model = tf.keras.Sequential()
model.add(tf.keras.Input((FEATURES,)))
model.add(tf.keras.layers.Dense(24, activation="relu"))
model.add(tf.keras.layers.Dense(3, activation="softmax"))
model.compile(
    optimizer=tf.keras.optimizers.Adam(5e-3),
    loss="sparse_categorical_crossentropy",
    metrics=["sparse_categorical_accuracy"],
)
history = model.fit(train_ds, epochs=3, validation_data=valid_ds, verbose=2)
