"""Edits of a user to stored runs: name, tags, note and pin, in a file of their own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec

from nbdist.records import Annotations
from nbdist.utils.files import read_file, replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nbdist.records import RunState

ANNOTATIONS_FILE = "annotations.json"
MOST_BYTES = 200_000
"""Largest size of the file, and of a request that changes it."""

_lock = threading.Lock()


def read_annotations(folder: Path) -> Annotations:
    """Return the edits of the run in this folder. A missing or damaged file contains none."""
    try:
        return msgspec.json.decode(
            read_file(folder / ANNOTATIONS_FILE, MOST_BYTES), type=Annotations
        )
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return Annotations()


def renamed(state: RunState, folder: Path) -> RunState:
    """Return the state with the name that the user has given to the run in this folder, if any."""
    name = read_annotations(folder).name
    return msgspec.structs.replace(state, name=name) if name else state


def annotate(folder: Path, changes: Mapping[str, object]) -> Annotations:
    """Change fields of the edits, and return all of them.

    Spaces around texts are removed, and so are empty and repeated tags.

    Args:
        folder: folder of the run.
        changes: new values by name of the field.

    Raises:
        msgspec.ValidationError: a field does not exist, or a value has the wrong type or length.
        OSError: the file cannot be written. The old edits remain.
    """
    unknown = changes.keys() - set(Annotations.__struct_fields__)
    if unknown:
        fields = ", ".join(Annotations.__struct_fields__)
        raise msgspec.ValidationError(f"unknown: {', '.join(sorted(unknown))}; use {fields}")
    with _lock:
        before = msgspec.to_builtins(read_annotations(folder))
        changed = msgspec.convert({**before, **changes}, Annotations)
        tags = dict.fromkeys(tag.strip() for tag in changed.tags)
        tidy = msgspec.structs.replace(
            changed, name=changed.name.strip(), tags=tuple(filter(None, tags))
        )
        replace_file(folder / ANNOTATIONS_FILE, msgspec.json.encode(tidy), 0o600)
    return tidy
