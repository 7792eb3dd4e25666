"""Execute a notebook without a browser and print its output: `python -m notebooks.run FILE.ipynb`.

The executed notebook and its HTML go to `build/`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter

BUILD = Path(__file__).parent.parent / "build"
CELL_TIMEOUT_S = 300
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def execute(source: Path, target: Path) -> Path:
    """Run every cell, and print its text when it ends.

    Args:
        source: the notebook.
        target: path of the executed notebook; its HTML is written to the same folder.

    Returns:
        The path of the HTML.

    Raises:
        CellExecutionError: a cell raised. The cells before it are written.
    """
    notebook = nbformat.read(source, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        resources={"metadata": {"path": str(source.parent)}},
        on_cell_execute=_print_source,
        on_cell_executed=_print_outputs,
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    page = target.with_suffix(".html")
    try:
        client.execute()
    finally:
        nbformat.write(notebook, target)
        page.write_text(HTMLExporter().from_notebook_node(notebook)[0], encoding="utf-8")
    return page


def _print_source(cell: Any, cell_index: int) -> None:
    del cell_index
    if cell.cell_type == "code":
        first, *rest = cell.source.splitlines()
        print(f"\n>>> {first}{f'  (+{len(rest)} lines)' if rest else ''}", flush=True)


def _print_outputs(cell: Any, cell_index: int, execute_reply: Any) -> None:
    del cell_index, execute_reply
    for output in cell.get("outputs", ()):
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        print(_COLOUR.sub("", text).rstrip(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--to", type=Path, default=BUILD)
    args = parser.parse_args()
    started = time.perf_counter()
    target = args.to / args.notebook.name
    try:
        page = execute(args.notebook, target)
    except CellExecutionError as error:
        print(_COLOUR.sub("", str(error)), file=sys.stderr)
        return 1
    print(f"\nexecuted in {time.perf_counter() - started:.1f} s: {target}\nas a page: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
