"""Edits of a user to stored runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.records import Annotations
from nbdist.telemetry.annotations import ANNOTATIONS_FILE, MOST_BYTES, annotate, read_annotations

if TYPE_CHECKING:
    from pathlib import Path


def test_edits_are_stored_field_by_field(tmp_path: Path) -> None:
    assert read_annotations(tmp_path) == Annotations()
    annotate(tmp_path, {"name": "  best  ", "tags": ["a", " b ", "a", " "]})
    assert annotate(tmp_path, {"pinned": True, "note": "größer"}) == read_annotations(tmp_path)
    expected = Annotations(name="best", tags=("a", "b"), note="größer", pinned=True)
    assert read_annotations(tmp_path) == expected
    assert [file.name for file in tmp_path.iterdir()] == [ANNOTATIONS_FILE]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": "red"}, "unknown: colour; use name, tags, note, pinned"),
        ({"name": "x" * 201}, "length <= 200"),
        ({"name": None}, "Expected `str`"),
        ({"tags": "a"}, "Expected `array`"),
        ({"tags": ["x" * 61]}, "length <= 60"),
        ({"tags": ["x"] * 21}, "length <= 20"),
        ({"note": "x" * 20_001}, "length <= 20000"),
        ({"pinned": 1}, "Expected `bool`"),
    ],
)
def test_invalid_edits_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    annotate(tmp_path, {"name": "before"})
    with pytest.raises(msgspec.ValidationError, match=message):
        annotate(tmp_path, changes)
    assert read_annotations(tmp_path) == Annotations(name="before")


@pytest.mark.parametrize("content", [b"{", b'{"tags": 1}', b'{"name": "\xff"}', b" " * 300_000])
def test_a_damaged_file_contains_no_edits(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ANNOTATIONS_FILE).write_bytes(content)
    assert read_annotations(tmp_path) == Annotations()
    assert annotate(tmp_path, {"name": "again"}) == read_annotations(tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_bytes(b'{"name": "secret"}')
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ANNOTATIONS_FILE).symlink_to(target)
    assert read_annotations(folder) == Annotations()
    annotate(folder, {"name": "own"})
    assert target.read_bytes() == b'{"name": "secret"}'


def test_the_largest_edits_can_be_read_again(tmp_path: Path) -> None:
    tags = [f"{number:060}" for number in range(20)]
    stored = annotate(tmp_path, {"name": "\x01" * 200, "tags": tags, "note": "\x01" * 20_000})
    assert (tmp_path / ANNOTATIONS_FILE).stat().st_size <= MOST_BYTES
    assert read_annotations(tmp_path) == stored
