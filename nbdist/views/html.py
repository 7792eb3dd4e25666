"""Small HTML elements in the colours of the notebook's theme."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_FONT = (
    "font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:13px;line-height:1.5;"
    "color:var(--jp-ui-font-color1,#212121)"
)
FAINT = "color:var(--jp-ui-font-color2,#616161)"
_RULE = "border-bottom:1px solid var(--jp-border-color2,#e0e0e0)"


def box(title: str, *parts: str) -> str:
    """Return a block with a title line."""
    head = f'<div style="font-weight:600;margin-bottom:4px">{escape(title)}</div>'
    return f'<div style="{_FONT};padding:2px 0">{head}{"".join(parts)}</div>'


def line(text: str) -> str:
    """Return a line of text below a table."""
    return f"<div>{escape(text)}</div>"


def faint(text: str, tag: str = "div") -> str:
    """Return text in a faint colour."""
    return f'<{tag} style="{FAINT}">{escape(text)}</{tag}>'


def picture(png: bytes, alt_text: str, width: int = 560) -> str:
    """Return an embedded picture. `alt_text` is its alternative text, `width` is in CSS pixels."""
    data = b64encode(png).decode()
    return (
        f'<img alt="{escape(alt_text)}" src="data:image/png;base64,{data}" '
        f'style="width:{width}px;max-width:100%;margin:6px 0;background:white">'
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table. Columns in `numbers` are right-aligned with figures of equal width."""

    def cell(tag: str, column: int, text: str, style: str) -> str:
        align = "right;font-variant-numeric:tabular-nums" if column in numbers else "left"
        wrap = "nowrap" if column in {0, *numbers} else "normal"
        style = f"text-align:{align};white-space:{wrap};padding:2px 14px 2px 0;{style}"
        return f'<{tag} style="{style}">{escape(text)}</{tag}>'

    head = "".join(
        cell("th", i, t, f"font-weight:500;{FAINT};{_RULE}") for i, t in enumerate(header)
    )
    body = "".join(
        "<tr>"
        + "".join(cell("td", i, text, "background:none") for i, text in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return (
        '<table style="border-collapse:collapse;margin:4px 0;border:none">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> list[str]:
    """Return the same table as lines of text."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if i in numbers else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return [line(header), line(["-" * width for width in widths]), *(line(row) for row in rows)]
