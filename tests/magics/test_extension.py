"""Loading and unloading of the IPython extension."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    def hooks() -> tuple[int, int]:
        matchers = shell.Completer.custom_matchers
        return len(matchers), len(shell.events.callbacks["pre_execute"])

    loaded = hooks()
    shell.run_line_magic("unload_ext", "nbdist")
    assert hooks() == (loaded[0] - 1, loaded[1] - 1)
    shell.run_line_magic("load_ext", "nbdist")
    assert hooks() == loaded
