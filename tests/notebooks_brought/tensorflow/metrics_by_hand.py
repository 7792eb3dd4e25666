# framework: tensorflow
# compare: epochs; [w.numpy() for w in model.weights]; cm.numpy(); f1s; ranks; counts; hist

# %% [markdown]
# # Metrics without `keras.metrics`
# A confusion matrix, an F1 score, the hardest sample and flags of the rows, all computed by hand.

# %%
import numpy as np
import tensorflow as tf
from tensorflow import keras

keras.utils.set_random_seed(41)
x = np.random.randn(100, 6).astype("float32")
y = np.argmax(x[:, :3] + 0.3 * np.random.randn(100, 3), 1).astype("int32")
ds = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
layers = [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)]
model = keras.Sequential(layers)
opt = keras.optimizers.Nadam(1e-2)
scce = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
cm = tf.Variable(tf.zeros((3, 3), tf.int32), trainable=False)
best_loss = tf.Variable(1e9, trainable=False)
class_weights = {0: 1.0, 1: 2.0, 2: 0.5}


def f1(y_true, y_pred):
    tp = tf.reduce_sum(y_true * y_pred, 0)
    p = tp / (tf.reduce_sum(y_pred, 0) + 1e-7)
    r = tp / (tf.reduce_sum(y_true, 0) + 1e-7)
    return tf.reduce_mean(2 * p * r / (p + r + 1e-7))


# %%
epochs, f1s, ranks, counts, hist = [], [], [], [], []
global_step = 0
for epoch in range(3):
    loss_sum, correct, n = 0.0, 0, 0
    grads_norms = []
    for xb, yb in ds:
        w = tf.constant([class_weights[int(c)] for c in yb.numpy()])
        with tf.GradientTape() as tape:
            logits = model(xb, training=True)
            per_example = scce(yb, logits)
            loss = tf.reduce_mean(per_example * w)
            kernels = [v for v in model.trainable_variables if "bias" not in v.name]
            loss += 1e-3 * tf.add_n([tf.nn.l2_loss(v) for v in kernels])
        grads = tape.gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))
        pred = tf.argmax(logits, axis=1, output_type=tf.int32)
        acc = tf.reduce_mean(tf.cast(pred == yb, tf.float32))
        cm.assign_add(tf.math.confusion_matrix(yb, pred, 3))
        score = f1(tf.one_hot(yb, 3), tf.one_hot(pred, 3))
        best_loss.assign(tf.minimum(best_loss, loss))
        top2 = tf.math.in_top_k(yb, logits, 2)
        hardest = tf.argmax(per_example)
        worst = tf.reduce_max(per_example)
        n_correct = tf.reduce_sum(tf.cast(pred == yb, tf.int32))
        bs = tf.shape(xb)[0]
        frac = n_correct / bs
        norm = tf.linalg.global_norm(grads)
        global_step += 1
        loss_sum += float(loss) * int(bs)
        correct += int(n_correct)
        n += int(bs)
        f1s.append(float(score))
        ranks.append([int(hardest), float(worst), float(best_loss)])
        counts.append([float(frac), float(acc), int(tf.reduce_sum(tf.cast(top2, tf.int32)))])
        grads_norms.append(float(norm))
    hist.append(np.histogram(logits.numpy(), bins=4)[0])
    epochs.append([loss_sum / n, correct / n, float(np.mean(grads_norms))])
    print(f"Epoch {epoch} step {global_step}: loss={loss_sum / n:.4f} acc={correct / n:.3f}")
