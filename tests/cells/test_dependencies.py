"""Selection of the cells to replay, from the names that they read and bind."""

from __future__ import annotations

import msgspec
import pytest

from nbdist.cells.dependencies import CellNames, Entry, names_of, needed
from nbdist.errors import ReplayError
from nbdist.records import CellRequest


def cell(label: int, source: str, *, once: bool = False, ranks: tuple[int, ...] = (0, 1)) -> Entry:
    request = CellRequest(number=label, source=source, label=label, strategy=None, awaits=False)
    return Entry("cell", names_of(source), ranks, request, once=once)


def step(label: int, trains: str, reads: str = "") -> Entry:
    names = CellNames(reads=tuple(reads.split()), trains=tuple(trains.split()))
    request = CellRequest(number=label, source="", label=label, strategy=None, awaits=False)
    return Entry("step", names, (0, 1), request)


def replayed(entries: list[Entry], reads: str, saved: str = "") -> list[str]:
    run = CellNames(reads=tuple(reads.split()))
    return [entry.place for entry in needed(entries, run, saved.split(), 2).entries]


def test_names_decide_which_cells_are_replayed() -> None:
    entries = [
        cell(1, "import numpy as np"),
        cell(2, "x = np.ones(3)"),
        cell(3, "unrelated = 1"),
        cell(4, "y = unrelated + 1"),
        cell(5, "def f():\n    return x"),
    ]
    assert replayed(entries, "f") == ["[1]", "[2]", "[5]"]
    assert replayed(entries, "y") == ["[3]", "[4]"]
    assert replayed(entries, "elsewhere") == []


def test_star_imports_are_always_replayed() -> None:
    entries = [cell(1, "from math import *"), cell(2, "from numpy import *"), cell(3, "x = pi")]
    assert replayed(entries, "x") == ["[1]", "[2]", "[3]"]


def test_a_cell_that_changes_parts_of_an_object_is_replayed() -> None:
    entries = [
        cell(1, "base = build()"),
        cell(2, "for layer in base.layers[:-2]:\n    layer.trainable = False"),
        cell(3, "for layer in base.layers:\n    print(layer.name)"),
        cell(4, "first = base.layers[0]\nfirst.rate = 2"),
    ]
    assert replayed(entries, "base") == ["[1]", "[2]", "[4]"]
    numpy = [cell(1, "import numpy as np"), cell(2, "x = np.zeros(3)\nx[0] = 1")]
    assert replayed([*numpy, cell(3, "y = np.ones(3)")], "y") == ["[1]", "[3]"]


def test_a_failed_cell_may_have_created_a_needed_name() -> None:
    failed = msgspec.structs.replace(cell(2, "lr = 0.01\noops()"), failed=True)
    entries = [cell(1, "lr = 0.1"), failed]
    with pytest.raises(
        ReplayError, match=r"\[2\] did not run to its end, and may have created `lr`"
    ):
        replayed(entries, "lr")
    assert replayed([*entries, cell(3, "lr = 0.02")], "lr") == ["[3]"]
    assert replayed([*entries, cell(3, "other = 1")], "other") == ["[3]"]


def test_a_cell_whose_name_is_rebound_is_not_replayed() -> None:
    entries = [cell(1, "x = slow()"), cell(2, "x = 1"), cell(3, "if rank:\n    x = 2")]
    assert replayed(entries, "x") == ["[2]", "[3]"]
    assert replayed([*entries[:1], cell(2, "x = 1", ranks=(0,))], "x") == ["[1]", "[2]"]


@pytest.mark.parametrize(
    "source",
    [
        "model.compile('sgd')",
        "model.loss = 1",
        "model[0] += 1",
        "del model.x",
        "with strategy.scope():\n    model.add(1)",
        "setup(model)",
        "setup(into=model)",
        "setattr(model, 'x', 1)",
    ],
)
def test_a_cell_that_changes_an_object_is_replayed(source: str) -> None:
    assert replayed([cell(1, "model = make()"), cell(2, source)], "model") == ["[1]", "[2]"]


@pytest.mark.parametrize(
    "source", ["print(model)", "len(model)", "model", "y = model.x", "f'{model}'"]
)
def test_a_cell_that_only_reads_is_not_replayed(source: str) -> None:
    assert replayed([cell(1, "model = make()"), cell(2, source)], "model") == ["[1]"]


def test_training_in_a_checkpoint_is_not_replayed() -> None:
    entries = [cell(1, "params = make()"), step(2, "params", "params data")]
    assert replayed(entries, "params", saved="params") == ["[1]"]
    with pytest.raises(ReplayError, match=r"`params`: \[2\] trained it"):
        replayed(entries, "params")


def test_a_cell_that_fits_is_replayed_only_with_a_checkpoint() -> None:
    entries = [cell(1, "model = make()\nmodel.fit(x)")]
    assert replayed(entries, "model", saved="model") == ["[1]"]
    with pytest.raises(ReplayError, match=r"`model`: \[1\] trained it"):
        replayed(entries, "model")


def test_a_function_that_trains_is_named() -> None:
    entries = [
        cell(1, "teacher = make()"),
        cell(2, "def train(m):\n    return m.fit(x)"),
        msgspec.structs.replace(cell(3, "history = train(teacher)"), trained=True),
    ]
    with pytest.raises(ReplayError, match=r"`teacher`: \[3\] trained it"):
        replayed(entries, "teacher")
    assert "[1]" in replayed(entries, "teacher", saved="teacher")


def test_values_computed_after_a_training_in_its_cell_cannot_be_replayed() -> None:
    source = "x = load()\nmodel = make(x)\nhistory = model.fit(x)\ncodes = model.predict(x)"
    entries = [cell(1, source), cell(2, "last = codes[-1]"), cell(3, "done = len(history.epoch)")]
    assert replayed(entries, "model x", saved="model") == ["[1]"]
    assert replayed(entries, "model done", saved="model") == ["[1]", "[3]"]
    with pytest.raises(ReplayError, match=r"`codes`: \[1\] computed it from a training"):
        replayed(entries, "model codes", saved="model")
    with pytest.raises(ReplayError, match=r"`last`: \[2\] derived it from the trained `codes`"):
        replayed(entries, "model last", saved="model")


def test_data_with_an_order_of_their_own_are_not_trained() -> None:
    loader = "class Rows:\n    def __iter__(self):\n        self.n += 1\n        yield self.n"
    fit = "history = model.fit(data, epochs=3, validation_data=held, verbose=0)"
    entries = [
        cell(1, f"{loader}\ndata, held = Rows(), Rows()\nmodel = make()"),
        msgspec.structs.replace(cell(2, fit), trained=True),
    ]
    assert replayed(entries, "model data held history", saved="model") == ["[1]", "[2]"]


def test_a_table_of_results_is_not_trained() -> None:
    entries = [
        cell(1, "scores = {}\nlosses = []"),
        cell(2, "def train(m):\n    return m.fit(x)"),
        msgspec.structs.replace(
            cell(3, "losses.append(train(model))\nscores['a'] = model.evaluate(x)"), trained=True
        ),
    ]
    assert "[1]" in replayed(entries, "scores losses model", saved="model")


def test_arguments_of_readers_are_not_derived_from_a_trained_model() -> None:
    entries = [
        cell(1, "x = load()\nmodel = make()"),
        cell(2, "import matplotlib.pyplot as plt\ndef show(m, x):\n    plt.plot(m.predict(x))"),
        cell(3, "model.fit(x)"),
        cell(4, "model.evaluate(x)"),
        cell(5, "plt.scatter(x, model.predict(x))"),
        cell(6, "show(model, x)"),
    ]
    assert "[1]" in replayed(entries, "model x", saved="model")


def test_a_corrected_cell_replaces_the_one_that_failed() -> None:
    failed = msgspec.structs.replace(cell(2, "history = model.compile(los='mse')"), failed=True)
    entries = [cell(1, "model = make()"), failed]
    with pytest.raises(ReplayError, match=r"\[2\] did not run to its end"):
        replayed(entries, "model history")
    entries += [cell(3, "history = model.compile(loss='mse')")]
    run = CellNames(reads=("model",))
    assert replayed(entries, "model") == ["[1]", "[3]"]
    assert "[2] did not run to its end" in needed(entries, run, [], 2).left_out
    trained = msgspec.structs.replace(failed, trained=True)
    with pytest.raises(ReplayError):
        replayed([entries[0], trained, entries[2]], "model history")


def test_a_failed_cell_that_only_looks_needs_no_correction() -> None:
    plots = "import matplotlib.pyplot as plt"
    failed = msgspec.structs.replace(cell(3, "plt.scatter(x, yy)"), failed=True)
    entries = [cell(1, "x = load()"), cell(2, plots), failed, cell(4, "plt.scatter(x[:, 0], y)")]
    assert "[3]" not in replayed(entries, "x plt")
    fit = msgspec.structs.replace(cell(3, "history = model.fit(x, epoch=5)"), failed=True)
    run = names_of("history = model.fit(x, epochs=5)")
    assert needed([cell(1, "x = model = make()"), fit], run, ["model"], 2).entries[0].place == "[1]"


def test_a_change_through_a_function_or_another_name_is_replayed() -> None:
    entries = [
        cell(1, "rates = [1, 2]"),
        cell(2, "def halve(a):\n    a[0] /= 2\n    return a"),
        cell(3, "half = halve(rates)"),
        cell(4, "same = rates"),
        cell(5, "same[1] = 7"),
        cell(6, "print(rates[0])"),
    ]
    assert replayed(entries, "rates") == ["[1]", "[2]", "[3]", "[4]", "[5]"]
    assert needed(entries, CellNames(reads=("rates",)), [], 2).left_out == ""


def test_a_failed_cell_that_only_may_matter_is_left_out_with_a_message() -> None:
    entries = [
        cell(1, "rates = [1, 2]"),
        msgspec.structs.replace(cell(2, "total = rates.pop() + oops"), failed=True),
    ]
    assert replayed(entries, "rates") == ["[1]"]
    run = CellNames(reads=("rates",))
    assert needed(entries, run, [], 2).left_out.startswith("[2] did not run to its end")


def test_a_name_derived_from_a_trained_one_cannot_be_replayed() -> None:
    entries = [
        cell(1, "params = make()"),
        step(2, "params"),
        cell(3, "scale = float(params.mean())"),
        cell(4, "limit = scale * 2"),
    ]
    with pytest.raises(ReplayError, match=r"`limit`: \[4\] derived it from the trained `scale`"):
        replayed(entries, "params limit", saved="params")
    fresh = cell(5, "scale = 1.0")
    assert replayed([*entries[:3], fresh], "params scale", saved="params") == ["[1]", "[5]"]


def test_a_cell_marked_once_is_never_replayed() -> None:
    with pytest.raises(ReplayError, match=r"\[1\] is marked --once, and creates `rows`"):
        replayed([cell(1, "rows = charge_the_card()", once=True)], "rows")


def test_a_pushed_name_is_pushed_again() -> None:
    pushed = Entry("push", CellNames(binds=("x",), sure=("x",)), (0, 1), payload=b"")
    assert replayed([cell(1, "x = 1"), pushed], "x") == ["%dist_push"]


def test_cells_with_ipython_syntax_are_read() -> None:
    assert names_of("%timeit -n1 y = x\n!ls {x}\nz = x").binds == ("z",)
    assert names_of("this is no python") == CellNames()
