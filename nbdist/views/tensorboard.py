"""Where TensorBoard is."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class BoardPicture:
    """A link, which opens on the machine of the notebook's kernel.

    Attributes:
        address: for a browser there.
        shown: what TensorBoard shows, in words.
    """

    address: str
    shown: str

    def html(self) -> str:
        link = f'<a href="{escape(self.address)}" target="_blank">{escape(self.address)}</a>'
        return f"<div>nbdist: TensorBoard on {escape(self.shown)}: {link}</div>"

    def lines(self) -> list[str]:
        return [f"nbdist: TensorBoard on {self.shown}: {self.address}"]
