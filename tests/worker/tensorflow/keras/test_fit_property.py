"""Random small Keras models with random options of `fit`, on two workers and in one process.

The number of a case determines it: `pytest -k "[17]"` repeats it. Cases use float64, so that
rounding does not hide a difference. `make test-full` runs 200 cases.
"""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from tests import clusters
from tests.fit_programs import AFTER, PLAIN, START
from tests.references import plainly
from tests.worker.tensorflow.keras.test_fit import assert_close, outcomes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import nbdist

CASES, IN_SUITE = 200, (3, 7)
"""Number of cases, and those of `make test`: a data set, and arrays with weights of classes."""

AT_ONCE = 12
"""Number of cases with references from one process in `make test-full`."""

SUITE = [
    pytest.param(case, marks=() if case in IN_SUITE else pytest.mark.full) for case in range(CASES)
]
LAYERS = (
    "layers.Dense({n}, {act!r})",
    "layers.Dense({n}, kernel_regularizer='l2', activity_regularizer='l1')",
    "layers.BatchNormalization()",
    "layers.BatchNormalization(momentum=0.5, scale=False)",
    "layers.LayerNormalization()",
    "layers.Dropout({rate})",
    "layers.GaussianNoise({rate})",
    "layers.GaussianDropout({rate})",
    "layers.AlphaDropout({rate})",
    "layers.ActivityRegularization(l2=0.01)",
    "layers.UnitNormalization()",
    "layers.PReLU()",
)
SEQUENCES = (
    "layers.LSTM({n}, dropout={rate})",
    "layers.GRU({n}, recurrent_dropout={rate})",
    "layers.SimpleRNN({n})",
    "layers.Bidirectional(layers.LSTM({n}))",
    "layers.Conv1D({n}, 3, activation={act!r}), layers.GlobalMaxPooling1D()",
    "layers.SeparableConv1D({n}, 3), layers.SpatialDropout1D({rate}), layers.Flatten()",
)
OPTIMIZERS = (
    "SGD(0.05{clip})",
    "SGD(0.05, momentum=0.9, nesterov=True{clip})",
    "Adam(0.01{clip})",
    "AdamW(0.01, weight_decay=0.01{clip})",
    "RMSprop(0.005, centered=True{clip})",
    "Adagrad(0.05{clip})",
    "Adamax(0.01{clip})",
    "Nadam(0.01{clip})",
    "Ftrl(0.05{clip})",
    "Adam(0.01, amsgrad=True, use_ema=True, ema_overwrite_frequency=2{clip})",
    "SGD(0.05, gradient_accumulation_steps=2{clip})",
)
CLIPS = ("", "", ", clipnorm=0.2", ", clipvalue=0.02", ", global_clipnorm=0.3")
REGRESSIONS = (
    "'mse'",
    "'mae'",
    "'huber'",
    "'log_cosh'",
    "keras.losses.MeanSquaredError(reduction='sum')",
    "keras.losses.MeanAbsoluteError(reduction='mean_with_sample_weight')",
    "lambda t, p: ops.mean(ops.square(t - p), axis=-1)",
    "lambda t, p: ops.sqrt(ops.mean(ops.square(t - p)) + 1e-3)",
)
METRICS = ("'mae'", "'mse'", "keras.metrics.RootMeanSquaredError()", "'cosine_similarity'")


def program(case: int) -> str:
    """Return a cell with random choices."""
    pick = random.Random(case)
    of_sequences, classes = pick.random() < 0.3, pick.random() < 0.35
    body = [pick.choice(SEQUENCES)] if of_sequences else []
    body += pick.choices(LAYERS, k=pick.randint(1, 4))
    filled = [
        layer.format(
            n=pick.randint(3, 9),
            act=pick.choice(["relu", "tanh", "gelu", "sigmoid"]),
            rate=pick.choice([0.1, 0.3]),
        )
        for layer in body
    ]
    shape = "(7, 4)" if of_sequences else "(8,)"
    samples, batch = pick.randint(20, 90), pick.randint(1, 40)
    batch = max(batch, samples // 12)
    last = "layers.Dense(3, 'softmax')" if classes else "layers.Dense(1)"
    loss = "'sparse_categorical_crossentropy'" if classes else pick.choice(REGRESSIONS)
    metrics = "['accuracy']" if classes else f"[{', '.join(pick.sample(METRICS, 2))}]"
    weights = pick.choice(["", "", "sample_weight=w, "])
    if classes and not weights and pick.random() < 0.5:
        weights = "class_weight={0: 1.0, 1: 3.0, 2: 0.5}, "
    return (
        START
        + f"""
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
keras.utils.set_random_seed({case})
x = draw.normal(size=({samples}, *{shape}))
y = labels_ = draw.integers(0, 3, {samples}) if {classes} else x.reshape(len(x), -1).sum(1)[:, None]
w = draw.uniform(0.2, 2, {samples})
model = keras.Sequential([keras.Input({shape}), {", ".join(filled)}, {last}])
model.compile(
    keras.optimizers.{pick.choice(OPTIMIZERS).format(clip=pick.choice(CLIPS))}, {loss},
    metrics={metrics}, steps_per_execution={pick.choice([1, 1, 1, 3])})
"""
        + _fit(pick, batch, weights)
        + AFTER
        + f"""
outcome["evaluate"] = model.evaluate(x, y, batch_size={batch}, verbose=0)
outcome["predict"] = model.predict(x[:13], batch_size={pick.randint(1, 13)}, verbose=0)
keras.config.set_floatx("float32")
keras.config.set_dtype_policy("float32")
"""
        + PLAIN
    )


def _fit(pick: random.Random, batch: int, weights: str) -> str:
    """Return a `fit` of arrays, a data set or a PyDataset."""
    kind = pick.choice(["arrays", "arrays", "arrays", "tf.data", "PyDataset"])
    weighted = "w" if "sample_weight" in weights else ""
    of_classes = weights if "class_weight" in weights else ""
    end = f"{of_classes}epochs={pick.randint(1, 2)}, verbose=0)\n"
    if kind == "arrays":
        split = pick.choice(["", "validation_split=0.25, "])
        shuffle = pick.choice(["True", "True", "False", "'batch'"])
        return (
            f"history = model.fit(x, y, {weights}batch_size={batch}, {split}shuffle={shuffle}, "
            + (end.replace(of_classes, ""))
        )
    element = f"(x, y, {weighted})" if weighted else "(x, y)"
    if kind == "tf.data":
        shuffled = pick.choice(["", f".shuffle({pick.randint(5, 90)})"])
        return (
            f"data = tf.data.Dataset.from_tensor_slices({element}){shuffled}.batch({batch})\n"
            f"history = model.fit(data, {end}"
        )
    return f"""
class Batches(keras.utils.PyDataset):
    def __len__(self):
        return math.ceil(len(x) / {batch})
    def __getitem__(self, i):
        return tuple(a[i * {batch}:(i + 1) * {batch}] for a in {element})
history = model.fit(Batches(), shuffle=False, {end}"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="tensorflow") as running:
        yield running


@cache
def references(cases: Sequence[int]) -> dict[str, Any]:
    """Return the outcomes of several cases from one process."""
    return plainly({str(case): program(case) for case in cases}, "tensorflow", "keras")


@pytest.mark.parametrize("case", SUITE)
def test_fit_gives_the_results_of_one_process(cluster: nbdist.Cluster, case: int) -> None:
    first = case - case % AT_ONCE
    cases = IN_SUITE if case in IN_SUITE else tuple(range(first, first + AT_ONCE))
    reference = references(cases)[str(case)]
    for ours in outcomes(cluster, program(case)):
        assert_close(ours, reference, 1e-7)
