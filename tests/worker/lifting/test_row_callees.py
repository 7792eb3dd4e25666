"""Functions of the user that convert a rank's own rows of a batch."""

from __future__ import annotations

import importlib
import inspect
import linecache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.worker.data.batch_array import BatchArray, whole
from nbdist.worker.lifting.row_callees import call

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS, OWN = 8, 4
X = np.arange(ROWS * 6, dtype=np.uint8).reshape(ROWS, 6)
Y = np.arange(ROWS) % 3
mean = np.float32(3)


def scaled(x: Any, low: float = 0.0, *, unused: int = 1) -> Any:
    return x - low * unused


def normalized(x: Any, low: Any = 0.0, high: Any = mean) -> Any:
    """Normalize pixels."""
    scale = 1 / 255
    x = x.astype(np.float32)
    x *= scale
    return (x - low) / high


def two(x: Any, y: Any) -> Any:
    return normalized(jnp.asarray(x)), jax.nn.one_hot(y, 3)


def cropped(row: Any) -> Any:
    return row[1:]


def sines(t: Any) -> Any:
    return jnp.sin(t)


compiled_rows = jax.jit(jax.vmap(cropped))
compiled_slopes = jax.jit(jax.vmap(jax.grad(sines)))
hashed = jax.jit(lambda n: (n * 40503) % 1000)


def of_dict(batch: dict[str, Any]) -> dict[str, Any]:
    x = batch["x"]
    return {"x": normalized(x, high=2.0), "y": batch["y"] == 1}


def nested(x: Any) -> Any:
    return normalized(centered(x))


def centered(x: Any) -> Any:
    return x - x.mean()


def with_rows(x: Any) -> Any:
    return x + np.arange(len(x))[:, None]


def halves(x: Any) -> Any:
    return x.reshape(-1, 3)


def closure() -> Callable[[Any], Any]:
    offset = 1

    def shifted(x: Any) -> Any:
        return x + offset

    return shifted


def raises(x: Any) -> Any:
    return x / unknown  # type: ignore[name-defined]  # noqa: F821


BY_ROW: dict[str, Callable[[Any, Any], Any]] = {
    "function": lambda x, y: call(normalized, x, 0.5),
    "keyword": lambda x, y: call(normalized, x=x, high=np.float32([1, 2, 3, 4, 5, 6])),
    "two batches": lambda x, y: call(normalized, x[:, 0], y),
    "two results": lambda x, y: call(two, x, y)[1],
    "dict": lambda x, y: call(of_dict, {"x": x, "y": y})["x"],
    "tree": lambda x, y: call(jax.tree.map, normalized, {"x": (x, y), "n": np.ones(2)})["x"][0],
    "map": lambda x, y: next(iter(call(map, normalized, (x, y)))),
}
OF_ALL_ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "compiled function of a row": lambda x, y: call(compiled_rows, x),
    "compiled gradient": lambda x, y: call(compiled_slopes, x[:, 0] / np.float32(9)),
    "compiled types": lambda x, y: call(hashed, y * 99999),
    "mean in a called function": lambda x, y: call(nested, x),
    "mean": lambda x, y: call(centered, x),
    "array with rows": lambda x, y: call(with_rows, x),
    "other rows": lambda x, y: call(halves, x),
    "keyword only": lambda x, y: call(scaled, x, 1),
    "closure": lambda x, y: call(closure(), x),
    "library": lambda x, y: call(np.linalg.norm, x),
    "library of Python": lambda x, y: call(np.cumsum, x, 0),
}


def arrays(reads: list[int]) -> tuple[BatchArray, BatchArray]:
    """Return batch arrays that note when all rows are read."""

    def array(values: np.ndarray) -> BatchArray:
        def read() -> np.ndarray:
            reads.append(1)
            return values

        return BatchArray(values[OWN:].copy(), OWN, ROWS, read)

    return array(X), array(Y)


@pytest.mark.parametrize("name", BY_ROW)
def test_functions_of_own_rows(name: str) -> None:
    reads: list[int] = []
    found = BY_ROW[name](*arrays(reads))
    assert isinstance(found, BatchArray)
    assert not reads
    np.testing.assert_allclose(found.part(slice(OWN, ROWS)), BY_ROW[name](X, Y)[OWN:], rtol=1e-6)
    np.testing.assert_allclose(whole(found), BY_ROW[name](X, Y), rtol=1e-6)
    assert found.dtype == BY_ROW[name](X, Y).dtype


@pytest.mark.parametrize("name", OF_ALL_ROWS)
def test_functions_of_all_rows(name: str) -> None:
    reads: list[int] = []
    found = OF_ALL_ROWS[name](*arrays(reads))
    assert reads
    expected = OF_ALL_ROWS[name](X, Y)
    np.testing.assert_allclose(whole(found), expected, rtol=1e-6)
    assert (type(found), found.dtype) == (type(expected), expected.dtype)


def replaced(x: Any) -> Any:
    return x / 2


def quarter(x: Any) -> Any:
    return x / 4


def test_code_that_a_reload_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    np.testing.assert_array_equal(whole(call(replaced, arrays([])[0])), X / 2)
    monkeypatch.setattr(replaced, "__code__", quarter.__code__)
    np.testing.assert_array_equal(whole(call(replaced, arrays([])[0])), X / 4)


def test_file_that_changed_after_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own_helpers.py"
    file.write_text("def f(x):\n    return x / 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("own_helpers")
    file.write_text("def other(x):\n    return x * 100\n\ndef f(x):\n    return x / 2\n")
    linecache.clearcache()
    np.testing.assert_array_equal(whole(call(module.f, arrays([])[0])), X / 2)


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(TypeError, match="low2"):
        call(normalized, arrays([])[0], low2=1)


def test_an_error_names_the_line_of_the_function() -> None:
    with pytest.raises(NameError, match="unknown") as error:
        call(raises, arrays([])[0])
    last = error.traceback[-1]
    assert last.frame.code.raw.co_filename == __file__
    assert last.lineno == inspect.getsourcelines(raises)[1]


def test_values_without_batches() -> None:
    assert call(normalized, 255.0 * np.ones(1), high=1)[0] == pytest.approx(1)
