# framework: tensorflow
# compare: epoch_loss; test_loss; autoencoder.get_weights(); autoencoder.predict_on_batch(x_test)

# %% [markdown]
# # Denoising autoencoder with `train_on_batch`

# %%
from time import perf_counter

import numpy as np
from tensorflow.keras.layers import Conv2D, Conv2DTranspose, Input
from tensorflow.keras.models import Model
from tensorflow.keras.utils import set_random_seed

set_random_seed(30)

# %%
clean = np.zeros((224, 12, 12, 1), "float32")
for i in range(224):
    a, b = np.random.randint(1, 9, size=2)
    clean[i, a : a + 3, b : b + 3] = 1.0
noisy = np.clip(clean + 0.3 * np.random.randn(*clean.shape), 0.0, 1.0).astype("float32")

x_train, y_train = noisy[:192], clean[:192]
x_test, y_test = noisy[192:], clean[192:]

# %%
inp = Input(shape=(12, 12, 1))
x = Conv2D(6, (3, 3), activation="relu", strides=2, padding="same")(inp)
x = Conv2DTranspose(6, (3, 3), activation="relu", strides=2, padding="same")(x)
out = Conv2D(1, (3, 3), activation="sigmoid", padding="same")(x)

autoencoder = Model(inp, out)
autoencoder.compile(optimizer="adam", loss="binary_crossentropy", metrics=["mse"])

# %%
batch_size = 24
n_batches = x_train.shape[0] // batch_size
epoch_loss = []
test_loss = []

for epoch in range(3):
    t0 = perf_counter()
    perm = np.random.permutation(x_train.shape[0])
    losses = []
    for b in range(n_batches):
        idx = perm[b * batch_size : (b + 1) * batch_size]
        logs = autoencoder.train_on_batch(x_train[idx], y_train[idx], return_dict=True)
        losses.append(logs["loss"])
        if b % 4 == 0:
            print("epoch {} batch {} loss {:.4f}".format(epoch, b, logs["loss"]))
    autoencoder.reset_metrics()
    epoch_loss.append(np.mean(losses))
    test_loss.append(autoencoder.test_on_batch(x_test, y_test)[0])
    autoencoder.reset_metrics()
    print(f"epoch {epoch}: {epoch_loss[-1]:.4f}, {perf_counter() - t0:.1f} s")
