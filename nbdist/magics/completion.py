"""Completes the options of the magics, and their choices, while they are typed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from IPython.core.interactiveshell import InteractiveShell

_MAGIC = re.compile(r"^\s*%{1,2}(dist_\w+)\s")


def option_matcher(shell: InteractiveShell) -> Any:
    """A matcher of IPython's completer for the `%dist_...` magics of a shell."""

    @context_matcher(identifier="nbdist.options")
    def match(context: CompletionContext) -> dict[str, Any]:
        found = _MAGIC.match(context.line_with_cursor)
        if found is None:
            return {"completions": []}
        kinds = shell.magics_manager.magics
        magic = kinds["cell"].get(found[1]) or kinds["line"].get(found[1])
        if magic is None:
            return {"completions": []}
        words = re.split(r"\s", context.text_until_cursor.lstrip())
        completions = list(_complete(magic.parser._actions, words))
        return {
            "completions": completions,
            "suppress": bool(completions),
            "matched_fragment": words[-1],
        }

    return match


def _complete(actions: list[argparse.Action], words: list[str]) -> Iterator[SimpleCompletion]:
    """The choices of the option before the cursor, else the options that fit."""
    before, typed = words[-2], words[-1]
    for action in actions:
        if before in action.option_strings and action.nargs != 0:
            for choice in action.choices or ():
                if str(choice).startswith(typed):
                    yield SimpleCompletion(str(choice), type="choice")
            return
    if typed.startswith("-"):
        for action in actions:
            for option in action.option_strings:
                if option.startswith(typed):
                    yield SimpleCompletion(option, type="option")
