"""Data that a run sends to its widget, without a front end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from nbdist.records import Columns, StateMessage, Table, TableMessage, TextMessage
from nbdist.views.run import widget as module
from nbdist.views.run.widget import PAGE_OPENS_S, MarimoPlace, RunWidget, WidgetSurface
from tests.clock import Clock, replace_time
from tests.runs import new_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TABLE = Table(number=3, columns=Columns(own=("loss",)))
PICTURE: Any = None


class FeedDouble:
    """Double of a feed: a test queues its messages."""

    def __init__(self, *messages: str | bytes, error: Exception | None = None) -> None:
        self.messages, self.error = list(messages), error

    def news(self) -> Iterator[str | bytes]:
        yield from self.messages
        self.messages.clear()
        if self.error is not None:
            raise self.error


class Shown:
    """A surface, the feeds that it opened, and the place of its widget."""

    def __init__(self, make: Callable[[], FeedDouble]) -> None:
        self.feeds: list[FeedDouble] = []
        self.widgets: list[RunWidget] = []
        self.closed = 0
        self._make = make
        place: Any = self
        self.surface = WidgetSurface(place, self._follow)

    def _follow(self) -> FeedDouble:
        self.feeds.append(self._make())
        return self.feeds[-1]

    def show(self, _picture: object, widget: RunWidget) -> None:
        """Show the widget, as an output does."""
        self.widgets.append(widget)

    def close(self, _drawn: object) -> None:
        self.closed += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return replace_time(monkeypatch, module)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, list[bytes]]]:
    """Return the messages that widgets send."""
    found: list[tuple[bool, list[bytes]]] = []

    def send(_self: RunWidget, content: dict[str, Any], buffers: list[bytes]) -> None:
        assert content["type"] == "Rows"
        found.append((content["from_start"], buffers))

    monkeypatch.setattr(RunWidget, "send", send)
    return found


def frame(first: int, last: int, table: int = 3) -> bytes:
    """Return rows of steps `first` to `last`."""
    rows = [[0.0, 1.0, step, 0.1, 2.0] for step in range(first, last + 1)]
    return np.array([table, *np.ravel(rows)], "<f8").tobytes()


def steps(frame: bytes) -> list[float]:
    return list(np.frombuffer(frame, "<f8")[1:].reshape(-1, 5)[:, 2])


def text(message: object) -> str:
    return msgspec.json.encode(message).decode()


def opening() -> list[str | bytes]:
    return [text(TableMessage(table=TABLE)), frame(1, 2)]


def test_the_widget_is_shown_once_with_its_first_rows(
    clock: Clock, sent: list[tuple[bool, list[bytes]]]
) -> None:
    state = new_state()
    first = [text(StateMessage(state=state)), text(TextMessage(text="x")), *opening()]
    shown = Shown(lambda: FeedDouble(*first))
    assert not shown.surface.follows
    shown.surface.show(PICTURE)
    assert shown.surface.follows
    (widget,) = shown.widgets
    assert widget.state["id"] == state.id
    assert msgspec.convert(widget.tables, list[Table]) == [TABLE]
    assert sent == [(True, [frame(1, 2)])]
    shown.surface.show(PICTURE)
    assert len(shown.widgets) == 1


def test_a_page_that_opens_receives_all_rows_again(
    clock: Clock, sent: list[tuple[bool, list[bytes]]]
) -> None:
    shown = Shown(lambda: FeedDouble(*opening()))
    shown.surface.show(PICTURE)
    clock.now += PAGE_OPENS_S / 2
    shown.surface.show(PICTURE)
    assert len(shown.feeds) == 2
    assert [from_start for from_start, _ in sent] == [True, True]
    assert len(shown.widgets[0].tables) == 1


def test_a_page_that_is_open_receives_new_rows_only(
    clock: Clock, sent: list[tuple[bool, list[bytes]]]
) -> None:
    shown = Shown(lambda: FeedDouble(*opening()))
    shown.surface.show(PICTURE)
    clock.now += PAGE_OPENS_S
    other = Table(number=4, columns=Columns(own=("x",)))
    shown.feeds[0].messages = [text(TableMessage(table=other)), frame(3, 3)]
    shown.surface.show(PICTURE)
    assert len(shown.feeds) == 1
    assert sent[1:] == [(False, [frame(3, 3)])]
    assert msgspec.convert(shown.widgets[0].tables, list[Table]) == [TABLE, other]
    shown.surface.show(PICTURE)
    assert len(sent) == 2


def test_many_rows_are_not_sent_again(
    clock: Clock, sent: list[tuple[bool, list[bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_AGAIN_BYTES", len(frame(1, 3)))
    shown = Shown(lambda: FeedDouble(*opening()))
    for _ in range(3):  # two rows, from the start each time
        shown.surface.show(PICTURE)
    assert len(shown.feeds) == 3
    monkeypatch.setattr(module, "MOST_AGAIN_BYTES", len(frame(1, 2)))
    shown.surface.show(PICTURE)
    assert len(shown.feeds) == 3


def test_rows_are_thinned_to_the_same_steps(
    clock: Clock, sent: list[tuple[bool, list[bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 300)  # seven rows
    frames = [frame(1, 10), frame(11, 20), frame(-1, -1)]
    shown = Shown(lambda: FeedDouble(text(TableMessage(table=TABLE)), *frames))
    shown.surface.show(PICTURE)
    ((_, buffers),) = sent
    assert [steps(one) for one in buffers] == [[4.0, 8.0], [12.0, 16.0, 20.0], [-1.0]]
    assert {one[:8] for one in buffers} == {np.array([3.0]).tobytes()}


def test_rows_that_fit_are_not_thinned(
    clock: Clock, sent: list[tuple[bool, list[bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", len(frame(1, 5)))
    shown = Shown(lambda: FeedDouble(text(TableMessage(table=TABLE)), frame(1, 5)))
    shown.surface.show(PICTURE)
    assert sent == [(True, [frame(1, 5)])]


@pytest.mark.parametrize("error", [OSError(), msgspec.DecodeError()])
def test_a_deleted_run_keeps_its_rows(
    clock: Clock, sent: list[tuple[bool, list[bytes]]], error: Exception
) -> None:
    shown = Shown(lambda: FeedDouble(*opening(), error=error))
    shown.surface.show(PICTURE)
    assert len(sent) == 1


def test_a_run_that_was_never_shown_closes_nothing(clock: Clock) -> None:
    shown = Shown(FeedDouble)
    shown.surface.close(PICTURE)
    assert shown.closed == 0
    shown.surface.show(PICTURE)
    shown.surface.close(PICTURE)
    assert shown.closed == 1


class MarimoDouble:
    """Double of the module `marimo`: it stores its output."""

    def __init__(self) -> None:
        self.output = self
        self.replaced: list[object] = []

    def replace(self, value: object) -> None:
        self.replaced.append(value)

    def Html(self, text: str) -> object:  # noqa: N802 - marimo's name
        return "html", text

    def plain_text(self, text: str) -> object:
        return text


@dataclass
class EndedDouble:
    """Double of an ended run."""

    data: dict[str, object]

    def _repr_mimebundle_(self) -> dict[str, object]:
        return self.data


@pytest.mark.parametrize(
    ("data", "output"),
    [
        ({"text/plain": "loss 1", "text/html": "<img>"}, ("html", "<img>")),
        ({"text/plain": "loss 1"}, "loss 1"),
    ],
)
def test_marimo_shows_a_picture_or_text_at_the_end(data: dict[str, object], output: object) -> None:
    marimo: Any = MarimoDouble()
    MarimoPlace(marimo).close(EndedDouble(data))
    assert marimo.replaced == [output]
