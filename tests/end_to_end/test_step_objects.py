"""Steps with state in Python objects: the numbers of one device, or an error."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from nbdist.records import Saving, StepOptions
from tests import clusters, object_programs, references
from tests.clusters import evaluate
from tests.object_programs import TRAININGS
from tests.references import reported

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.references import Outcome

FULL = pytest.mark.full
TRACERS = """
import gc, types
shell = {"In", "Out", "exit", "quit", "get_ipython", "strategy", "mesh"}
waiting = [v for n, v in globals().items() if not n.startswith("_") and n not in shell]
met, found = {id(globals())}, 0
never = types.ModuleType, types.TracebackType, types.FrameType  # IPython keeps the last error's
while waiting:
    thing = waiting.pop()
    is_module = isinstance(thing, never) or type(thing) is dict and "__spec__" in thing
    is_class = isinstance(thing, type) and thing.__module__ != "__main__"
    if id(thing) not in met and not is_module and not is_class:
        met.add(id(thing))
        found += isinstance(thing, jax.core.Tracer)
        if type(thing).__module__.partition(".")[0] not in ("jax", "jaxlib", "weakref"):
            waiting.extend(gc.get_referents(thing))
found
"""
"""Count the tracers reachable from the user's variables without passing through JAX objects."""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param, framework="jax") as running:
        running.run(object_programs.SETUP, strategy="pjrt")
        yield running


@cache
def reference_outcomes() -> dict[str, Outcome]:
    return references.by_hand(TRAININGS)


def assert_close(ours: Any, theirs: Any) -> None:
    """Check that two nested lists have equal structure and equal numbers up to rounding."""
    assert json.dumps(ours, default=float).count("[") == json.dumps(theirs).count("[")
    flat = [np.hstack([np.ravel(part) for part in _numbers(value)]) for value in (ours, theirs)]
    np.testing.assert_allclose(*flat, rtol=1e-9, atol=1e-12)


def _numbers(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for part in value:
            yield from _numbers(part)
    else:
        yield value


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=FULL if name == "trainer" else ()) for name in TRAININGS],
)  # the resumed run trains the trainer
def test_objects_give_the_numbers_of_one_device(cluster: nbdist.Cluster, name: str) -> None:
    training = TRAININGS[name]
    cluster.run(training.setup, strategy="pjrt")
    options = StepOptions(data="train", epochs=training.epochs, batch=training.batch)
    run = cluster.run(training.step, step=options, strategy="pjrt")
    assert_close(reported(run)["loss"], reference_outcomes()[name].reports["loss"])
    cluster.run(f"outcome = {training.after}", strategy="pjrt")
    for objects in cluster.pull(["outcome"]).values():
        assert_close(objects["outcome"], reference_outcomes()[name].after)
    assert evaluate(cluster, TRACERS) == "0"


REFUSALS = """
import queue
class Model:
    def __init__(self):
        self.params, self.history, self.none, self.name = start(), [], None, "a"
        self.seen, self.wide, self.count = queue.SimpleQueue(), jnp.zeros(2, jnp.float32), 1
    def later(self):
        if not hasattr(self, "moments"):
            self.moments = start()
        return self.params["b"]
    def flip(self, batch):
        if self.count % 2:
            self.count += 1
        self.count += 1
        return loss_of(self.params, batch)
    def noting(self, w, y):
        self.wide = w * y[:2]
        return self.wide.sum()
    def sized(self, batch):
        if len(batch[1]) < 20:
            self.params = descend(self.params, batch)[1]
        return loss_of(self.params, batch)
model = Model()
by_name = start()
def reads_name(batch):
    return loss_of(by_name, batch)
def sets_name(batch):
    global by_name
    loss, by_name = descend(by_name, batch)
    return loss
class Reader:
    def loss(self, batch):
        return loss_of(by_name, batch)
reader = Reader()
"""
MODEL_STATE = (
    "[plain(model.params), model.history, model.none, model.name, model.count, plain(by_name)]"
)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            "loss = loss_of(model.params, batch)\nmodel.history.append(loss)",
            r"`model\.history\[0\]` \(line 2\) is new, .* float64\[\].*report",
        ),
        pytest.param(
            "loss = loss_of(model.params, batch)\nmodel.last = loss",
            r"`model\.last` \(line 2\) is new, and the step sets it to float64\[\]",
            marks=FULL,
        ),
        pytest.param(
            "loss = model.later()",
            r"`model\.moments` \(line 2\) is new, .* a dict with arrays",
            marks=FULL,
        ),
        (
            "loss = loss_of(model.params, batch)\nmodel.none = loss",
            r"`model\.none` \(line 2\) changes from None to float64\[\] in the step",
        ),
        pytest.param(
            "loss = loss_of(model.params, batch)\nmodel.wide = jnp.append(model.wide, 1)",
            r"`model\.wide` \(line 2\) .* the value changes from float32\[2\] to float32\[3\]",
            marks=FULL,
        ),
        pytest.param(
            "loss = loss_of(model.params, batch)\nmodel.params['c'] = loss",
            r"`model\.params\['c'\]` \(line 2\) is new, and the step",
            marks=FULL,
        ),
        pytest.param(
            "loss = loss_of(model.params, batch)\nmodel.params = {**model.params, 'c': loss}",
            r"`model\.params` \(line 2\) .* its structure changes \(\['c'\] is new\)",
            marks=FULL,
        ),
        pytest.param(
            "loss = loss_of(model.params, batch)\nmodel.name = 'b'",
            r"`model\.name` \(line 2\) .* the value changes from 'a' to 'b'",
            marks=FULL,
        ),
        (
            "loss = loss_of(model.params, batch)\ndel model.wide",
            r"`model\.wide` \(line 2\) is deleted by the step",
        ),
        (
            "loss = loss_of(model.params, batch)\nmodel.seen.put(loss)",
            r"`model\.seen` contains a value of the step .* cannot be carried",
        ),
        (
            "loss = jax.grad(model.noting)(1.0, batch[1])",
            r"`model\.wide` \(line 2\) is set inside of jax\.grad, .* has_aux=True",
        ),
        pytest.param(
            "loss = model.flip(batch)", r"TracerBoolConversionError.*jax\.lax\.cond", marks=FULL
        ),
        ("loss = model.sized(batch)", r"`model\.params` is changed by the step for some batches"),
        (
            "loss, by_name = descend(by_name, batch)\nloss = loss + reads_name(batch)",
            r"`reads_name` \(line 3\) reads `by_name` from outside",
        ),
        pytest.param(
            "loss, by_name = descend(by_name, batch)\nloss = loss + sets_name(batch)",
            r"`sets_name` \(line 3\) reads `by_name` from outside",
            marks=FULL,
        ),
        pytest.param(
            "loss, by_name = descend(by_name, batch)\nloss = loss + reader.loss(batch)",
            r"`reader` \(line 3\) reads `by_name` from outside",
            marks=FULL,
        ),
    ],
)
def test_state_that_cannot_be_carried_is_refused(
    cluster: nbdist.Cluster, cell: str, message: str
) -> None:
    """The error before the first step names the line; objects are unchanged, without tracers."""
    cluster.run(REFUSALS + f"before = str({MODEL_STATE})", strategy="pjrt")
    with pytest.raises(nbdist.CellError, match=f"(?s){message}"):
        cluster.run(cell, step=StepOptions(data="train", batch=20), strategy="pjrt")
    if "sized" not in cell:  # that cell makes steps before the error
        assert evaluate(cluster, f"str({MODEL_STATE}) == before") == "True"
    if "seen" not in cell:  # nbdist does not inspect queues
        assert evaluate(cluster, TRACERS) == "0"


def test_run_resumes_objects_from_a_checkpoint(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """A checked, guarded, saved and resumed run ends with the numbers of one device."""
    training = TRAININGS["trainer"]
    first_options = StepOptions(data="train", epochs=1, batch=training.batch, check=True)
    all_options = StepOptions(data="train", epochs=training.epochs, batch=training.batch)
    for options, resume in ((first_options, False), (all_options, True)):
        cluster.run(training.setup, strategy="pjrt")
        saving = Saving(folder=str(tmp_path), every_steps=2, keep=2, resume=resume)
        cluster.run(training.step, step=options, strategy="pjrt", saving=saving, guard=1)
    cluster.run(f"outcome = {training.after}", strategy="pjrt")
    for objects in cluster.pull(["outcome"]).values():
        assert_close(objects["outcome"], reference_outcomes()["trainer"].after)


def test_rank_with_a_different_object_is_named(cluster: nbdist.Cluster) -> None:
    """The check before the first step or the guard reports the difference."""
    cell = "loss = trainer.step(batch)"
    options = StepOptions(data="train", batch=16)
    differing = object_programs.TRAINER + "\ntrainer.params['w'] = np.full(3, 0.1 * rank)"
    cluster.run(differing, strategy="pjrt")
    with pytest.raises(nbdist.CellError, match=r"not the same on all ranks: `trainer` \(line 2\)"):
        cluster.run(cell, step=options, strategy="pjrt")
    own = (
        "own = jax.make_array_from_single_device_arrays((), jax.NamedSharding(mesh, jax.P()),"
        "[jax.device_put(np.float64(1e-7 * rank), jax.local_devices()[0])])"
    )
    cluster.run(f"{object_programs.TRAINER}\n{own}", strategy="pjrt", guard=0)
    with pytest.raises(nbdist.CellError, match=r"a different `trainer\.ema\['b'\]`"):
        cluster.run(
            f"trainer.ema['b'] = trainer.ema['b'] + own\n{cell}",
            step=options,
            strategy="pjrt",
            guard=1,
        )


SHARED = """
class Learner:
    def __init__(self):
        self.params = start()
        self.first, self.steps = self.params, 0
        self.table = np.arange(4.0)
    def step(self, batch):
        loss, self.params = descend(self.params, batch)
        self.steps += 1
        return loss + 0 * self.table.sum()
learner, seen, shapes = Learner(), [], []
best = learner.params["w"]
x, y = train
def data():
    seen.append((learner.steps, float(learner.params["w"][0])))
    for part in (slice(0, 20), slice(20, 40)):
        yield x[part], y[part]
"""


def test_objects_are_current_between_epochs_and_runs(cluster: nbdist.Cluster) -> None:
    """Data read the state of the previous epoch; other references survive the donation."""
    cluster.run(SHARED, strategy="pjrt")
    cell = "shapes.append(batch[0].shape)\nloss = learner.step(batch)"
    for _ in range(2):
        cluster.run(cell, step=StepOptions(data="data", epochs=2), strategy="pjrt")
    assert (
        evaluate(cluster, "shapes") == "[(20, 3), (20, 3)]"
    )  # one trace for each run, as under jax.jit
    expression = (
        "float(best[0]), float(learner.first['w'][0]), learner.steps, type(learner.steps).__name__"
    )
    assert evaluate(cluster, expression) == "(0.1, 0.1, 8, 'int')"
    assert evaluate(cluster, "sorted({steps for steps, _ in seen})[:3]") == "[0, 2, 4]"
    assert evaluate(cluster, "len({value for _, value in seen})") == "4"


MODULE = """
import jax, jax.numpy as jnp
scale = jnp.ones(())
class Trainer:
    def __init__(self, params):
        self.params = params
    def step(self, loss_of, batch):
        global scale
        loss, grads = jax.value_and_grad(loss_of)(self.params, batch)
        self.params = jax.tree.map(lambda p, g: p - 0.1 * scale * g, self.params, grads)
        scale = scale * 0.5
        return loss
"""


def test_state_in_a_user_module_is_carried(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    (tmp_path / "own_trainer.py").write_text(MODULE)
    cluster.run(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport own_trainer")
    cluster.run("model = own_trainer.Trainer(start())", strategy="pjrt")
    cell = "loss = model.step(loss_of, batch)"
    cluster.run(cell, step=StepOptions(data="train", batch=24), strategy="pjrt")
    reference = "other, own_trainer.scale = own_trainer.Trainer(start()), jnp.ones(())\n"
    reference += "for i in (0, 24): other.step(loss_of, (train[0][i:i + 24], train[1][i:i + 24]))\n"
    assert evaluate(cluster, "float(own_trainer.scale)") == "0.25"
    alike = "bool(jnp.allclose(model.params['w'], other.params['w'], rtol=1e-9))"
    assert evaluate(cluster, reference + alike) == "True"
