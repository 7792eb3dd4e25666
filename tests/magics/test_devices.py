"""Devices of the notebook's kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import pytest

import nbdist

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def test_devices_without_a_cluster(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = shell.run_line_magic("dist_devices", "")
    assert capsys.readouterr().out.count("nbdist: ") == 1
    assert devices[0].name == "cpu:0"
    assert len(devices) >= jax.device_count()
    assert devices.to_dataframe()["name"].tolist() == [device.name for device in devices]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(nbdist.UsageError, match="to_dataframe needs pandas: run %pip install"):
        devices.to_dataframe()
