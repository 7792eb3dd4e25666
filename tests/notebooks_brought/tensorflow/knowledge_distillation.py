# framework: tensorflow
# compare: history.history["loss"]; student.get_weights(); teacher.get_weights()

# %% [markdown]
# # Knowledge distillation
#
# A big teacher is trained first. A small student learns from its soft labels.

# %%
import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(64)


# %%
class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(
        self,
        optimizer,
        metrics,
        student_loss_fn,
        distillation_loss_fn,
        alpha=0.1,
        temperature=3,
    ):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x, training=False):
        return self.student(x, training=training)


# %% Data
rng = np.random.default_rng(64)
x = rng.normal(size=(320, 8, 8, 1)).astype("float32")
blocks = x.reshape(320, 2, 4, 2, 4).mean(axis=(2, 4)).reshape(320, 4)
y = blocks.argmax(axis=1)
x_train, x_test = x[:256], x[256:]
y_train, y_test = y[:256], y[256:]


# %%
def make_cnn(filters, name):
    return keras.Sequential(
        [
            keras.Input(shape=(8, 8, 1)),
            layers.Conv2D(filters, (3, 3), strides=(2, 2), padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dense(4),
        ],
        name=name,
    )


teacher = make_cnn(24, "teacher")
student = make_cnn(4, "student")

# %% Train the teacher as usual
teacher.compile(
    optimizer=keras.optimizers.Adam(0.01),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.SparseCategoricalAccuracy()],
)
teacher.fit(x_train, y_train, epochs=3, verbose=2)

# %% Distill teacher to student
distiller = Distiller(student=student, teacher=teacher)
distiller.compile(
    optimizer=keras.optimizers.Adam(0.01),
    metrics=[keras.metrics.SparseCategoricalAccuracy()],
    student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    distillation_loss_fn=keras.losses.KLDivergence(),
    alpha=0.1,
    temperature=10,
)
history = distiller.fit(x_train, y_train, epochs=2, verbose=2)

# %%
distiller.evaluate(x_test, y_test, return_dict=True)
