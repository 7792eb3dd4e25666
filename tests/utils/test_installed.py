"""Files of the user, and files of installed packages."""

from __future__ import annotations

import sysconfig
from typing import TYPE_CHECKING

from nbdist.utils.installed import is_users_file

if TYPE_CHECKING:
    from pathlib import Path


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
