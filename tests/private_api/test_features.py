"""Private names of libraries: the lists are complete, and a missing name disables its features."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist.errors import LibraryVersionError
from nbdist.private_api import (
    features,
    grain,
    ipykernel,
    jax,
    keras,
    orbax,
    pyarrow,
    tensorflow,
    tested_versions,
)
from nbdist.utils import installed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.private_api.features import Feature, Library

MODULES = {
    "grain": grain,
    "ipykernel": ipykernel,
    "jax": jax,
    "keras": keras,
    "orbax": orbax,
    "pyarrow": pyarrow,
    "tensorflow": tensorflow,
}
FEATURES = [each for module in MODULES.values() for each in module.LIBRARY.features]
WITHOUT_IMPORT = {"path", "loaded"}
"""Methods of `Library` that take a name."""


def needs_library(library: Library) -> None:
    if library.name == "TensorFlow" and (missing := installed.lacks_tensorflow()):
        pytest.skip(missing)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("feature", FEATURES, ids=lambda each: each.purpose)
def test_installed_versions_support_each_feature(
    feature: Feature, caplog: pytest.LogCaptureFixture
) -> None:
    needs_library(feature.library)
    feature.check()
    assert not caplog.records


def trees() -> Iterator[ast.Module]:
    package = Path(nbdist.__file__).parent
    for file in package.rglob("*.py"):
        if file.parent != package / "private_api":
            yield ast.parse(file.read_text(encoding="utf-8"))


def used_names(library: str) -> set[str]:
    """Return the names that nbdist imports from a module, with their attributes."""
    used = set[str]()
    for tree in trees():
        aliases = {
            alias.asname or alias.name: alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == f"nbdist.private_api.{library}"
            for alias in node.names
            if alias.name in MODULES[library].LIBRARY.names
        }
        used.update(aliases.values())
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=alias), attr=name) if (
                    alias == f"private_{library}" and name in MODULES[library].LIBRARY.names
                ):
                    used.add(name)
                case ast.Attribute(value=ast.Name(id=alias), attr=attribute) if alias in aliases:
                    used.add(f"{aliases[alias]}.{attribute}")
    return used


@pytest.mark.parametrize("library", MODULES)
def test_each_name_that_is_used_belongs_to_a_feature(library: str) -> None:
    listed = {
        ".".join(use.split(".")[:count])
        for feature in MODULES[library].LIBRARY.features
        for use in feature.uses
        for count in (1, 2)
    }
    assert used_names(library) - listed == set()


NOT_CHECKED = {
    *("_asdict", "_exit", "_fields", "_replace"),  # documented
    *("_current_frames", "_getframe"),  # of Python
    *("_jit_info", "_distributed_container"),  # of functions and handles, which have no class
}
"""Private attributes that need no check, or whose class Python cannot read."""


def test_each_private_attribute_of_a_library_belongs_to_a_feature() -> None:
    """A name that is also one of nbdist's own counts as such."""
    own, read = set[str](), set[str]()
    for tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    own.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name) if name.startswith("_") and name[:2] != "__":
                    read.add(name)
    uses = {use for feature in FEATURES for use in feature.uses}
    listed = {part for use in uses for part in use.split(".")}
    assert read - own - listed - NOT_CHECKED == set()


@pytest.mark.parametrize("library", MODULES)
def test_each_listed_name_is_used(library: str) -> None:
    found = used_names(library)
    attributes, looked_up = set[str](), set[str]()
    for tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(attr=name), args=[ast.Constant(value=str(given))]):
                    looked_up.update({given} if name in WITHOUT_IMPORT else ())
                case ast.Attribute(attr=text) | ast.Constant(value=str(text)):
                    attributes.add(text)
    uses = {use for feature in MODULES[library].LIBRARY.features for use in feature.uses}
    unused = {
        use
        for use in uses
        if use not in found | looked_up and not {*use.split(".")[1:]} & attributes
    }
    assert unused == set()
    listed = {use.partition(".")[0] for use in uses}
    assert listed == MODULES[library].LIBRARY.names


def test_a_missing_name_is_refused_for_its_features_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("jax._src.lax.convolution.conv_general_dilated_p")
    message = (
        r"^JAX \S+ has no jax\._src\.lax\.convolution\.conv_general_dilated_p, which nbdist needs "
        r'for sharded grouped convolutions: install "jax==\S+" for the workers, then start them '
        r"again \(%dist_stop, %dist_start\)$"
    )
    with pytest.raises(LibraryVersionError, match=message):
        jax.CONVOLUTIONS.check()
    assert not jax.CONVOLUTIONS.is_supported("gradients are wrong")
    assert caplog.messages[0].startswith("gradients are wrong, because JAX ")
    for other in jax.LIBRARY.features:
        if other is not jax.CONVOLUTIONS:
            other.check()


def test_an_import_of_a_missing_name_lists_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("jax._src.sharding_impls.ShardingContext")
    message = (
        r"has no jax\._src\.sharding_impls\.ShardingContext, which nbdist needs for step cells "
        "under the pjrt strategy, callbacks on all ranks, sharded grouped convolutions: install"
    )
    with pytest.raises(LibraryVersionError, match=message):
        from nbdist.private_api.jax import ShardingContext  # noqa: F401


def test_a_missing_module_is_a_missing_name() -> None:
    paths = {"gone": "jax._src.gone", "older": ("jax._src.gone:a", "jax:jit")}
    library = features.Library("JAX", "jax", paths)
    with pytest.raises(LibraryVersionError, match=r"has no jax\._src\.gone, which"):
        library.find("gone")
    assert library.find("older") is importlib.import_module("jax").jit


def test_names_of_newer_versions_are_not_needed() -> None:
    library = features.Library("JAX", "jax", {"gone": "jax._src.gone"}, since={"gone": (99, 0)})
    library.feature("a feature", "gone.attribute").check()


def test_a_failed_import_of_another_module_is_not_a_missing_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_other.py").write_text("import nbdist_no_module\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    library = features.Library("JAX", "jax", {"broken": "needs_other"})
    with pytest.raises(ModuleNotFoundError, match="nbdist_no_module"):
        library.find("broken")


def test_names_that_are_not_listed_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        jax.no_such_name  # noqa: B018


def test_a_module_that_is_not_imported_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow.python.eager.context", raising=False)
    assert tensorflow.LIBRARY.loaded("context") is None


@pytest.fixture
def untested_jax(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(tested_versions.TESTED, "JAX", ("1.1.", "1.2."))
    tested_versions.warn_if_untested.cache_clear()
    yield
    tested_versions.warn_if_untested.cache_clear()


@pytest.mark.usefixtures("untested_jax")
def test_an_untested_version_is_refused_for_features_that_only_tests_confirm() -> None:
    message = (
        r"^nbdist supports `fit` under the pjrt strategy with JAX 1\.1\.x, 1\.2\.x, and 0\.\S+ is "
        r'installed: install "jax==1\.2\.\*"'
    )
    with pytest.raises(LibraryVersionError, match=message):
        jax.FIT.check()
    with pytest.raises(LibraryVersionError, match=r"\(%dist_stop, %dist_start\), or use --check$"):
        jax.STEP_CELLS.check(instead="use --check")


@pytest.mark.usefixtures("untested_jax")
def test_an_untested_version_is_accepted_with_one_warning_where_names_suffice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    jax.PJRT.check()
    jax.PROFILES.check()
    jax.STEP_CELLS.check(is_confirmed=True)
    (message,) = caplog.messages
    assert message.endswith(
        "is not tested with nbdist: nbdist refuses features that only tests can confirm. Use "
        "1.1.x, 1.2.x"
    )


def test_attributes_that_methods_assign_are_found() -> None:
    """They exist only on instances."""
    paths = {"Function": tensorflow.LIBRARY.path("Function")}
    library = features.Library("TensorFlow", "tensorflow", paths)
    needs_library(library)
    found = library.find("Function")
    assert not hasattr(found, "_omit_frequent_tracing_warning")
    library.feature("a feature", "Function._omit_frequent_tracing_warning").check()
    with pytest.raises(LibraryVersionError, match=r"Function\._gone, which nbdist needs for a fea"):
        library.feature("a feature", "Function._gone").check()
