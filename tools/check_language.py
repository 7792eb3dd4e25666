"""Check the language of docstrings, comments, messages, pages and identifiers.

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

ENTRY = re.compile(
    r"^ {4,}\w+: (what|which|where|whether|how|of|as|who|whose|when|why)\b(?! in `)",
    re.MULTILINE | re.IGNORECASE,
)
"""An entry of `Args` or `Attributes` begins with a noun, "True if" or a verb instead."""

SUMMARY_LENGTH = 100

SUFFIXES = (".py", ".md", ".ipynb", ".ts", ".tsx", ".css", ".toml", ".yml", ".yaml")

WITH_SAMPLES = ("tools/check_language.py", "tests/test_language.py")
"""Files that contain the words themselves."""

FSTRING_MIDDLE: int | None = getattr(token, "FSTRING_MIDDLE", None)
"""Text of an f-string; a token of its own in Python 3.12 and later."""

COINED = re.compile(
    r"\b(?:crew|sights|switchboard|bookings|estate|healer|heals?|healed|healing|cell ?watch"
    r"|unkept|keepers?|sow(?:n|ing)|standstill|foretold|broken off|breaks? off|made anew|begun anew"
    r"|laid out|lies? on|heeds?|heeded|hither|thither|whoever|hurry|hurries|hurried|landed|mended"
    r"|escalations?|seats?|doors?|rescue[ds]?|rescuing|seed (?:server|process)"
    r"|(?<!their )(?<!its )own times?"
    r"|(?:take|give|obey|carrie)s? (?:an |no )?orders?)\b",
    re.IGNORECASE,
)
"""Words that the glossary of this project replaced by terms of the field.

Words that also have an ordinary meaning, such as "order" and "turn", are not listed.
"""

COINED_IN_NAMES = frozenset(
    [
        "bookings",
        "crew",
        "crews",
        "deal",
        "deals",
        "dealt",
        "door",
        "doors",
        "escalation",
        "estate",
        "foretold",
        "former",
        "heal",
        "healed",
        "healer",
        "healing",
        "heals",
        "heed",
        "holding",
        "hurry",
        "keeper",
        "keepers",
        "land",
        "landing",
        "landed",
        "mended",
        "rescue",
        "rescued",
        "said",
        "say",
        "says",
        "seat",
        "seats",
        "sights",
        "sow",
        "sown",
        "standstill",
        "switchboard",
        "tell",
        "tells",
        "told",
        "unkept",
        "untold",
        "wish",
        "wishes",
    ]
)
"""Words that no identifier may contain. Some are correct in a sentence, but name nothing."""

FIELDS = {"said", "max_heals"}
"""Fields of run.json and of options, which keep their names."""

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""Word of an identifier in snake_case or CamelCase."""

SHARDING_FOLDERS = re.compile(r"nbdist/(?:planner|jaxpr|parallel)/")
CUT = re.compile(r"(?<![a-z])(?:un)?cut(?:s|ting)?(?![a-z])", re.IGNORECASE)
"""Word for "shard", "split" or "truncate", which folders about shardings must not use."""

TYPESCRIPT = (".ts", ".tsx")
NOT_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|'[^'\n]*'|\"[^\"\n]*\"", re.DOTALL)
"""Comments and strings of TypeScript."""

ALLOWED = re.compile(
    r"estate\.json|max[-_]heals|\"heals\"|\"healing\"|\"keeper\"|`heals`|`healing`|03_recovery"
    r"|(?:[.]|readonly )(?:heals|healing|said)\b|(?:^ *|[{,] )(?:heals|healing|said): "
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
        for found in ENTRY.finditer(text):
            yield Finding(path, line, f"entry opens with {found[1]!r}: {found[0].strip()}")
    yield from check_words(path, texts(source))
    for line, name in sorted({(1, path.stem), *identifiers(ast.parse(source))}):
        if is_coined(name):
            yield Finding(path, line, f"coined identifier {name!r}")
    if SHARDING_FOLDERS.search(path.as_posix()):
        yield from check_sharding(path, source)


def check_sharding(path: Path, source: str) -> Iterator[Finding]:
    """Yield the lines that use "cut" instead of "shard", "split" or "truncate"."""
    for line, text in enumerate(source.splitlines(), 1):
        for found in CUT.finditer(text):
            yield Finding(path, line, f"{found[0]!r}: write shard, split or truncate")


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each definition and assignment in a module."""
    fields = {
        item.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        if isinstance(item.target, ast.Name) and item.target.id in FIELDS
    }
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()) if node not in fields:
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.alias(asname=str() as name):
                yield node.lineno, name
            case ast.ExceptHandler(name=str() as name):
                yield node.lineno, name
            case ast.MatchAs(name=str() as name) | ast.MatchStar(name=str() as name):
                yield node.lineno, name
            case ast.MatchMapping(rest=str() as name):
                yield node.lineno, name


def is_coined(name: str) -> bool:
    """Return True if an identifier contains a coined word."""
    return not COINED_IN_NAMES.isdisjoint(word.lower() for word in WORD.findall(name))


def check_typescript(path: Path, source: str) -> Iterator[Finding]:
    """Yield the coined identifiers of a TypeScript file."""
    code = NOT_CODE.sub(lambda found: "\n" * found[0].count("\n"), source)
    for line, text in enumerate(code.split("\n"), 1):
        for name in re.findall(r"[A-Za-z_$][\w$]*", ALLOWED.sub("", text)):
            if is_coined(name):
                yield Finding(path, line, f"coined identifier {name!r}")


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
        source = path.read_text()
        yield from check_words(path, enumerate(source.splitlines(), 1))
        if path.suffix in TYPESCRIPT:
            yield from check_typescript(path, source)


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
