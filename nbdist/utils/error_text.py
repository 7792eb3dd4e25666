"""Text of exceptions: a summary in one line, and the message without frames of libraries."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_APPENDED = re.compile(
    r"\[\[|\[Op:|Arguments received by |-{10,}$|For simplicity, JAX has removed "
)
"""Start of the lines that frameworks append to a message."""
_FRAME = re.compile(
    r'^ *File "(?P<file>[^"\n]*)", line \d+, in [^\n]*\n(?: *\n| {6,}[^\n]*\n)?', re.M
)
"""A frame in the message of an error of traced code, with its line of source or an empty line."""
_WITHOUT_FRAMES = re.compile(r" defined at \(most recent call last\):\n+(?! *File )")
"""Heading of the frames that created an operation, with no frame after it."""


def described(name: str, message: str) -> str:
    """Return an exception as text: the first line is a summary.

    The whole message follows if it has more lines. Frameworks put frames of traced code before the
    useful line, and arguments or nodes of a graph after it.

    Args:
        name: class of the exception, such as `ValueError`, or `ValueError on rank 0@host`.
        message: message of the exception.
    """
    whole = _COLOUR.sub("", message).strip()
    line = _useful_line(whole).removeprefix(f"{name.split(' ')[0]}: ")
    summary = f"{name}: {line}" if line else name
    return summary if line == whole else f"{summary}\n\n{whole}"


def _useful_line(message: str) -> str:
    lines = [line.strip() for line in message.split("\n")]
    end = next((i for i, line in enumerate(lines) if _APPENDED.match(line)), len(lines))
    return next((line for line in reversed(lines[:end]) if line), "")


def without_library_frames(text: str, is_library: Callable[[str], bool]) -> str:
    """Return a message without the frames that TensorFlow lists for files of libraries."""
    kept = _FRAME.sub(lambda frame: "" if is_library(frame["file"]) else frame[0], text)
    return _WITHOUT_FRAMES.sub("\n\n", kept)
