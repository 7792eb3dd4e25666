"""Files of the user, and files of installed packages."""

from __future__ import annotations

import sysconfig
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from nbdist.utils import installed
from nbdist.utils.installed import is_users_file, lacks_tensorflow

if TYPE_CHECKING:
    import pytest


def test_files_of_packages_are_not_the_users() -> None:
    installed = f"{sysconfig.get_path('purelib')}/package/part.py"
    assert is_users_file("helpers", "/home/user/helpers.py")
    assert not is_users_file("package.part", installed)
    assert not is_users_file("json", f"{sysconfig.get_path('stdlib')}/json.py")
    assert not is_users_file("nbdist.cells", "/home/user/nbdist/cells/__init__.py")
    assert not is_users_file("keras.src", "/home/user/keras/src/__init__.py")
    assert not is_users_file("package", "/opt/site-packages/package/__init__.py")


def test_packages_that_pip_installed_into_another_folder_are_not_the_users(tmp_path: Path) -> None:
    """`pip install --target` puts packages into a folder of any name, maybe beside own modules."""
    (tmp_path / "one-1.0.dist-info").mkdir()
    record = "one/__init__.py,sha256=x,1\none/part.py,,\ntwo.py,,\n../../bin/run,,\n"
    (tmp_path / "one-1.0.dist-info" / "RECORD").write_text(record)
    assert not is_users_file("one", f"{tmp_path}/one/__init__.py")
    assert not is_users_file("one.part", f"{tmp_path}/one/part.py")
    assert not is_users_file("two", f"{tmp_path}/two.py")
    assert is_users_file("helpers", f"{tmp_path}/helpers.py")
    assert is_users_file("one", f"{tmp_path}/copy/one/__init__.py")
    assert is_users_file("x.y.z", "z.py")


def test_pythons_without_tensorflow_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(installed, "_PYTHON", (3, 13))
    assert not lacks_tensorflow()
    monkeypatch.setattr(installed, "_PYTHON", (3, 14))
    assert lacks_tensorflow().startswith("TensorFlow has no version for Python 3.14: use JAX")
    assert lacks_tensorflow().endswith("or Python 3.13")
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda _: object())
    assert not lacks_tensorflow()


def test_limit_of_tensorflow_is_that_of_the_installation() -> None:
    limit = ".".join(map(str, installed._FIRST_WITHOUT_TENSORFLOW))
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    extra = tomllib.loads(text)["project"]["optional-dependencies"]["tensorflow"]
    (tensorflow,) = [one for one in map(Requirement, extra) if one.name == "tensorflow"]
    assert str(tensorflow.marker) == f'python_version < "{limit}"'
