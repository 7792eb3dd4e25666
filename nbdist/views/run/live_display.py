"""Run in the cell's output: a live view with the extension, else one line of text."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Protocol

import msgspec
from IPython.display import DisplayHandle, display

from nbdist.records import RUN_MIME, FitBegun, RunOutput
from nbdist.views import formatting
from nbdist.views.run.summary import Reached
from nbdist.views.surface import TextSurface, bundle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import Metrics, MimeBundle, RecoveryRecord, Rows, RunKind, StepBegun

INTERVAL_S = 0.25
LINE_INTERVAL_S = 5.0
"""Interval in seconds between lines of text, each of which adds a line."""

RECENT_MESSAGES = 40


class Feed(Protocol):
    """Incremental reader of a stored run."""

    def news(self) -> Iterator[str | bytes]:
        """Yield new data: `ServerMessage`s, and rows preceded by the number of their table."""
        ...


class Ended(Protocol):
    """Ended run. Its `repr` is its text."""

    def _repr_mimebundle_(self) -> MimeBundle:
        """Return picture and text of the run."""
        ...


class RunSurface(Protocol):
    """Surface of a run.

    Attributes:
        interval_s: minimum seconds between two pictures.
        follows: True if it shows more than the picture, so it needs updates without a change.
        has_picture: True if a picture of the ended run remains.
    """

    interval_s: float
    follows: bool
    has_picture: bool

    def show(self, picture: RunPicture) -> None: ...

    def close(self, run: Ended) -> None:
        """Show the ended run. See `RunView.close`."""
        ...


class RunView:
    """Live display of a run, with a final picture.

    Args:
        surface: surface of the display.
    """

    def __init__(self, surface: RunSurface) -> None:
        self._kind: RunKind = ""
        self._epochs = 0
        self._steps = -1
        self._latest: dict[int, Metrics] = {}
        self._pace: deque[tuple[int, float]] = deque(maxlen=RECENT_MESSAGES)
        self._leader = -1
        self._waiting = "waiting for the first step"
        self._recovering = ""
        self._recoveries = 0
        self._changed = False
        self._shown_at = time.monotonic()
        self._surface = surface

    def begin(self, begun: StepBegun | FitBegun) -> None:
        """Prepare for steps that will follow."""
        self._epochs, self._steps = begun.epochs, begun.steps
        self._kind = "fit" if isinstance(begun, FitBegun) else "step"
        self._changed = True

    def add(self, rows: Rows) -> None:
        """Store the last step of a rank."""
        if not rows.values:
            return
        last = rows.last()
        if self._leader < 0:
            self._leader = last.rank
        self._latest[last.rank] = last
        if last.rank == self._leader:
            self._pace.append((last.step, last.time_s))
        self._changed = True

    def add_epoch(self, metrics: Metrics) -> None:
        """Store the report of an epoch. Without steps it is the latest one of its rank."""
        if self._surface.has_picture and self._latest.get(metrics.rank, metrics).step < 0:
            self._latest[metrics.rank] = metrics
            self._changed = True

    def recovering(self, reason: str) -> None:
        """Show that ranks are being replaced, with the reason."""
        self._recovering, _, _ = reason.partition("\n")
        self._changed = True
        self.flush(everything=True)

    def recovered(self, recovery: RecoveryRecord) -> None:
        """Reset after a recovery, because steps after `recovery.step` are repeated."""
        self._recovering = ""
        self._recoveries += 1
        self._pace.clear()
        self._latest.clear()
        self._waiting = f"resuming after step {recovery.step:,}" if recovery.step else "restarting"
        self._changed = True

    def flush(self, *, everything: bool = False) -> None:
        """Show the current state if the interval has passed, or now with `everything`."""
        now = time.monotonic()
        wanted = self._changed or self._surface.follows
        if wanted and (everything or now - self._shown_at >= self._surface.interval_s):
            self._surface.show(self._picture())
            self._shown_at = now
            self._changed = False

    def close(self, run: Ended) -> None:
        """Show the final state, if the run was shown.

        Args:
            run: the ended run.
        """
        self._recovering = ""
        self.flush(everything=True)
        self._surface.close(run)

    def _picture(self) -> RunPicture:
        if not self._latest:
            waiting = f"recovering: {self._recovering}" if self._recovering else self._waiting
            return RunPicture((waiting,), None)
        latest = min(self._latest.values(), key=lambda m: m.step)
        words = [_of(f"step {latest.step:,}", self._steps)] if latest.step >= 0 else []
        if self._epochs > 0 or (latest.step < 0 <= latest.epoch):
            words.insert(0, _of(f"epoch {latest.epoch}", self._epochs))
        if text := str(Reached.of(self._latest.values(), self._kind)):
            words.append(text)
        words += [*self._pace_words(), formatting.duration(latest.time_s)]
        if self._recovering:
            words.insert(0, f"recovering: {self._recovering}")
        if self._recoveries:
            words.append(f"recovered {formatting.times(self._recoveries)}")
        return RunPicture(tuple(words), latest.step / self._steps if self._steps > 0 else None)

    def _pace_words(self) -> list[str]:
        if not self._pace:
            return []
        (first, since), (last, until) = self._pace[0], self._pace[-1]
        if last <= first:
            return []
        return [f"{formatting.duration((until - since) / (last - first))} a step"]


def _load_matplotlib() -> None:
    """Import Matplotlib in a thread. The import takes a second, and the final picture needs it."""
    name = "matplotlib.figure"
    threading.Thread(target=importlib.import_module, args=(name,), daemon=True).start()


def _of(text: str, total: int) -> str:
    return f"{text} of {total:,}" if total > 0 else text


class OutputSurface:
    """Display with several MIME types. Each front end uses the best that it supports."""

    interval_s = INTERVAL_S
    follows = False
    has_picture = True

    def __init__(self, run: str) -> None:
        self._run = run
        self._handle: DisplayHandle | None = None

    def show(
        self,
        picture: RunPicture,
        beside: MimeBundle | None = None,
        metadata: MimeBundle | None = None,
    ) -> None:
        """Show the picture, and `beside` it other MIME types for the front end."""
        if self._handle is None:
            _load_matplotlib()
        own = self._own(picture.words, over=False)
        self._display({**(beside or {}), **own, **bundle(picture)}, metadata or {})

    def close(self, run: Ended) -> None:
        if self._handle is not None:
            data = run._repr_mimebundle_()
            words = (str(data.get("text/plain", "")),)
            self._display({**self._own(words, over=True), **data}, {})

    def _own(self, words: tuple[str, ...], *, over: bool) -> MimeBundle:
        if not self._run:
            return {}
        output = RunOutput(id=self._run, text=" · ".join(words), over=over)
        return {RUN_MIME: msgspec.to_builtins(output)}

    def _display(self, data: MimeBundle, metadata: MimeBundle) -> None:
        if self._handle is None:
            self._handle = display(data, raw=True, metadata=metadata, display_id=True)
        else:
            self._handle.update(data, raw=True, metadata=metadata)


class LineSurface:
    """Line of text, written again after each change, and the text of the ended run."""

    interval_s = LINE_INTERVAL_S
    follows = False
    has_picture = False

    def __init__(self) -> None:
        self._lines = TextSurface()
        self._is_shown = False

    def show(self, picture: RunPicture) -> None:
        self._is_shown = True
        self._lines.show(picture)

    def close(self, run: Ended) -> None:
        if self._is_shown:
            sys.stdout.write(f"{run!r}\n")


@dataclass(frozen=True)
class RunPicture:
    """Line of text about a run. `part` is the completed fraction, if known."""

    words: tuple[str, ...]
    part: float | None

    def html(self) -> str:
        bar = "" if self.part is None else _bar(min(1.0, self.part))
        text = escape(" · ".join(self.words))
        return (
            '<div style="display:flex;align-items:center;gap:10px;font-size:13px;'
            "font-family:var(--jp-ui-font-family,system-ui,sans-serif);"
            "font-variant-numeric:tabular-nums;color:var(--jp-ui-font-color1,#212121);"
            f'padding:2px 0">{bar}<span>{text}</span></div>'
        )

    def lines(self) -> list[str]:
        return [" · ".join(self.words)]


def _bar(part: float) -> str:
    return (
        '<span role="progressbar" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{100 * part:.0f}" style="flex:none;width:160px;height:8px;'
        'border-radius:4px;background:var(--jp-border-color2,#e0e0e0);overflow:hidden">'
        f'<span style="display:block;width:{100 * part:.1f}%;height:100%;'
        'background:var(--jp-brand-color1,#1976d2)"></span></span>'
    )
