"""Loading and unloading of the IPython extension."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def test_a_shell_without_the_extension_shows_results(shell: InteractiveShell) -> None:
    assert shell.display_formatter is not None
    formatter = shell.display_formatter.ipython_display_formatter
    assert len(formatter.type_printers) == 1
    shell.run_line_magic("unload_ext", "nbdist")
    assert not formatter.type_printers
    shell.run_line_magic("load_ext", "nbdist")


def test_an_unloaded_extension_leaves_no_hooks(shell: InteractiveShell) -> None:
    def hooks() -> tuple[int, int, int]:
        events = shell.events.callbacks
        matchers = shell.Completer.custom_matchers
        return len(matchers), len(events["pre_execute"]), len(events["post_run_cell"])

    loaded = hooks()
    shell.run_line_magic("unload_ext", "nbdist")
    assert hooks() == tuple(count - 1 for count in loaded)
    shell.run_line_magic("load_ext", "nbdist")
    assert hooks() == loaded


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("%dist_strat 2", "did you mean %dist_start?"),
        ("%%dist_rum\nx = 1", "did you mean %%dist_run?"),
        ("%%dist_strat 2\nx = 1", "did you mean %dist_start?"),
        ("%dits_stop", "did you mean %dist_stop?"),
        ("%something_else", ""),
        ("%dist_run", ""),
        ("raise ValueError('magic `%dist_strat` not found.')", ""),
    ],
)
def test_the_closest_magic_is_suggested(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], cell: str, line: str
) -> None:
    shell.run_cell(cell)
    shown = [text for text in capsys.readouterr().err.splitlines() if text.startswith("did you")]
    assert shown == ([line] if line else [])
