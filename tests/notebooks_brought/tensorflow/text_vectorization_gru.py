# framework: tensorflow
# compare: history.history; model.get_weights(); end_to_end(examples); vocab_size

# %% [markdown]
# # Sentiment of short reviews
#
# The text is raw strings. `TextVectorization` turns them into integers.

# %%
import random

import tensorflow as tf
from tensorflow.keras import layers
from tensorflow.keras.models import Model, Sequential

tf.keras.utils.set_random_seed(123)

# %% Make the corpus
good = ["great", "lovely", "superb", "funny", "bright", "moving", "clever", "warm"]
bad = ["dull", "awful", "boring", "weak", "noisy", "slow", "empty", "cold"]
plot = "the film was a story with actors and music that i saw last night"
filler = plot.split()


def make_review(label):
    words = random.choices(filler, k=random.randint(5, 10))
    words += random.choices(good if label else bad, k=random.randint(2, 3))
    random.shuffle(words)
    return " ".join(words).capitalize() + random.choice([".", "!", " <br />"])


labels = [i % 2 for i in range(320)]
texts = [make_review(y) for y in labels]
print(texts[0], labels[0])

# %%
BATCH_SIZE = 32

raw_ds = tf.data.Dataset.from_tensor_slices((texts, labels))
raw_train_ds = raw_ds.take(256).batch(BATCH_SIZE)
raw_val_ds = raw_ds.skip(256).batch(BATCH_SIZE)


# %%
def custom_standardization(input_data):
    lowercase = tf.strings.lower(input_data)
    stripped_html = tf.strings.regex_replace(lowercase, "<br />", " ")
    return tf.strings.regex_replace(stripped_html, r"[.!?,]", "")


vectorize_layer = layers.TextVectorization(
    standardize=custom_standardization,
    max_tokens=64,
    output_mode="int",
    output_sequence_length=14,
)

# Only the text, without labels, then adapt
train_text = raw_train_ds.map(lambda x, y: x)
vectorize_layer.adapt(train_text)
vocab_size = len(vectorize_layer.get_vocabulary())
print(vocab_size, vectorize_layer.get_vocabulary()[:8])


# %%
def vectorize_text(text, label):
    text = tf.expand_dims(text, -1)
    return vectorize_layer(text), label


train_ds = raw_train_ds.map(vectorize_text).cache().shuffle(8, seed=0).prefetch(2)
val_ds = raw_val_ds.map(vectorize_text).cache().prefetch(2)

# %% [markdown]
# ## Model

# %%
model = Sequential(
    [
        layers.Embedding(vocab_size, 8, mask_zero=True),
        layers.GRU(8),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(loss="binary_crossentropy", optimizer="adam")

history = model.fit(train_ds, validation_data=val_ds, epochs=2)

# %% [markdown]
# ## Export: strings in, scores out

# %%
string_input = tf.keras.Input(shape=(1,), dtype="string")
end_to_end = Model(string_input, model(vectorize_layer(string_input)))

examples = tf.constant(
    [["The music was great and lovely!"], ["a dull, slow story."], ["unknown words here"]]
)
end_to_end(examples)
