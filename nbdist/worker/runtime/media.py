"""Conversion of values that a cell reports to histograms, images, tables and texts.

Values that are too large are reduced, with a remark. Other values are refused by their name.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nbdist.errors import UsageError
from nbdist.records import AnyMedia, DataTable, Histogram, Image, Text

BINS = 64
MOST_VALUES = 1 << 22
"""Values of an array that a histogram counts. A larger array is sampled evenly."""
MOST_PIXELS = 1024
"""Longest side of an image. A larger image is scaled down."""
MOST_ROWS = 1000
MOST_COLUMNS = 100
MOST_CELL_CHARACTERS = 1000
MOST_CHARACTERS = 100_000

Converted = tuple[AnyMedia, str]
"""A content, and a remark on how it was reduced; empty if it was not."""


def named(kind: str, given: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of an argument of `report`.

    Args:
        kind: name of the argument, the name of a value without one.
        given: a value, or a dict of values by name. Names of nested dicts are joined by `/`.
    """
    if not isinstance(given, Mapping) or (kind == "table" and not _is_tables(given)):
        yield kind, given
        return
    for name, value in given.items():
        for inner, leaf in named(kind, value):
            is_nested = isinstance(value, Mapping) and leaf is not value
            yield (f"{name}/{inner}" if is_nested else str(name)), leaf


def converted(kind: str, name: str, value: Any) -> Converted:
    """Convert a value.

    Args:
        kind: argument of `report`: hist, image, table or text.
        name: name of the value.
        value: the value.

    Raises:
        UsageError: the value cannot be shown as this kind.
    """
    try:
        content, remark = _CONVERTERS[kind](value)
    except UsageError as error:
        raise UsageError(f"{kind} {name!r}: {error}") from None
    return content, f"{kind} {name!r}: {remark}" if remark else ""


def histogram(value: Any) -> Converted:
    """Count the values of an array in bins of equal width."""
    import numpy as np

    array = _array(value)
    if array.dtype.kind not in "fiub":
        raise UsageError(f"values of type {array.dtype} cannot be counted: report numbers")
    values, remark = array.reshape(-1), ""
    if not values.size:
        raise UsageError(f"the array of shape {array.shape} is empty")
    if values.size > MOST_VALUES:
        stride = -(-values.size // MOST_VALUES)
        remark = f"counts one in {stride} of {values.size:,} values"
        values = values[::stride]
    values = values.astype(np.float64)
    finite = values[np.isfinite(values)]
    if not finite.size:
        raise UsageError("all values are NaN or infinite")
    counts, edges = np.histogram(finite, BINS, _bounds(float(finite.min()), float(finite.max())))
    content = Histogram(
        edges=tuple(edges.tolist()),
        counts=tuple(map(float, counts)),
        size=finite.size,
        mean=float(finite.mean()),
        deviation=float(finite.std()),
        not_finite=values.size - finite.size,
    )
    return content, remark


def image(value: Any) -> Converted:
    """Encode pixels of uint8, or of floats from 0 to 1, as PNG."""
    import numpy as np
    from PIL import Image as Pillow

    array = _array(value)
    is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))
    if not is_image or not array.size:
        hint = ": report one image of the batch, as in images[0]" if array.ndim == 4 else ""
        raise UsageError(f"shape {array.shape} is not (height, width[, 1, 3 or 4]){hint}")
    pixels = _pixels(array)
    squeezed = np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2:] == (1,) else pixels)
    picture, remark = Pillow.fromarray(squeezed), ""
    if max(picture.size) > MOST_PIXELS:
        remark = f"scaled down from {picture.width} x {picture.height} pixels"
        picture.thumbnail((MOST_PIXELS, MOST_PIXELS))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return Image(width=picture.width, height=picture.height, png=file.getvalue()), remark


def table(value: Any) -> Converted:
    """Convert a list of dicts, a dict of columns, or a data frame."""
    columns = _columns(value)
    lengths = {name: len(cells) for name, cells in columns.items()}
    if not columns:
        raise UsageError("it has no columns")
    if len(set(lengths.values())) > 1:
        first, other = _differing(lengths)
        raise UsageError(
            f"column {first!r} has {lengths[first]} rows and column {other!r} has "
            f"{lengths[other]}: use columns of the same length"
        )
    if len(columns) > MOST_COLUMNS:
        raise UsageError(f"it has {len(columns)} columns, and at most {MOST_COLUMNS} are shown")
    count = next(iter(lengths.values()))
    shown = (cells[:MOST_ROWS] for cells in columns.values())
    rows = tuple(tuple(map(_cell, row)) for row in zip(*shown, strict=True))
    remark = f"shows the first {MOST_ROWS} of {count:,} rows" if count > MOST_ROWS else ""
    return DataTable(columns=tuple(columns), rows=rows, left_out=count - len(rows)), remark


def text(value: Any) -> Converted:
    """Accept a text."""
    if not isinstance(value, str):
        raise UsageError(f"{type(value).__name__} is not a text: use str(...)")
    if len(value) <= MOST_CHARACTERS:
        return Text(text=value), ""
    remark = f"shows the first {MOST_CHARACTERS:,} of {len(value):,} characters"
    return Text(text=value[:MOST_CHARACTERS]), remark


_CONVERTERS: dict[str, Callable[[Any], Converted]] = {
    "hist": histogram,
    "image": image,
    "table": table,
    "text": text,
}


def _array(value: Any) -> Any:
    """Return a value as a NumPy array. bfloat16 becomes float32."""
    import numpy as np

    try:
        array = np.asarray(value)
    except Exception as error:  # noqa: BLE001 - tensors of any library may refuse the conversion
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{type(value).__name__} cannot be read as an array ({reason})") from None
    if array.dtype == object:
        raise UsageError(f"{type(value).__name__} cannot be read as an array of numbers")
    return array.astype(np.float32) if array.dtype.name in ("bfloat16", "float16") else array


def _bounds(low: float, high: float) -> tuple[float, float]:
    """Return the outer edges of the bins. Equal values need a width."""
    width = max(abs(low), 1.0) * 1e-6
    return (low, high) if high - low > width * 1e-6 else (low - width, high + width)


def _pixels(array: Any) -> Any:
    """Return pixels as uint8.

    Raises:
        UsageError: the values are not those of an image.
    """
    import numpy as np

    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if array.dtype.kind != "f":
        raise UsageError(f"pixels of type {array.dtype}: use uint8, or floats from 0 to 1")
    if not np.isfinite(array).all():
        raise UsageError("some pixels are NaN or infinite")
    low, high = float(array.min()), float(array.max())
    if low < 0 or high > 1:
        raise UsageError(f"floats from {low:.4g} to {high:.4g}: scale them to 0 to 1, or use uint8")
    return np.rint(array * 255).astype(np.uint8)


def _is_tables(given: Mapping[str, Any]) -> bool:
    """Return True for a dict of tables, and False for a dict of columns."""
    return bool(given) and all(map(_is_table, given.values()))


def _is_table(value: Any) -> bool:
    is_list_of_dicts = isinstance(value, list | tuple) and bool(value)
    return (
        isinstance(value, Mapping)
        or _is_frame(value)
        or (is_list_of_dicts and all(isinstance(row, Mapping) for row in value))
    )


def _is_frame(value: Any) -> bool:
    return type(value).__name__ == "DataFrame" and hasattr(value, "columns")


def _columns(value: Any) -> dict[str, Sequence[Any]]:
    """Return the columns of a table by name."""
    if _is_frame(value):
        if not value.columns.is_unique:
            raise UsageError("two columns have the same name: rename one")
        return {str(name): list(value[name]) for name in value.columns}
    if isinstance(value, Mapping):
        return {str(name): _cells(str(name), cells) for name, cells in value.items()}
    if _is_table(value):
        names = dict.fromkeys(str(name) for row in value for name in row)
        rows = [{str(name): cell for name, cell in row.items()} for row in value]
        return {name: [row.get(name) for row in rows] for name in names}
    raise UsageError(
        f"{type(value).__name__} is not a list of dicts, a dict of columns or a data frame"
    )


def _cells(name: str, column: Any) -> Sequence[Any]:
    if isinstance(column, str) or not hasattr(column, "__len__"):
        raise UsageError(f"column {name!r} is {type(column).__name__}: use a list of cells")
    is_array = hasattr(column, "__array__") and str(getattr(column, "dtype", "")) != "object"
    cells: list[Any] = _array(column).tolist() if is_array else list(column)
    return cells


def _differing(lengths: dict[str, int]) -> tuple[str, str]:
    """Return the first column, and the first one of another length."""
    first = next(iter(lengths))
    return first, next(name for name, length in lengths.items() if length != lengths[first])


def _cell(value: Any) -> str | int | float | bool | None:
    """Return a cell as a number, a truth value, None or a short text."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else str(value)
    if not isinstance(value, str) and getattr(value, "shape", None) == ():
        return _cell(_array(value).item())
    shown = str(value)
    return shown if len(shown) <= MOST_CELL_CHARACTERS else shown[: MOST_CELL_CHARACTERS - 1] + "…"
