"""Step cells for any number of workers: data, epochs, reports and refused input."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from nbdist.records import StepOptions
from tests import clusters
from tests.references import reported
from tests.runs import plain

if TYPE_CHECKING:
    from collections.abc import Iterator


PARAMS = [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)]


@pytest.fixture(scope="module", params=PARAMS)
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param) as running:
        yield running


@pytest.mark.parametrize(
    ("strategy", "shuffle"),
    [
        pytest.param("mirrored", None, marks=pytest.mark.full),
        ("mirrored", 7),
        ("pjrt", None),
        pytest.param("pjrt", 7, marks=pytest.mark.full),
    ],
)
def test_every_sample_is_seen_once_in_each_epoch(
    cluster: nbdist.Cluster, strategy: str, shuffle: int | None
) -> None:
    """The order depends on the seed and the epoch, not on the number of workers.

    A batch that every replica gets whole counts once, because reports are means over replicas.
    """
    cluster.run("import numpy as np\nids = np.arange(1001.0)\nimport tensorflow as tf, jax")
    options = StepOptions(data="ids", epochs=2, batch=96, shuffle=shuffle)
    run = cluster.run(SUMS[strategy], step=options, strategy=strategy)
    orders = [np.arange(1001)] * 2
    if shuffle is not None:
        orders = [np.random.default_rng([shuffle, epoch]).permutation(1001) for epoch in (1, 2)]
    parts = run.summary.replicas if strategy == "mirrored" else 1
    shares = [_shares(order[i : i + 96], parts) for order in orders for i in range(0, 1001, 96)]
    for name, weigh in {"total": np.ones_like, "order": lambda a: np.arange(len(a))}.items():
        expected = [[(share * weigh(share)).sum() for share in step] for step in shares]
        seen = run.history[name][:parts]
        np.testing.assert_array_equal(seen, np.transpose(expected), name)


SUMS = {
    "mirrored": "places = tf.range(tf.shape(batch)[0])\n"
    "{'total': tf.reduce_sum(batch), "
    "'order': tf.reduce_sum(batch * tf.cast(places, batch.dtype))}",
    "pjrt": "{'total': batch.sum(), 'order': (batch * jax.numpy.arange(len(batch))).sum()}",
}


def _shares(rows: np.ndarray, parts: int) -> list[np.ndarray]:
    """Return the rows of a global batch for each replica."""
    return [rows] * parts if len(rows) % parts else np.split(rows, parts)


def test_run_stops_after_its_epochs_and_steps(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run("import numpy as np\nnumbers = np.arange(12.0)\nimport jax.numpy as jnp")
    options = StepOptions(data="numbers", epochs=2, batch=4, steps=5)
    run = cluster.run("loss = jnp.mean(batch)", step=options, strategy="pjrt")
    assert reported(run)["loss"] == [1.5, 5.5, 9.5, 1.5, 5.5]
    assert run.table("loss").lines()[-1].split()[1:] == ["5.500", "3.500"]
    assert "epoch 2  loss 3.5" in capsys.readouterr().out


SILENT = {"mirrored": "seen.assign_add(1.0)", "pjrt": "total = total + batch.sum()"}
NAMED = {
    "mirrored": """
with tf.GradientTape() as tape:
    cost = tf.reduce_mean(tf.cast(batch, tf.float32)) * seen
(slope,) = tape.gradient(cost, [seen])
seen.assign(seen)
""",
    "pjrt": """
cost, slope = jax.value_and_grad(lambda t: t * batch.mean())(total)
total = total + 0 * slope
print("traced")
""",
}


@pytest.mark.parametrize("strategy", [pytest.param("mirrored", marks=pytest.mark.full), "pjrt"])
def test_step_without_a_report_runs_and_a_loss_of_any_name_is_reported(
    cluster: nbdist.Cluster, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(
        "import jax, numpy as np, tensorflow as tf\nnumbers = np.arange(12.0)\n"
        "total = jax.numpy.ones(())\nseen = tf.Variable(1.0)",
        strategy="mirrored",
    )
    step = StepOptions(data="numbers", batch=4)
    run = cluster.run(SILENT[strategy], step=step, strategy=strategy)
    assert not reported(run)
    assert "step 3 of 3" in plain(capsys.readouterr().out)
    run = cluster.run(NAMED[strategy], step=step, strategy=strategy)
    value = {"mirrored": 4.0, "pjrt": 67.0}[strategy]
    np.testing.assert_allclose(reported(run)["cost"], [1.5 * value, 5.5 * value, 9.5 * value])


@pytest.mark.parametrize(
    ("definition", "batch"),
    [
        ("stream = tf.data.Dataset.range(10).map(lambda i: tf.cast(i, tf.float32))", 4),
        pytest.param(
            "stream = tf.data.Dataset.range(10).map(lambda i: tf.cast(i, tf.float32)).batch(4)",
            0,
            marks=pytest.mark.full,
        ),
        ("def stream():\n    for i in range(10):\n        yield np.float32(i)", 4),
        pytest.param("stream = [np.float32(i) for i in range(10)]", 4, marks=pytest.mark.full),
    ],
)
def test_supported_data_are_accepted(cluster: nbdist.Cluster, definition: str, batch: int) -> None:
    cluster.run(f"import numpy as np, tensorflow as tf, jax.numpy as jnp\n{definition}")
    options = StepOptions(data="stream", epochs=2, batch=batch)
    run = cluster.run("loss = jnp.sum(batch)", step=options, strategy="pjrt")
    assert reported(run)["loss"] == [6.0, 22.0, 17.0] * 2


INVALID = [
    ("loss = batch.mean()", {"data": "nowhere"}, "not defined on the workers: `nowhere`"),
    ("loss = thing(batch)", {}, r"`thing` \(line 2\)"),
    pytest.param(
        "loss = batch.mean()",
        {"data": "scalars", "batch": 0},
        "set the batch size with --batch",
        marks=pytest.mark.full,
    ),
    ("loss = batch.mean()", {"data": "nothing"}, "the data are empty"),
    pytest.param(
        "loss = batch.mean()",
        {"data": "none_at_all"},
        "the data are empty",
        marks=pytest.mark.full,
    ),
    ("loss = batch[0].mean()", {"data": "uneven"}, r"different numbers of samples: \[3, 4\]"),
    ("loss = batch.mean()", {"data": "once", "epochs": 2}, "can be read only once"),
    ("loss = batch.mean()", {"data": "number"}, "--data number has type int"),
    ("loss = batch", {}, r"reports `loss` of shape \(\d+,\): report scalars"),
    ("state = state[:1]\nloss = state.sum()", {}, r"`state` \(line 2\) is carried .* changes"),
]


@pytest.mark.parametrize(("cell", "options", "message"), INVALID)
def test_invalid_input_is_named(
    cluster: nbdist.Cluster, cell: str, options: dict[str, Any], message: str
) -> None:
    cluster.run(
        "import numpy as np\nscalars = np.arange(8.0)\nnothing = np.zeros((0,))\nnone_at_all = []\n"
        "uneven = np.zeros(3), np.zeros(4)\nonce = iter([np.zeros(4)])\nnumber = 7\n"
        "state = np.zeros(3)"
    )
    chosen = StepOptions(**{"data": "scalars", "batch": 4, **options})
    with pytest.raises(nbdist.CellError, match=message):
        cluster.run(cell, step=chosen, strategy="pjrt")
    assert cluster.run("1").results[0] == "1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0, "steps": -1}, "--epochs 0: use a whole number from 1\n--steps -1"),
        ({"data": "a b"}, "--data a b: use the name"),
    ],
)
def test_invalid_options_are_refused(
    cluster: nbdist.Cluster, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(nbdist.UsageError, match=message):
        cluster.run("loss = 1", step=StepOptions(**{"data": "x", **options}), strategy="pjrt")


def test_error_in_a_step_points_at_the_line_of_the_cell(cluster: nbdist.Cluster) -> None:
    cluster.run("import numpy as np\nscalars = np.arange(8.0)\nimport tensorflow as tf")
    options = StepOptions(data="scalars", batch=4)
    with pytest.raises(nbdist.CellError) as error:
        cluster.run("x = batch\nloss = x / {}['no']", step=options, strategy="pjrt", label=4)
    assert re.search(r"In\[4\].*line 3", plain("\n".join(error.value.traceback)))
    with pytest.raises(nbdist.CellError, match="line 3, in step"):
        cluster.run("x = batch\nloss = tf.reshape(x, (3,))", step=options, strategy="mirrored")


def test_control_flow_may_depend_on_the_data(cluster: nbdist.Cluster) -> None:
    """AutoGraph converts `if` and `while` on tensors into graph operations."""
    cluster.run("import numpy as np, tensorflow as tf\nones = np.ones(8)")
    cell = """
total = tf.reduce_sum(batch)
halvings = 0
while total > 1.0:
    total = total / 2
    halvings += 1
if halvings > 100:
    result = tf.constant(0)
else:
    result = tf.constant(1)
{"loss": total, "result": result}
"""
    run = cluster.run(cell, step=StepOptions(data="ones", batch=8), strategy="mirrored")
    assert run.last("result") == 1.0
