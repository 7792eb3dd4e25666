"""Remarks about cells that a program leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.cells.dependencies import Entry, names_of
from nbdist.jobs.remarks import files_beside, later_loops, remarks
from nbdist.records import CellOptions, CellRequest

if TYPE_CHECKING:
    import pytest

LABELS = iter(range(1, 100))


def entry(source: str, *, drew: bool = False, trained: bool = False) -> Entry:
    label = next(LABELS)
    request = CellRequest(
        number=label,
        source=source,
        label=label,
        strategy="mirrored",
        awaits=False,
        options=CellOptions(),
    )
    return Entry("cell", names_of(source), (0, 1), request, drew=drew, trained=trained)


def test_cells_that_drew_random_numbers_are_named() -> None:
    chosen, quiet, drawing = entry("a = 1"), entry("b = a"), entry("c = random()", drew=True)
    (text,) = remarks([chosen], [chosen, quiet, drawing])
    assert text.startswith(f"cell {drawing.place}, left out of the program, drew random numbers: ")


def test_cells_that_iterate_over_shuffled_data_are_named() -> None:
    chosen = entry("train = data.shuffle(10).batch(2)")
    reading = [
        entry("for x in train.take(1):\n    print(x)"),
        entry("[(x, y)] = train.take(1)"),
        entry("x = next(iter(train))"),
        entry("shapes = [x.shape for x in train]"),
    ]
    others = [entry("print(train)"), entry("for i in range(3):\n    print(i)"), entry("!ls")]
    (text,) = remarks([chosen], [chosen, *reading, *others])
    places = ", ".join(one.place for one in reading)
    assert text.startswith(f"cells {places}, left out of the program, read shuffled data: ")


def test_data_without_shuffle_need_no_remark() -> None:
    chosen = entry("train = [1]")
    assert not remarks([chosen], [chosen, entry("for x in train:\n    print(x)")])


def test_files_beside_the_notebook_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "images").mkdir(parents=True)
    for name in ("rows.csv", "own.txt", "train"):
        (tmp_path / name).touch()
    chosen = [
        entry("text = open('rows.csv').read()"),
        entry("data = load(folder='data/images')\ndata2 = load('data')\nlist_files('data/*')"),
        entry("own = open('own.txt')\nprint('none.csv', 'x' * 3)\nraise_if('\\0')"),
        entry(f"with open({str(tmp_path / 'rows.csv')!r}) as file:\n    pass"),
    ]
    (text,) = files_beside(chosen, [Path("own.txt")])
    assert text.startswith("the cells name `rows.csv`, `data/images`, `data/*` beside")
    assert not files_beside(chosen[2:], [Path("own.txt")])
    assert not files_beside([entry("open('rows.csv', 'w').write('1')"), chosen[0]], [])


def test_cells_that_may_have_changed_used_values_are_named() -> None:
    built = entry("import jax\nbase = build()\nmodel = Model(base)")
    freezing = entry("for layer in base.layers:\n    layer.trainable = False")
    precise = entry("from jax import config\nconfig.update('jax_enable_x64', True)")
    looking = entry("preds = model.predict(x)\nprint(base.name)")
    training = entry("model.fit(base, x)")
    found = remarks([built, training], [built, freezing, precise, looking, training])
    assert [text.partition(":")[0] for text in found] == [
        f"cell {freezing.place}, left out of the program, may have changed `base`",
        f"cell {precise.place}, left out of the program, may have changed `config`",
    ]


def test_values_that_a_later_cell_creates_again_need_no_remark() -> None:
    first, trained = entry("model = build()"), entry("h = train_model(model)")
    definition = entry("def train_model(m):\n    return m.fit(x)")
    again, training = entry("model = build()"), entry("model.fit(x)")
    assert not remarks([again, training], [definition, first, trained, again, training])
    (text,) = remarks([first, training], [definition, first, trained, training])
    assert "may have changed `model`" in text


STEP = "def update(x):\n    with tf.GradientTape() as tape:\n        pass"
EPOCHS = "def run(n):\n    for x in range(n):\n        update(x)"


def test_a_later_training_loop_that_ran_as_written_is_named() -> None:
    defined, chosen = entry(f"{STEP}\n{EPOCHS}"), entry("model.fit(x)", trained=True)
    loops = [entry("for x in data:\n    update(x)"), entry("losses = run(3)")]
    (text,) = later_loops([defined, chosen], loops)
    assert text == (
        f"the training loops of cells {loops[0].place}, {loops[1].place} ran later, as written on "
        "every worker, and are not in the program: only steps on all replicas can be exported"
    )


def test_other_later_cells_need_no_remark() -> None:
    defined, chosen = entry(f"{STEP}\n{EPOCHS}"), entry("model.fit(x)", trained=True)
    earlier = entry("run(3)")
    later = [
        entry("for x in data:\n    print(x)"),
        entry("update(x)"),
        entry(f"{EPOCHS}"),
        entry("%time"),
        entry("run(3)", trained=True),
    ]
    assert not later_loops([defined, earlier, chosen], later)
