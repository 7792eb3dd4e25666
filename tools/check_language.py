"""Check the language of docstrings, comments, messages and pages.

Run `python -m tools.check_language [PATH...]`; `make check` calls it. It prints one line for each
finding and exits with status 1 if there are any.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import token
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[1]

QUESTION = re.compile(r"(?:What|Which|Where|Whether|How|Of|As|Who|Whose|When|Why)\b")
"""A docstring begins with a noun or an imperative verb instead."""

SUMMARY_LENGTH = 100

SUFFIXES = (".py", ".md", ".ipynb", ".ts", ".tsx", ".css", ".toml", ".yml", ".yaml")

WITH_SAMPLES = ("tools/check_language.py", "tests/test_language.py")
"""Files that contain the words themselves."""

FSTRING_MIDDLE: int | None = getattr(token, "FSTRING_MIDDLE", None)
"""Text of an f-string; a token of its own in Python 3.12 and later."""

COINED = re.compile(
    r"\b(?:crew|sights|switchboard|bookings|estate|healer|heals?|healed|healing|cell ?watch"
    r"|unkept|keepers?|sow(?:n|ing)|standstill|foretold|broken off|breaks? off|made anew|begun anew"
    r"|laid out|lies? on|heeds?|heeded|hither|thither|whoever)\b",
    re.IGNORECASE,
)
"""Words that the glossary of this project replaced by terms of the field."""

ALLOWED = re.compile(
    r"estate\.json|max[-_]heals|\"heals\"|\"healing\"|`heals`|`healing`|03_recovery"
    r"|(?:[.]|readonly )(?:heals|healing)\b|(?:^ *|[{,] )(?:heals|healing): "
)
"""The option, the fields of run.json and old files keep their names."""


class Finding(NamedTuple):
    """A place that breaks a rule."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text}"


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a module, attribute docstrings included."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield node.lineno, text.strip()


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment and string of a module."""
    for found in tokenize.generate_tokens(io.StringIO(source).readline):
        if found.type in (tokenize.COMMENT, tokenize.STRING, FSTRING_MIDDLE):
            for offset, text in enumerate(found.string.split("\n")):
                yield found.start[0] + offset, text


def check_module(path: Path) -> Iterator[Finding]:
    """Yield the findings of a Python file."""
    source = path.read_text()
    for line, text in docstrings(ast.parse(source)):
        summary = text.split("\n", 1)[0]
        if found := QUESTION.match(summary):
            yield Finding(path, line, f"docstring opens with {found[0]!r}: {summary}")
        if len(summary) > SUMMARY_LENGTH:
            yield Finding(path, line, f"summary of {len(summary)} characters: {summary}")
    yield from check_words(path, texts(source))


def check_words(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Finding]:
    """Yield the coined words in lines of text."""
    for line, text in lines:
        for found in COINED.finditer(ALLOWED.sub("", text)):
            yield Finding(path, line, f"coined word {found[0]!r}")


def check(path: Path) -> Iterator[Finding]:
    """Yield the findings of a file: Python, or text such as Markdown and TypeScript."""
    if path.suffix == ".py":
        yield from check_module(path)
    else:
        yield from check_words(path, enumerate(path.read_text().splitlines(), 1))


def tracked() -> list[Path]:
    """List the files of the repository that people read."""
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = (ROOT / name for name in listed.splitlines() if name not in WITH_SAMPLES)
    return [path for path in files if path.suffix in SUFFIXES or path.name == "Makefile"]


def main() -> None:
    """Print the findings of the given files, or of the repository."""
    paths = [Path(name).resolve() for name in sys.argv[1:]] or tracked()
    findings = [finding for path in paths for finding in check(path)]
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
