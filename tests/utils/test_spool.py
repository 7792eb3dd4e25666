"""Spool: content in memory, in a file, and on a full disk."""

from __future__ import annotations

import pickle
import resource
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.utils.spool import Spool

if TYPE_CHECKING:
    from pathlib import Path


def test_small_content_creates_no_file(tmp_path: Path) -> None:
    with Spool(tmp_path / "a", 10) as spool:
        assert spool.write(b"0123456789") == 10
        assert not spool.is_file
        assert spool.content() == b"0123456789"
        assert not list(tmp_path.iterdir())


def test_large_content_moves_to_a_private_file_that_only_keep_keeps(tmp_path: Path) -> None:
    for keeps in (False, True):
        with Spool(tmp_path / "a", 10) as spool:
            spool.write(b"012345")
            spool.write(b"6789ab")
            assert spool.is_file
            assert spool.size == 12
            assert spool.content() == b"0123456789ab"
            assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
            if keeps:
                spool.keep()
        assert (tmp_path / "a").exists() == keeps


def test_buffers_of_arrays_in_any_order_are_accepted(tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    with Spool(tmp_path / "a", 10) as spool:
        pickle.Pickler(spool, 5).dump(array)
        found = pickle.loads(spool.content())
    np.testing.assert_array_equal(found, array)
    assert found.flags.f_contiguous


def test_content_stays_in_memory_if_the_file_cannot_be_written(tmp_path: Path) -> None:
    with Spool(tmp_path / "missing" / "a", 10) as spool:
        spool.write(b"012345")
        spool.write(b"6789ab")
        spool.write(b"cd")
        assert not spool.is_file
        assert spool.content() == b"0123456789abcd"


@pytest.mark.parametrize("sizes", [(9, 9), (3, 4, 9)], ids=["at the move", "later"])
def test_content_returns_to_memory_if_the_disk_becomes_full(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    """A limit of the size of files stands for the disk. The error of a write is the same."""
    parts = [bytes([number]) * size * 1000 for number, size in enumerate(sizes)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Spool(tmp_path / "a", 5000) as spool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, before[1]))
        try:
            for part in parts:
                spool.write(part)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not spool.is_file
        assert spool.content() == b"".join(parts)
    assert not list(tmp_path.iterdir())
