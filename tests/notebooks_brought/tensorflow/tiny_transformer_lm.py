# framework: tensorflow
# compare: epoch_losses; next_logits; model(x_train[:4]).numpy()

# %% [markdown]
# # A tiny GPT
#
# A character model with one transformer block, trained by a custom loop.

# %%
import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

# %% Hyperparameters
maxlen = 16
embed_dim = 16
num_heads = 2
feed_forward_dim = 32
batch_size = 16
EPOCHS = 2

keras.utils.set_random_seed(1)

# %% [markdown]
# ## Text

# %%
text = "the cat sat on the mat. the dog ran to the cat. a bird sang in the tree. " * 20
chars = sorted(set(text))
stoi = {ch: i for i, ch in enumerate(chars)}
itos = {i: ch for ch, i in stoi.items()}
ids = np.array([stoi[c] for c in text])

windows = np.lib.stride_tricks.sliding_window_view(ids, maxlen + 1)[::7][:192]
x_train, y_train = windows[:, :-1].astype("int32"), windows[:, 1:].astype("int32")
print(len(chars), "characters,", x_train.shape)

dataset = tf.data.Dataset.from_tensor_slices({"x": x_train, "y": y_train})
dataset = dataset.shuffle(192, seed=1).batch(batch_size, drop_remainder=True)


# %%
class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        positions = tf.range(start=0, limit=tf.shape(x)[-1], delta=1)
        return self.token_emb(x) + self.pos_emb(positions)


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads, embed_dim // num_heads)
        self.ffn = keras.Sequential(
            [layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)

    def call(self, inputs):
        attention_output = self.att(inputs, inputs, use_causal_mask=True)
        out1 = self.layernorm1(inputs + attention_output)
        return self.layernorm2(out1 + self.ffn(out1))


# %%
def create_model():
    inputs = layers.Input(shape=(maxlen,), dtype="int32")
    x = TokenAndPositionEmbedding(maxlen, len(chars), embed_dim)(inputs)
    x = TransformerBlock(embed_dim, num_heads, feed_forward_dim)(x)
    return keras.Model(inputs, layers.Dense(len(chars))(x))


model = create_model()
loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(2e-3, clipnorm=1.0)

loss_metric = keras.metrics.Mean(name="loss")
acc_metric = keras.metrics.SparseCategoricalAccuracy(name="accuracy")


# %%
@tf.function
def train_step(batch):
    with tf.GradientTape() as tape:
        logits = model(batch["x"], training=True)
        loss = loss_object(batch["y"], logits)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    loss_metric(loss)
    acc_metric(batch["y"], logits)


# %%
epoch_losses = []
for epoch in range(EPOCHS):
    loss_metric.reset_state()
    acc_metric.reset_state()
    for batch, data in enumerate(dataset):
        train_step(data)
        if batch % 5 == 0:
            print(f"Epoch {epoch + 1} Batch {batch} Loss {loss_metric.result():.4f}")
    epoch_losses.append(float(loss_metric.result()))
    print(f"Epoch {epoch + 1} done: {epoch_losses[-1]:.4f}, {float(acc_metric.result()):.3f}")

# %% Which character comes next?
prompt = "the cat sat on t"
tokens = np.array([[stoi[c] for c in prompt]])
next_logits = model(tokens)[0, -1].numpy()
print(prompt + itos[int(np.argmax(next_logits))])
