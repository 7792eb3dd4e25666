"""Files of the user, and files of installed packages."""

from __future__ import annotations

import sysconfig

from nbdist.utils.installed import is_users_file


def test_files_of_packages_are_not_the_users() -> None:
    installed = f"{sysconfig.get_path('purelib')}/package/part.py"
    assert is_users_file("helpers", "/home/user/helpers.py")
    assert not is_users_file("package.part", installed)
    assert not is_users_file("json", f"{sysconfig.get_path('stdlib')}/json.py")
    assert not is_users_file("nbdist.cells", "/home/user/nbdist/cells/__init__.py")
    assert not is_users_file("keras.src", "/home/user/keras/src/__init__.py")
    assert not is_users_file("package", "/opt/site-packages/package/__init__.py")
