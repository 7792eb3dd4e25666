# framework: tensorflow
# compare: len(gen_losses); list(generated.shape); int(generator_optimizer.iterations)

# %% [markdown]
# # A small GAN
#
# Two networks, two optimizers, two tapes. The generator learns to draw crosses.

# %%
import time

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

tf.keras.utils.set_random_seed(6)

# %%
BUFFER_SIZE = 128
BATCH_SIZE = 32
EPOCHS = 3
noise_dim = 8
num_examples_to_generate = 16

rng = np.random.default_rng(6)
train_images = rng.normal(-0.8, 0.05, size=(128, 8, 8, 1)).astype("float32")
for i in range(128):
    r, c = rng.integers(1, 7, size=2)
    train_images[i, r, :] = 0.9
    train_images[i, :, c] = 0.9

train_dataset = (
    tf.data.Dataset.from_tensor_slices(train_images).shuffle(BUFFER_SIZE).batch(BATCH_SIZE)
)


# %%
def make_generator_model():
    model = tf.keras.Sequential()
    model.add(layers.Input(shape=(noise_dim,)))
    model.add(layers.Dense(4 * 4 * 8, use_bias=False))
    model.add(layers.BatchNormalization())
    model.add(layers.LeakyReLU())
    model.add(layers.Reshape((4, 4, 8)))
    model.add(layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="tanh"))
    return model


def make_discriminator_model():
    model = tf.keras.Sequential()
    model.add(layers.Input(shape=(8, 8, 1)))
    model.add(layers.Conv2D(8, 3, strides=2, padding="same"))
    model.add(layers.LeakyReLU())
    model.add(layers.Dropout(0.3))
    model.add(layers.Flatten())
    model.add(layers.Dense(1))
    return model


generator = make_generator_model()
discriminator = make_discriminator_model()

# %% Losses
cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)


def discriminator_loss(real_output, fake_output):
    real_loss = cross_entropy(tf.ones_like(real_output), real_output)
    fake_loss = cross_entropy(tf.zeros_like(fake_output), fake_output)
    return real_loss + fake_loss


def generator_loss(fake_output):
    return cross_entropy(tf.ones_like(fake_output), fake_output)


generator_optimizer = tf.keras.optimizers.Adam(1e-3)
discriminator_optimizer = tf.keras.optimizers.Adam(1e-3)


# %%
@tf.function
def train_step(images):
    noise = tf.random.normal([BATCH_SIZE, noise_dim])

    with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
        generated_images = generator(noise, training=True)

        real_output = discriminator(images, training=True)
        fake_output = discriminator(generated_images, training=True)

        gen_loss = generator_loss(fake_output)
        disc_loss = discriminator_loss(real_output, fake_output)

    gradients_of_generator = gen_tape.gradient(gen_loss, generator.trainable_variables)
    gradients_of_discriminator = disc_tape.gradient(disc_loss, discriminator.trainable_variables)

    generator_optimizer.apply_gradients(zip(gradients_of_generator, generator.trainable_variables))
    discriminator_optimizer.apply_gradients(
        zip(gradients_of_discriminator, discriminator.trainable_variables)
    )
    return gen_loss, disc_loss


# %%
gen_losses = []
seed = tf.random.normal([num_examples_to_generate, noise_dim])


def train(dataset, epochs):
    for epoch in range(epochs):
        start = time.time()

        for image_batch in dataset:
            gen_loss, disc_loss = train_step(image_batch)
            gen_losses.append(float(gen_loss))

        print(f"gen {gen_loss:.3f}  disc {disc_loss:.3f}")
        print("Time for epoch {} is {} sec".format(epoch + 1, time.time() - start))


train(train_dataset, EPOCHS)

# %% Draw some samples
generated = generator(seed, training=False)
for row in generated[0, :, :, 0].numpy():
    print("".join("#" if v > 0 else "." for v in row))
