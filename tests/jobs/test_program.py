"""Text of exported programs, and cells that cannot be exported."""

from __future__ import annotations

import ast
import os
import pathlib
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec import structs

from nbdist.cells.dependencies import CellNames, Entry, names_of
from nbdist.cells.options import cell_options
from nbdist.cells.parse import parse_cell
from nbdist.errors import UsageError
from nbdist.jobs.program import program_of
from nbdist.records import ClusterRequest, Host
from tests import plans

if TYPE_CHECKING:
    from nbdist.cells.dependencies import OwnTexts
    from nbdist.jobs.program import Program
    from nbdist.records import StrategyName

STEP = "w = w - 0.1 * batch.mean()\nloss = w\n"


class Notebook:
    """Cells of a notebook on two workers, as the journal has them."""

    def __init__(self, strategy: StrategyName = "pjrt") -> None:
        self.entries: list[Entry] = []
        self._strategy = strategy

    def cell(self, source: str, **options: Any) -> Entry:
        """Add a cell; `ranks`, `loops` and `strategy` are those of the entry."""
        number = len(self.entries) + 1
        own = {name: options.pop(name) for name in ("ranks", "loops") if name in options}
        request = parse_cell(
            source,
            cell_options(options),
            number=number,
            label=number,
            strategy=options.get("strategy", self._strategy),
            header="%%dist_run",
        )
        kind = "plain" if request.step is None else "step"
        entry = Entry(
            "cell" if kind == "plain" else "step",
            names_of(request.source),
            **{"ranks": (0, 1), "request": request, **own},
        )
        self.entries.append(entry)
        return entry

    def push(self, **objects: object) -> None:
        names = CellNames(binds=tuple(objects), sure=tuple(objects))
        self.entries.append(Entry("push", names, (0, 1), payload=pickle.dumps(objects)))

    def program(self, *, own: OwnTexts | None = None, **cluster: Any) -> Program:
        request = ClusterRequest(
            hosts=(Host(), Host()), **{"frameworks": ("jax",), "seed": 3, **cluster}
        )
        return program_of(self.entries, request, own)


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


def refusal(notebook: Notebook) -> str:
    with pytest.raises(UsageError) as caught:
        notebook.program()
    return str(caught.value)


def test_program_has_imports_functions_and_arguments(notebook: Notebook) -> None:
    notebook.cell("import jax.numpy as jnp\nimport optax\n# A rate.\nlr = 0.5\nw = jnp.ones(())")
    notebook.cell("def scaled(x):\n    return 2 * x\ntrain = jnp.arange(8.0)")
    notebook.cell(STEP, data="train", batch=4, epochs=2, seed=1, check=True, guard=5)
    text = notebook.program().text
    ast.parse(text)
    assert text.index("import optax") < text.index("def parse_arguments") < text.index("def scaled")
    assert "\nlr = args.learning_rate\n" in text
    assert '"--learning-rate", type=float, default=0.5' in text
    assert "def train_step(batch):\n    global w\n    w = w - 0.1 * batch.mean()\n" in text
    call = ast.unparse(ast.parse(text).body[-2])
    assert call.startswith("job.train(train_step, check=True, data='train', epochs=args.epochs")
    assert "batch=args.batch, seed=1, guard=5, checkpoint=args.checkpoint" in call
    assert text.endswith("\njob.close()\n")


def test_names_of_the_cells_keep_their_meaning(notebook: Notebook) -> None:
    notebook.cell("import jax.numpy as jnp\nargs = job = jnp.ones(())\nw = args + job")
    notebook.cell("train = jnp.arange(8.0)")
    notebook.cell(STEP, data="train", batch=4)
    text = notebook.program().text
    assert 'job_ = nbdist.script("pjrt", seed=3)' in text
    assert "epochs=args_.epochs" in text


def test_functions_are_plain_code_and_other_statements_blocks(notebook: Notebook) -> None:
    notebook.cell(
        "import jax.numpy as jnp\nw = jnp.ones(())\n\n# Twice.\ndef twice(x):\n    return 2 * x\n"
        "def of_value(x=w):\n    return x\nw = twice(w)\ntrain = [of_value()]"
    )
    notebook.cell(STEP, data="train", batch=4)
    assert (
        "# Cell [1]\n# Twice.\ndef twice(x):\n    return 2 * x\n\n\n"
        "# Cell [1], continued\nwith job.cell():\n    w = jnp.ones(())\n\n"
        "    def of_value(x=w):\n        return x\n    w = twice(w)\n    train = [of_value()]\n"
    ) in notebook.program().text


def test_names_of_star_imports_are_known(notebook: Notebook) -> None:
    notebook.cell("from jax.numpy import *")
    notebook.cell("from math import *\nx = 1")
    notebook.cell("w = ones(()) * pi\ntrain = arange(8.0)")
    notebook.cell(STEP, data="train", batch=4)
    text = notebook.program().text
    places = [text.index(part) for part in ("numpy import *", "math import *", "ones(())")]
    assert text.index("def parse_arguments") < places[0]
    assert places == sorted(places)


def test_program_with_sets_has_the_order_of_the_notebook(notebook: Notebook) -> None:
    notebook.cell("import jax\nw = float(len(set('abc')))\ntrain = [w]")
    notebook.cell(STEP, data="train", batch=4)
    head = notebook.program().text.partition("def parse_arguments")[0]
    assert (
        'if os.environ.get("PYTHONHASHSEED") != "0":  # it decides the order of sets\n'
        '    os.environ["PYTHONHASHSEED"] = "0"\n'
        "    os.execv(sys.executable, sys.orig_argv)\n"
    ) in head
    assert head.index("import sys") < head.index("os.execv") < head.index("import jax")


def test_program_with_sets_in_own_modules_has_their_order(notebook: Notebook) -> None:
    notebook.cell("import helpers\ntrain = [helpers.words()]")
    notebook.cell(STEP, data="train", batch=4)
    assert "os.execv" not in notebook.program().text
    texts = {"helpers": ("def words():\n    return list({'a', 'b'})",)}
    assert "os.execv" in notebook.program(own=texts).text


def test_imports_with_a_handler_are_optional(notebook: Notebook) -> None:
    notebook.cell("import jax\ntry:\n    import cupy.cuda, jax\nexcept ImportError:\n    cupy = 0")
    notebook.cell("try:\n    import a\nfinally:\n    train = [1.0]\nuse = (cupy, a)")
    notebook.cell(f"use\n{STEP}", data="train", batch=4)
    program = notebook.program()
    assert {"a", "cupy", "jax"} <= {*program.imports}
    assert program.optional == {"cupy"}


def test_names_with_several_meanings_are_imported_in_their_cells(notebook: Notebook) -> None:
    notebook.cell("import numpy as np\nimport jax\nx = np.arange(8.0)")
    notebook.cell("import jax.numpy as np\nw = np.ones(())")
    notebook.cell("def grad(f):\n    return f\ng = grad(1)")
    notebook.cell("from jax import grad\ntrain = x * w * g\ngrad(abs)")
    notebook.cell(STEP, data="train", batch=4)
    text = notebook.program().text
    head = text.partition("# Cell [1]")[0]
    assert "import jax\n" in head
    assert "import numpy as np" not in head
    assert "from jax import grad" not in head
    order = ["import numpy as np", "x = np.arange", "import jax.numpy as np", "w = np.ones"]
    order += ["def grad(f)", "g = grad(1)", "from jax import grad", "train = x"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_definitions_stay_behind_what_they_compute_from(notebook: Notebook) -> None:
    notebook.cell(
        "import numpy as np\nnp.random.seed(0)\nsizes = [4]\n"
        "class Config:\n    seed = np.random.randint(1000)\n    name: str = 'a'\n"
        "class Plain:\n    name: str = 'a'\n"
        "train = np.ones(8) * Config.seed"
    )
    notebook.cell("sizes.append(8)\ndef init(key, n=len(sizes)):\n    return n\nw = init(0)")
    notebook.cell("def late(xs=sizes):\n    return xs\nsizes.append(late())")
    notebook.cell(STEP, data="train", batch=4)
    text = notebook.program().text
    assert text.index("np.random.seed(0)") < text.index("class Config") < text.index("train = np")
    assert text.index("class Plain") < text.index("np.random.seed(0)")
    assert text.index("sizes.append(8)") < text.index("def init(")


LOOP = """
losses = []
def epoch(w):
    for x in train:
        w = w - jax.grad(loss)(w, x)
    return w
for i in range(epochs):
    w = epoch(w)
others()
"""


def test_training_loops_are_marked(notebook: Notebook) -> None:
    notebook.cell("import jax\nepochs = 3\nw, train = 1.0, [1.0]")
    notebook.cell("def loss(w, x):\n    return sum(w * i for i in (x, x))")
    notebook.cell("def others():\n    for i in []:\n        pass")
    notebook.cell(LOOP, loops=True)
    text = notebook.program().text
    assert "epochs = args.epochs\n" in text
    assert "@job.lift\ndef epoch(w):" in text
    assert text.count("@job.lift") == 1
    assert (
        "def train_loop():\n    global i, losses, w\n    losses = []\n    for i in range(epochs):\n"
    ) in text
    assert "\njob.run(train_loop" in text


TRAINER = """
class Trainer:
    def __init__(self, loss):
        self._step = jax.jit(self.step)
        self.loss = loss
    def step(self, w, x):
        return w - jax.grad(self.loss)(w, x)
    def train_epoch(self, w):
        for x in train:
            w = self._step(w, x)
        return w
"""
CALLER = """
class Caller:
    def __init__(self, f):
        self.call = f
    def fit(self, w):
        for x in train:
            w = self.call(w, x)
"""
HELPERS = """
import jax
def make(lr):
    def update(w, x):
        return w - lr * jax.grad(abs)(w)
    return update, abs
def train_step(w, x):
    return make(1.0)[0](w, x)
"""


@pytest.mark.parametrize(
    ("definitions", "loop"),
    [
        (f"{TRAINER}trainer = Trainer(abs)", "for i in range(3):\n    w = trainer.train_epoch(w)"),
        ("from helpers import train_step", "for x in train:\n    w = train_step(w, x)"),
        ("import helpers\nup, look = helpers.make(0.1)", "for x in train:\n    w = up(w, x)"),
        ("fns = {}\nfns['step'] = jax.grad(abs)", "for x in train:\n    w = fns['step'](w)"),
    ],
)
def test_loops_that_ran_as_steps_become_functions(
    notebook: Notebook, definitions: str, loop: str
) -> None:
    notebook.cell("import jax\nw, train = 1.0, [1.0]")
    notebook.cell(definitions)
    notebook.cell(loop, loops=True)
    text = notebook.program(own={"helpers": [HELPERS]}).text
    assert "\ndef train_loop():\n" in text
    assert "with job.cell" not in text.partition("# Cell [3]")[2]
    assert "checkpoint=args.checkpoint" in text.partition("\njob.run(")[2]
    assert ("@job.lift\nclass Trainer:" in text) == ("Trainer" in definitions)


@pytest.mark.parametrize(
    ("caller", "call"),
    [
        ("def fit(f, w):\n    for x in train:\n        w = f(w, x)", "fit(train_step, w)"),
        (CALLER, "Caller(train_step).fit(w)"),
    ],
)
def test_functions_that_receive_their_step_are_marked(
    notebook: Notebook, caller: str, call: str
) -> None:
    notebook.cell("import jax\nfrom helpers import train_step\nw, train = 1.0, [1.0]")
    notebook.cell(caller)
    notebook.cell(call, loops=True)
    assert "@job.lift\n" in notebook.program(own={"helpers": [HELPERS]}).text


def test_loops_that_ran_as_written_stay_blocks(notebook: Notebook) -> None:
    notebook.cell("import jax\nw = 1.0")
    notebook.cell("for i in [1.0]:\n    w -= jax.grad(abs)(w)", loops=False)
    notebook.cell("w -= 1", loops=True)
    assert "train_loop" not in notebook.program().text


def test_imports_of_program_and_notebook_are_one(notebook: Notebook) -> None:
    notebook.cell("import argparse, os, sys\nimport keras\nw = 1.0")
    notebook.cell("w -= 1", loops=True)
    head = notebook.program().text.partition("\nos.environ[")[0]
    assert head.endswith('"""\n\nimport argparse\nimport os\nimport sys\n')


@pytest.mark.processes
@pytest.mark.parametrize(
    "imports", ["import os, time", "import time, os as system, sys\nimport os"]
)
def test_program_with_imports_on_one_line_starts(notebook: Notebook, imports: str) -> None:
    notebook.cell(f"{imports}\nimport keras\nnames = {{1, 2}}\nw = float(len(names))")
    notebook.cell("w -= 1", loops=True)
    ended = subprocess.run(
        [sys.executable, "-c", notebook.program().text, "--help"],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "--checkpoint" in ended.stdout


def test_earlier_training_has_checkpoints_of_its_own(notebook: Notebook) -> None:
    notebook.cell("import jax\nw, train = 1.0, [1.0]")
    notebook.cell("for x in train:\n    w -= jax.grad(abs)(x)", loops=True)
    notebook.cell(STEP, data="train", epochs=2)
    notebook.cell("for x in train:\n    w -= jax.grad(abs)(x)", loops=True)
    text = notebook.program().text
    assert 'checkpoint=args.checkpoint and f"{args.checkpoint}/cell-2"' in text
    assert 'checkpoint=args.checkpoint and f"{args.checkpoint}/cell-3"' in text
    assert text.count("resume=args.checkpoint is not None") == 3
    assert text.count("cell-") == 2


@pytest.mark.parametrize(
    ("source", "rate"),
    [
        ("optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))", None),
        ("optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(1e-2))", 1e-2),
        ("optax.ema(0.999)", None),
        ("optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)", None),
        ("optax.contrib.schedule_free_adamw(1e-3)", None),
        ("keras.optimizers.Adam(1e-3)", 1e-3),
    ],
)
def test_only_learning_rates_are_arguments(
    notebook: Notebook, source: str, rate: float | None
) -> None:
    notebook.cell(f"import keras, optax\nschedule, w = 0.1, 1.0\ntx = {source}")
    notebook.cell("w -= 1\ntx", loops=True)
    text = notebook.program().text
    assert ("--learning-rate" in text) == (rate is not None)
    assert rate is None or f"default={rate}" in text


def test_loop_that_is_no_function_is_refused(notebook: Notebook) -> None:
    notebook.cell("import jax\nw = 1.0")
    loop = "for i in [1.0]:\n    from math import *\n    w -= jax.grad(abs)(w)"
    notebook.cell(loop, loops=True)
    assert "cannot export cell [2]: its training loop becomes a function" in refusal(notebook)


def test_annotated_names_of_a_training_loop_are_exported(notebook: Notebook) -> None:
    notebook.cell("import jax\nw = 1.0")
    notebook.cell("v: float = 1.0\nfor i in [v]:\n    w -= jax.grad(abs)(w)", loops=True)
    assert compile(notebook.program().text, "train.py", "exec")


def test_names_that_nbdist_defines_are_set(notebook: Notebook) -> None:
    notebook.cell("import jax\nw = jax.numpy.ones(()) * world_size\nprint(rank, mesh)")
    notebook.cell("train = jax.numpy.arange(8.0)")
    notebook.cell(STEP, data="train", batch=4)
    assert "\nrank = job.rank\nworld_size = job.world_size\nmesh = job.mesh\n" in (
        notebook.program().text
    )


def test_fit_takes_its_arguments_and_checkpoints() -> None:
    notebook = Notebook("mirrored")
    notebook.cell("import keras\nmodel = keras.Model()")
    notebook.push(x=np.ones(3))
    notebook.cell(
        "model.fit(x, epochs=3, batch_size=8)",
        checkpoint="runs",
        save_every="50",
        precision="float16",
    )
    text = notebook.program(frameworks=("tensorflow",)).text
    assert "model.fit(x, epochs=args.epochs, batch_size=args.batch)" in text
    assert 'os.environ["KERAS_BACKEND"] = "tensorflow"' in text
    assert 'save_every="50"' in text
    assert "default='checkpoints'" in ast.unparse(ast.parse(text))
    assert "precision='float16'" in text


def test_arguments_replace_constants_of_other_cells() -> None:
    notebook = Notebook("mirrored")
    notebook.cell("import keras\nEPOCHS, unused = 5, 1\nBATCH_SIZE = 64\nLEARNING_RATE = 1e-3")
    notebook.cell("model = keras.Model()\nx = keras.random.normal((BATCH_SIZE, 2))")
    notebook.cell("model.fit(x, epochs=EPOCHS, batch_size=BATCH_SIZE, verbose=LEARNING_RATE)")
    text = notebook.program(frameworks=("tensorflow",)).text
    assert "BATCH_SIZE = args.batch\n" in text
    assert "LEARNING_RATE = args.learning_rate\n" in text
    assert "EPOCHS, unused = 5, 1" in text
    assert '"--batch", type=int, default=64' in text
    assert "--epochs" not in text


def test_constant_of_two_arguments_stays() -> None:
    notebook = Notebook("mirrored")
    notebook.cell("import keras\nN = 5\nmodel = keras.Model()")
    notebook.cell("model.fit(x := [1.0], epochs=N, batch_size=N)")
    assert "N = 5\n" in notebook.program(frameworks=("tensorflow",)).text


def test_pushed_objects_become_arrays_and_code(notebook: Notebook) -> None:
    notebook.push(train=(np.arange(4.0), {"y": np.float32(2)}), rate=0.5, unused=np.ones(9))
    notebook.cell("import jax.numpy as jnp\nw = jnp.ones(()) * rate")
    notebook.cell(STEP, data="train", batch=4)
    program = notebook.program()
    assert 'train = (data["train_0"], {\'y\': data["train_1_0"][()]})\nrate = 0.5' in program.text
    assert 'data = numpy.load(args.data / "data.npz")' in program.text
    assert program.data.size_bytes == 4 * 8 + 4


def test_packages_that_read_the_data_are_imported(notebook: Notebook) -> None:
    notebook.push(train=np.arange(4.0), words=["word"] * 1000, json={"a": 1})
    notebook.cell("import jax.numpy as jnp\nw = jnp.ones(()) * len(words) * json['a']")
    notebook.cell(STEP, data="train", batch=4)
    program = notebook.program()
    assert "\nimport json as json_\n" in program.text
    assert 'words = json_.loads((args.data / "data_words.json").read_text())' in program.text
    assert {"numpy", "json"} <= {*program.imports}
    assert "default=pathlib.Path(__file__).parent" in program.text


def test_objects_that_the_program_does_not_read_are_no_obstacle(notebook: Notebook) -> None:
    notebook.push(train=np.arange(4.0), path=pathlib.Path())
    notebook.cell("import jax.numpy as jnp\nw = jnp.ones(())")
    notebook.cell(STEP, data="train", batch=4)
    assert "path" not in notebook.program().text.split("# Data of the notebook")[1]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("w = 1.0\n!ls", "cell [1], line 3: `!ls` is no Python: move it to a cell"),
        ("%time w = 1.0", "cell [1], line 2: `%time w = 1.0` is no Python"),
        ("import ipywidgets\nw = 1.0", "cell [1], line 2: `ipywidgets` needs a notebook"),
        ("from IPython.display import HTML\nw = 1.0", "line 2: `IPython.display` needs a notebook"),
        (
            "from tqdm.notebook import tqdm\nw = 1.0",
            "`tqdm.notebook` needs a notebook, and `tqdm.auto` does not",
        ),
        ("from google.colab import drive\nw = 1.0", "`google.colab` needs a notebook"),
        ("w = 1.0\ndisplay(w)", "cell [1], line 3: `display` needs a notebook"),
        ("w = 1.0\nw = gone + w", "cell [1], line 3: no cell of these workers defines `gone`"),
    ],
)
def test_cells_that_need_the_notebook_are_refused(
    notebook: Notebook, cell: str, message: str
) -> None:
    notebook.cell(cell)
    notebook.cell("train = [1.0]")
    notebook.cell(STEP, data="train", batch=1)
    assert message in refusal(notebook)


def test_cells_of_some_ranks_and_of_another_strategy_are_refused(notebook: Notebook) -> None:
    notebook.cell("w = 1.0", ranks=(0,))
    notebook.cell("train = [1.0]", strategy="mirrored")
    notebook.cell(STEP, data="train", batch=1)
    text = refusal(notebook)
    assert "cell [1]: it ran on some ranks only" in text
    assert "cell [2]: it ran under mirrored, and the training under pjrt" in text


def test_await_is_refused(notebook: Notebook) -> None:
    notebook.cell("w = 1.0\nawait w", ranks=(0, 1))
    notebook.cell("train = [1.0]")
    notebook.cell(STEP, data="train", batch=1)
    assert "cell [1]: it uses `await`" in refusal(notebook)


def test_program_has_the_layouts_of_its_cells(notebook: Notebook) -> None:
    fixed = "data=1,tensor=2,zero=0,remat=none,schedule=1f1b"
    plan = plans.made("both")
    notebook.cell("w = 1.0\ntrain = [1.0]")
    notebook.cell(STEP, data="train", batch=1, fix=fixed, budget="2MB")
    notebook.entries[-1] = structs.replace(notebook.entries[-1], plan=plan)
    notebook.cell(STEP, data="train", batch=1, plan=plan)
    notebook.cell("model.fit(train)\nmodel = w", fix="zero=3", check=True, strategy="pjrt")
    notebook.entries[-1] = structs.replace(notebook.entries[-1], trained=True)
    program = notebook.program()
    assert f'plan="plan-2.json",\n    fix="{fixed}",\n    budget=2_000_000' in program.text
    assert 'fix="zero=3"' in program.text
    assert "check=True" in program.text
    assert program.plans == {"plan-2.json": plan, "plan-3.json": plan}


def test_data_that_no_cell_defines_are_refused(notebook: Notebook) -> None:
    notebook.cell("w = 1.0")
    notebook.cell(STEP, data="train", batch=1)
    assert "cell [2]: no cell of these workers defines `train` (--data)" in refusal(notebook)


@pytest.mark.parametrize(
    ("before", "between", "has_option"),
    [
        ("epochs = 2", "", True),
        ("epochs = 2", "print(epochs)", False),
        ("epochs = 2", "epochs = epochs + 1", False),
        ("def count(): return epochs\nepochs = 2", "", False),
    ],
)
def test_number_that_is_assigned_twice_is_an_option_if_only_the_last_value_is_read(
    before: str, between: str, has_option: bool
) -> None:
    notebook = Notebook()
    notebook.cell(before)
    notebook.cell(f"{between}\nw = 0.0")
    notebook.cell("epochs = 5")
    notebook.cell("for i in range(epochs):\n    w = w + 1", loops=True)
    program = notebook.program()
    assert ("--epochs" in program.flags) == has_option
    assert ("epochs = args.epochs" in program.text) == has_option
    assert ("default=5" in program.text) == has_option
    if not has_option:
        assert "epochs = 5" in program.text
