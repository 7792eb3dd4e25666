"""Wheels that are packed from installed files."""

from __future__ import annotations

import importlib.metadata
import zipfile
from pathlib import Path

import pytest

from nbdist.utils import wheels

WHEEL = (
    "Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_2_17_x86_64\nTag: cp311-cp311-linux_x86_64\n"
)


def installed(prefix: Path, extra: str = "") -> importlib.metadata.Distribution:
    """Install a package with a script of each kind and a file of data."""
    packages = prefix / "lib/python3/site-packages"
    info = packages / "Nb_Some-1.0.dist-info"
    info.mkdir(parents=True)
    (prefix / "bin").mkdir()
    (prefix / "share").mkdir()
    texts = {
        packages / "nb_some.py": "ONE = 1\n",
        info / "METADATA": "Metadata-Version: 2.1\nName: Nb.Some\nVersion: 1.0\n",
        info / "WHEEL": WHEEL,
        info / "INSTALLER": "pip\n",
        info / "entry_points.txt": "[console_scripts]\nnb-made = nb_some:main\n",
        prefix / "bin/nb-made": "#!/here/python\n",
        prefix / "bin/nb-tool": "#!/here/bin/python3\nprint(1)\n",
        prefix / "share/table.txt": "1 2\n",
    }
    for path, text in texts.items():
        path.write_text(text)
    rows = [f"{_beside(packages, path)},sha256=x,{path.stat().st_size}" for path in texts]
    (info / "RECORD").write_text("\n".join([*rows, "nb_some.pyc,,", *filter(None, [extra])]) + "\n")
    (found,) = importlib.metadata.distributions(path=[str(packages)])
    return found


def _beside(packages: Path, path: Path) -> str:
    if path.is_relative_to(packages):
        return str(path.relative_to(packages))
    return f"../../../{path.relative_to(packages.parents[2])}"


def test_a_packed_wheel_contains_the_files_of_the_original(tmp_path: Path) -> None:
    distribution = installed(tmp_path / "prefix")
    wheel = wheels.pack(distribution, tmp_path / "packed")
    tags = "cp311-cp311-manylinux_2_17_x86_64.linux_x86_64"
    assert wheel.path.name == f"nb_some-1.0-{tags}.whl"
    with zipfile.ZipFile(wheel.path) as archive:
        names = set(archive.namelist())
        tool = archive.read("Nb_Some-1.0.data/scripts/nb-tool")
        record = archive.read("Nb_Some-1.0.dist-info/RECORD").decode()
    assert tool == b"#!python\nprint(1)\n"
    assert names == {
        "nb_some.py",
        "Nb_Some-1.0.data/data/share/table.txt",
        "Nb_Some-1.0.data/scripts/nb-tool",
        *(f"Nb_Some-1.0.dist-info/{n}" for n in ("METADATA", "RECORD", "WHEEL")),
        "Nb_Some-1.0.dist-info/entry_points.txt",
    }
    assert '"nb_some.py",sha256=' in record
    again = wheels.pack(distribution, tmp_path / "others")
    assert again.sha256 == wheel.sha256
    assert wheels.sha256_of(wheel.path) == wheel.sha256


def test_files_that_cannot_be_packed_are_refused(tmp_path: Path) -> None:
    missing = installed(tmp_path / "missing", "nb_gone.py,sha256=x,1")
    with pytest.raises(ValueError, match=r"its file .*nb_gone.py is missing: install it again"):
        wheels.pack(missing, tmp_path)
    (tmp_path / "outside").write_text("x")
    outside = installed(tmp_path / "prefix", "../../../../outside,,")
    with pytest.raises(ValueError, match=r"outside is outside of .*prefix"):
        wheels.pack(outside, tmp_path)
    Path(str(outside.locate_file("Nb_Some-1.0.dist-info/WHEEL"))).unlink()
    with pytest.raises(ValueError, match="has no list of its files"):
        wheels.pack(outside, tmp_path)


def test_size_of_the_recorded_files(tmp_path: Path) -> None:
    distribution = installed(tmp_path / "prefix", "nb_more.py,sha256=x,1000")
    files = [p for p in (tmp_path / "prefix").rglob("*") if p.is_file() and p.name != "RECORD"]
    assert wheels.recorded_bytes(distribution) == 1000 + sum(p.stat().st_size for p in files)
    Path(str(distribution.locate_file("Nb_Some-1.0.dist-info/RECORD"))).unlink()
    assert wheels.recorded_bytes(distribution) is None
