"""Wheels of installed distributions, made from their files."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import stat
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import Distribution

_DATE = (1980, 1, 1, 0, 0, 0)
"""Date of all files, so that equal files give equal wheels."""

_OF_AN_INSTALLATION = {
    *("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"),
    *("uv_cache.json", "uv_build.json"),
}
"""Files that an installer adds. They differ between installations of one wheel."""

_WHEEL = ".dist-info/WHEEL"
_SCRIPT_GROUPS = ("console_scripts", "gui_scripts")
_CHUNK_BYTES = 1 << 20
_PURE = "Wheel-Version: 1.0\nGenerator: nbdist\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class Wheel(NamedTuple):
    """A wheel and the SHA-256 of its content, in hexadecimal digits."""

    path: Path
    sha256: str


def recorded_bytes(distribution: Distribution) -> int | None:
    """Return the size of the files of a distribution; None without a list of its files."""
    record = distribution.read_text("RECORD")
    if record is None:
        return None
    return sum(int(row[2]) for row in csv.reader(record.splitlines()) if row[2:] and row[2])


def pack(distribution: Distribution, folder: Path) -> Wheel:
    """Pack the files of an installed distribution, as they are now, into a wheel.

    Args:
        distribution: a distribution that is not editable.
        folder: folder of packed wheels. A wheel that it contains is used again.

    Raises:
        ValueError: the files cannot be packed. The message contains the reason.
        OSError: a file cannot be read or written.
    """
    record, wheel = distribution.read_text("RECORD"), distribution.read_text("WHEEL")
    if record is None or wheel is None:
        raise ValueError("the installation has no list of its files")
    origin = distribution.read_text("direct_url.json") or ""
    key = hashlib.blake2b(f"{record}{origin}".encode(), digest_size=8).hexdigest()
    path = folder / key / f"{_stem(distribution)}-{_tags(wheel)}.whl"
    return _written(path, dict(_members(distribution, record)))


def pack_package(distribution: Distribution, package: Path, folder: Path) -> Wheel:
    """Pack a package of pure Python from its folder, with the metadata of its distribution.

    Args:
        distribution: an editable distribution.
        package: folder of the package.
        folder: folder of packed wheels.

    Raises:
        OSError: a file cannot be read or written.
    """
    files: dict[str, Path | bytes] = {
        str(path.relative_to(package.parent)): path
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for name in ("METADATA", "entry_points.txt"):
        if text := distribution.read_text(name):
            files[f"{_stem(distribution)}.dist-info/{name}"] = text.encode()
    files[f"{_stem(distribution)}{_WHEEL}"] = _PURE.encode()
    content = hashlib.blake2b(digest_size=8)
    for name, file in sorted(files.items()):
        content.update(name.encode() + (file if isinstance(file, bytes) else file.read_bytes()))
    name = f"{_stem(distribution)}-{_tags(_PURE)}.whl"
    return _written(folder / content.hexdigest() / name, files)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _members(distribution: Distribution, record: str) -> Iterator[tuple[str, Path | bytes]]:
    """Yield the files of a distribution by their names in a wheel."""
    packages = Path(os.path.normpath(str(distribution.locate_file(""))))
    prefix = packages.parents[2]
    rows = [row[0] for row in csv.reader(record.splitlines())]
    data = next(row for row in rows if row.endswith(_WHEEL)).removesuffix(_WHEEL) + ".data"
    generated = {e.name for e in distribution.entry_points if e.group in _SCRIPT_GROUPS}
    for row in rows:
        path = Path(os.path.normpath(packages / row))
        if path.suffix == ".pyc" or path.name in _OF_AN_INSTALLATION:
            continue
        if not path.is_file():
            raise ValueError(f"its file {path} is missing: install it again")
        if path.is_relative_to(packages):
            yield str(path.relative_to(packages)), path
        elif path.parent == prefix / "bin":
            if path.name not in generated:
                yield f"{data}/scripts/{path.name}", _script(path)
        elif path.is_relative_to(prefix):
            yield f"{data}/data/{path.relative_to(prefix)}", path
        else:
            raise ValueError(f"its file {path} is outside of {prefix}")


def _script(path: Path) -> bytes:
    """Return a script. An installer replaces `#!python` by the path of the interpreter."""
    first, newline, rest = path.read_bytes().partition(b"\n")
    is_python = first.startswith(b"#!") and b"python" in first
    return (b"#!python" if is_python else first) + newline + rest


def _stem(distribution: Distribution) -> str:
    name = canonicalize_name(distribution.metadata["Name"]).replace("-", "_")
    return f"{name}-{distribution.version}"


def _tags(wheel: str) -> str:
    """Return the tags for the name of a wheel, from the text of its file WHEEL."""
    tags = [line[4:].strip().split("-") for line in wheel.splitlines() if line.startswith("Tag:")]
    return "-".join(".".join(dict.fromkeys(parts)) for parts in zip(*tags, strict=True))


def _written(path: Path, files: dict[str, Path | bytes]) -> Wheel:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.new")
        try:
            _write(temporary, files)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return Wheel(path, sha256_of(path))


def _write(path: Path, files: dict[str, Path | bytes]) -> None:
    wheel = next(name for name in files if name.endswith(_WHEEL))
    record = f"{wheel.removesuffix('WHEEL')}RECORD"
    lines = [f'"{record}",,\n']
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, file in sorted(files.items()):
            lines.append(f'"{name}",sha256={_add(archive, name, file)}\n')
        _add(archive, record, "".join(lines).encode())


def _add(archive: zipfile.ZipFile, name: str, file: Path | bytes) -> str:
    """Add a file, and return its digest and its size as a RECORD contains them."""
    info = zipfile.ZipInfo(name, _DATE)
    info.compress_type = zipfile.ZIP_DEFLATED
    runs = ".data/scripts/" in name or (isinstance(file, Path) and os.access(file, os.X_OK))
    info.external_attr = (stat.S_IFREG | (0o755 if runs else 0o644)) << 16
    digest, size = hashlib.sha256(), 0
    with (
        archive.open(info, "w", force_zip64=True) as target,
        io.BytesIO(file) if isinstance(file, bytes) else file.open("rb") as source,
    ):
        while chunk := source.read(_CHUNK_BYTES):
            target.write(chunk)
            digest.update(chunk)
            size += len(chunk)
    return f"{base64.urlsafe_b64encode(digest.digest()).rstrip(b'=').decode()},{size}"
