"""Completion of options and their choices in IPython."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from nbdist.magics.options import MAGICS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import Option

_COMMON = (
    "data",
    "batch",
    "epochs",
    "steps",
    "strategy",
    "checkpoint",
    "resume",
    "output",
    "framework",
    "devices_per_host",
    "number",
)
"""Names of the options that are completed first."""

_MAGIC = re.compile(r"^\s*%{1,2}(dist_\w+)\s")


def option_matcher() -> Any:
    """Return a matcher of IPython's completer for the `%dist_...` magics."""

    @context_matcher(identifier="nbdist.options")
    def match(context: CompletionContext) -> dict[str, Any]:
        found = _MAGIC.match(context.line_with_cursor)
        if found is None or found[1] not in MAGICS:
            return {"completions": []}
        words = re.split(r"\s", context.text_until_cursor.lstrip())
        completions = list(_complete(MAGICS[found[1]].options, words))
        return {
            "completions": completions,
            "suppress": bool(completions),
            "ordered": True,
            "matched_fragment": words[-1],
        }

    return match


def _complete(options: tuple[Option, ...], words: list[str]) -> Iterator[SimpleCompletion]:
    """Complete the choices of the option before the cursor, else options and words that match.

    Front ends show the type next to the text: it is the description. Common options are first.
    """
    before, typed = words[-2], words[-1]
    for option in options:
        if before in option.flags and option.kind != "switch":
            for choice in option.choices:
                if choice.startswith(typed):
                    yield SimpleCompletion(choice, type="choice")
            return
    if typed.startswith("-"):
        yield from _flags(options, typed)
    elif typed:
        for option in options:
            fitting = (word for word in option.words if word.startswith(typed))
            yield from (SimpleCompletion(word, type=option.help) for word in fitting)


def _flags(options: tuple[Option, ...], typed: str) -> Iterator[SimpleCompletion]:
    common = {name: place for place, name in enumerate(_COMMON)}
    for option in sorted(options, key=lambda o: common.get(o.name, len(common))):
        for flag in option.flags:
            if flag.startswith(typed):
                yield SimpleCompletion(flag, type=option.help)
