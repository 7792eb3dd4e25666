"""Cells that write files which later cells of a program read."""

from __future__ import annotations

import ast

import pytest

from nbdist.cells.dependencies import Entry, names_of, needed_with_training
from nbdist.cells.written_files import WrittenFiles
from nbdist.records import CellOptions, CellRequest


def writers(*cells: str) -> set[int]:
    """Return the cells that wrote files for the last one."""
    return WrittenFiles([ast.parse(cell) for cell in cells]).writers({len(cells) - 1})


@pytest.mark.parametrize(
    ("writing", "reading"),
    [
        ("np.save('x.npy', x)", "x = np.load('x.npy')"),
        ("np.save('x', x)", "x = np.load('x.npy')"),
        ("np.savez('x', x=x)", "x = np.load('x.npz')"),
        ("open('w.txt', 'w').write('a')", "words = open('w.txt').read()"),
        ("with open('w.txt', mode='w') as f:\n    f.write('a')", "f = open('w.txt')"),
        ("df.to_csv('t.csv')", "df = pd.read_csv('t.csv')"),
        ("Path('t.txt').write_text('a')", "a = Path('t.txt').read_text()"),
        ("path = 't.txt'\nopen(path, 'w').write('a')", "a = open('t.txt').read()"),
        ("path = Path('t.txt')\npath.write_text('a')", "a = path.read_text()"),
        ("keras.utils.get_file('t.txt', 'file:///t')", "layer.set_vocabulary('t.txt')"),
    ],
)
def test_cells_that_write_what_the_last_one_reads(writing: str, reading: str) -> None:
    assert writers(writing, "y = 1", reading) == {0}


def test_cells_that_read_or_write_other_files_are_none() -> None:
    assert not writers("a = open('t.txt').read()", "b = open('t.txt').read()")
    assert not writers("open('a.txt', 'w').write('a')", "b = open('b.txt').read()")
    assert not writers("path = 'a'\nopen(path, 'w')", "path = 'b'\nopen(path)")
    assert not writers("np.save('x', x)", "plt.plot(x, label='x')")


def test_cells_that_replace_a_file_do_not_need_the_one_before() -> None:
    assert not writers("plt.savefig('a.png')", "plt.savefig('a.png')")
    assert not writers("open('w.txt', 'w').write('a')", "open('w.txt', 'w').write('b')")
    assert writers("open('w.txt', 'w').write('a')", "open('w.txt', 'a').write('b')") == {0}
    assert writers("np.save('x.npy', x)", "shutil.copy('x.npy', 'y.npy')") == {0}


def entry(source: str, *, once: bool = False) -> Entry:
    request = CellRequest(
        number=0, source=source, label=1, strategy="pjrt", awaits=False, options=CellOptions()
    )
    return Entry("cell", names_of(source), (0, 1), request, once=once)


def test_a_program_needs_the_cells_that_write_its_files() -> None:
    sources = [
        "raw = make()",
        "clean = raw.dropna()",
        "clean.to_csv('t.csv')",
        "clean.to_csv('other.csv')",
        "x = pd.read_csv('t.csv').values",
    ]
    run = "w = w - grad(w, x)"
    entries = [entry(source) for source in sources]
    found = needed_with_training(entries, names_of(run), 2, careful=True, source=run)
    assert [entries.index(one) for one in found] == [0, 1, 2, 4]


def test_the_training_itself_reads_a_file() -> None:
    entries = [entry("open('t.txt', 'w').write('1')"), entry("w = 0")]
    run = "w = w + float(open('t.txt').read())"
    found = needed_with_training(entries, names_of(run), 2, careful=True, source=run)
    assert found == entries


def test_a_writer_that_cannot_run_again_is_left_out_alone() -> None:
    """The program still has the cells that change values. A remark names the file."""
    entries = [
        entry("config = {}"),
        entry("config.update(rate=0.1)"),
        entry("df.to_csv('t.csv')", once=True),
        entry("w = config['rate'] * float(open('t.csv').read())"),
    ]
    run = "w = w + 1"
    found = needed_with_training(entries, names_of(run), 2, careful=True, source=run)
    assert [entries.index(one) for one in found] == [0, 1, 3]
