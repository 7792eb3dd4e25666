"""State of a submitted job in one line."""

from __future__ import annotations

from dataclasses import dataclass

from nbdist.views import html


@dataclass(frozen=True)
class JobPicture:
    """One line about a job.

    Attributes:
        text: the line.
    """

    text: str

    def html(self) -> str:
        return html.line(self.text)

    def lines(self) -> list[str]:
        return [self.text]
