"""Packing of the notebook's distributions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nbdist.cluster.remote_host import environment_lock
from nbdist.utils import distributions, wheels

if TYPE_CHECKING:
    from importlib.metadata import Distribution
    from pathlib import Path

    import pytest


def test_the_largest_wheel_begins_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    pack = wheels.pack

    def noted(distribution: Distribution, folder: Path) -> wheels.Wheel:
        begun.append(wheels.recorded_bytes(distribution) or 0)
        return pack(distribution, folder)

    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(wheels, "pack", noted)
    installed = distributions.found()
    names = ["cloudpickle", "packaging", "wrapt"]
    packed = environment_lock.pack({name: installed[name] for name in names}, tmp_path)
    assert begun == sorted(begun, reverse=True)
    assert len(set(begun)) == len(names)
    assert list(packed) == names
    assert all(packed[name].path.is_file() for name in names)
