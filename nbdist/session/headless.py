"""Execution of a notebook without a front end: `nbdist run notebook.ipynb`.

The notebook's own cells start the workers. nbdist prints each cell and its output while it runs,
stores the executed notebook, and stops the workers at the end, also after an error.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from nbdist.errors import UsageError
from nbdist.session import discovery

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

PARAMETERS = "parameters"
INJECTED = "injected-parameters"
"""Tags of the cell with the default values, and of the cell that nbdist adds, as in papermill."""

_START = re.compile(r"^(\s*%dist_start)((?:[ \t]+(?!-)\S+)*)(.*)$", re.MULTILINE)
_NUMBER = re.compile(r"\s(-n|--number)[ =]*\d+")
_CONSTANTS = {"true": True, "false": False, "null": None}


def parsed(text: str) -> object:
    """Return the value of a parameter: a Python literal, `true`, `false` or `null`, else text."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def run(
    path: Path, target: Path | None = None, *, hosts: int = 0, parameters: Mapping[str, str]
) -> int:
    """Run all cells of a notebook in a new kernel, and print their output.

    Args:
        path: The notebook.
        target: Path of the executed notebook, which is also written after an error. Default:
            `NAME-executed.ipynb` beside the notebook.
        hosts: Number of hosts in place of those in `%dist_start`; 0 for those.
        parameters: Texts of values by name. They replace the values that the cell with the tag
            `parameters` assigns, as papermill does.

    Returns:
        The exit status: 0, 1 if a cell failed or its kernel died, or 128 plus the number of the
        signal that ended the run.

    Raises:
        UsageError: The file is no notebook, a package is missing, no cell has the tag, a name is
            not assigned there, or the notebook has no `%dist_start` whose hosts can be replaced.
    """
    try:
        import nbformat
        from nbclient.exceptions import CellExecutionError, DeadKernelError

        from nbdist.session.notebook_client import PrintingClient, Progress, StoppedError
    except ImportError:
        raise UsageError("a notebook needs a package: run %pip install nbclient") from None
    try:
        notebook = nbformat.read(path, as_version=4)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no notebook: {error}") from None
    if parameters:
        _inject(notebook, parameters)
    if hosts:
        _replace_hosts(notebook, hosts)
    target = target or path.with_name(f"{path.stem}-executed.ipynb")
    progress = Progress(notebook, lambda: nbformat.write(notebook, target))
    client = PrintingClient(notebook, path.parent, progress)
    status = 0
    with _own_clusters():
        try:
            client.execute()
        except (CellExecutionError, StoppedError):
            status = 1  # the output contains the traceback
        except DeadKernelError:
            sys.stdout.write("the kernel died\n")
            status = 1
        finally:
            progress.store()
    progress.end(target, failed=bool(status))
    return 128 + progress.signal if progress.signal else status


@contextlib.contextmanager
def _own_clusters() -> Iterator[None]:
    """Let the kernel start clusters of its own, and end them afterwards, even if the kernel died.

    Its runs are printed as text.
    """
    with tempfile.TemporaryDirectory(prefix="nbdist-") as folder:
        own = {"JUPYTER_RUNTIME_DIR": folder, "NBDIST_VIEW": "text"}
        before = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        try:
            yield
        finally:
            discovery.stop_all()
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _inject(notebook: Any, parameters: Mapping[str, str]) -> None:
    """Add a cell that assigns the parameters behind the one with their default values."""
    import nbformat.v4

    places = [i for i, cell in enumerate(notebook.cells) if PARAMETERS in _tags(cell)]
    if not places:
        raise UsageError(
            f'no cell has the tag "{PARAMETERS}": add it to the cell that assigns '
            f"{', '.join(parameters)}"
        )
    place = places[0]
    magic, body = _divided(notebook.cells[place].source)
    known = _assigned(body)
    unknown = [name for name in parameters if name not in known]
    if unknown:
        raise UsageError(
            f'-p {unknown[0]}: the cell with the tag "{PARAMETERS}" assigns '
            f"{', '.join(known) or 'no name'}"
        )
    lines = [f"{name} = {parsed(text)!r}" for name, text in parameters.items()]
    cell = nbformat.v4.new_code_cell("\n".join([*magic, *lines]), metadata={"tags": [INJECTED]})
    if notebook.nbformat_minor < 5:
        cell.pop("id", None)
    notebook.cells.insert(place + 1, cell)


def _tags(cell: Any) -> Sequence[str]:
    return cell.metadata.get("tags", ()) if cell.cell_type == "code" else ()


def _divided(source: str) -> tuple[list[str], str]:
    """Return the line of a cell magic, if there is one, and the code below it."""
    first, _, rest = source.partition("\n")
    return ([first], rest) if first.startswith("%%") else ([], source)


def _assigned(source: str) -> list[str]:
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise UsageError(f'the cell with the tag "{PARAMETERS}" is no Python: {error}') from None
    names = [
        name.id
        for statement in statements
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        for name in ast.walk(statement)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    ]
    return list(dict.fromkeys(names))


def _replace_hosts(notebook: Any, hosts: int) -> None:
    """Replace the hosts in the lines of `%dist_start`."""
    count = 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source, replaced = _START.subn(
                lambda line: f"{line[1]} {hosts} hosts{_NUMBER.sub('', line[3])}", cell.source
            )
            count += replaced
    if not count:
        raise UsageError(f"--hosts {hosts}: no cell of the notebook has a line with %dist_start")
