"""Program that installs an environment on a host. It needs only Python's standard library.

nbdist sends its text over ssh. Messages are lines of JSON: requests on standard input, where bytes
of files follow `store`, and answers on standard output. An environment is built in a folder of its
own and renamed when it is complete. If standard input ends, the program stops and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MARK = "nbdist "
"""Start of each answer. The startup files of a shell may print other lines."""

BUILD_S = 3600.0
"""Limit of each call of uv, and of the wait for another start that builds the environment."""

REMEDY = 'free space there, or set another folder by `env = {XDG_CACHE_HOME = "..."}` in hosts.toml'
"""Remedy for a folder of environments that is full, or not writable."""

KEPT_S = 30 * 24 * 3600.0
"""Time after the last start that used an environment or a wheel, until it is removed."""

_PROBE_S = 30.0
_PROBE = {"UV_HTTP_TIMEOUT": "5", "UV_HTTP_CONNECT_TIMEOUT": "5", "UV_HTTP_RETRIES": "0"}
_CHUNK_BYTES = 1 << 20
_LINES = 12
"""Last lines of uv's output that an error contains."""


def _answer(**fields: Any) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(fields)}\n")
    sys.stdout.flush()


def _read() -> Any:
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(0)
    return json.loads(line)


def main() -> None:
    """Serve one start: find the environment, or store files and build it."""
    request = _read()
    os.environ.update(request["env"])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    root = cache / "nbdist" / "environments"
    place = root / f"{request['digest']}-{sysconfig.get_platform()}"
    try:
        (root / "wheels").mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(Path(f"{place}.lock")):
            os.utime(f"{place}.lock")
            if _works(place):
                _answer(python=str(place / "bin" / "python"))
                _prune(root)
                return
            _prune(root)
            _answer(
                platform=sysconfig.get_platform(),
                uv=shutil.which("uv") or "",
                free_bytes=shutil.disk_usage(root).free,
                folder=str(root),
            )
            while True:
                _serve(_read(), root, place)
    except OSError as error:
        _answer(error=f"{error.filename or root}: {error.strerror}: {REMEDY}")


def _serve(message: Any, root: Path, place: Path) -> None:
    if message["op"] == "lacking":
        _answer(
            lacking={
                name: _part(place, name).stat().st_size if _part(place, name).exists() else 0
                for name in message["names"]
                if not _keep(root / "wheels" / name)
            }
        )
    elif message["op"] == "store":
        _store(message, _part(place, message["name"]), root / "wheels" / message["name"])
    else:
        _answer(**_built(message, root, place))


def _keep(wheel: Path) -> bool:
    """Note that a start uses a wheel. Return False if it is not there."""
    try:
        os.utime(wheel)
    except FileNotFoundError:
        return False
    return True


def _prune(root: Path) -> None:
    """Remove what no start has used for `KEPT_S`: environments without processes, and wheels.

    Renames environments first, because the notebook may end this program at any time.
    """
    for lock in root.glob("*.lock"):
        place = lock.with_suffix("")
        if place.exists() and _is_old(lock) and not _is_in_use(place):
            with lock.open("r+") as file, contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                place.rename(f"{place}.old")
    for path in [*root.glob("*.old"), *filter(_is_old, root.glob("*.new"))]:
        shutil.rmtree(path, ignore_errors=True)
    for path in filter(_is_old, [*root.glob("*.part"), *(root / "wheels").iterdir()]):
        path.unlink(missing_ok=True)


def _is_old(path: Path) -> bool:
    return path.stat().st_mtime < time.time() - KEPT_S


def _is_in_use(place: Path) -> bool:
    """Return True if a process runs the environment's Python, or if that cannot be known."""
    processes = Path("/proc")
    if not (processes / "self" / "cmdline").exists():
        return True
    for command in processes.glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            if command.read_bytes().startswith(f"{place}/".encode()):
                return True
    return False


def _part(place: Path, name: str) -> Path:
    """Return the path of a file that has not arrived completely."""
    return Path(f"{place}.{name}.part")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other start builds the environment."""
    deadline = time.monotonic() + BUILD_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _answer(progress="waits for another start that builds the same environment")
                if _input_ended(1.0) or time.monotonic() > deadline:
                    sys.exit("another start has not finished the environment")
            else:
                break
        yield


def _works(place: Path) -> bool:
    """Return True if the environment is complete and its Python starts."""
    python = place / "bin" / "python"
    command = [str(python), "-c", ""]
    return (
        python.exists()
        and subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == 0
    )


def _store(message: Any, part: Path, path: Path) -> None:
    """Append bytes to a file. Its name is the SHA-256 of its content."""
    with part.open("r+b" if part.exists() else "wb") as file:
        file.truncate(message["offset"])
        file.seek(message["offset"])
        left, fault = message["bytes"], None
        while left:
            chunk = sys.stdin.buffer.read(min(_CHUNK_BYTES, left))
            if not chunk:
                sys.exit(0)
            left -= len(chunk)
            try:
                if fault is None:
                    file.write(chunk)
                    file.flush()
            except OSError as error:  # the rest must be read
                fault = error
        if fault is not None:
            raise fault
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != path.name:
        part.unlink()
        _answer(error=f"{path.name} arrived with other content: start again")
        return
    part.chmod(0o700)
    part.replace(path)
    _answer(stored=True)


def _built(message: Any, root: Path, place: Path) -> dict[str, Any]:
    """Build the environment, and return the path of its Python, or a fault."""
    scratch = Path(f"{place}.new")
    shutil.rmtree(scratch, ignore_errors=True)  # of a start that was killed
    try:
        links, built = scratch / "links", scratch / "environment"
        links.mkdir(mode=0o700, parents=True)
        for name, digest in message["wheels"].items():
            (links / name).symlink_to(root / "wheels" / digest)
        (scratch / "probe.txt").write_text(message["probe"])
        (scratch / "lock.txt").write_text(message["requirements"])
        uv = message["uv"] if "/" in message["uv"] else str(root / "wheels" / message["uv"])
        env = {**os.environ, **message["env"]}
        venv = "--no-project", "--no-python-downloads", "--relocatable", "--python", sys.executable
        install = ["pip", "install", "--python", str(built / "bin" / "python")]
        install += ["--no-deps", "--no-build", "--require-hashes", "--find-links", str(links)]
        if message["offline"]:
            install += ["--offline", "--no-index", "--no-config"]
            install += ["--cache-dir", str(scratch / "cache")]
        fault = _ran([uv, "venv", *venv, str(built)], env, BUILD_S)
        if not fault and not message["offline"]:
            probe = [uv, *install, "--dry-run", "-r", str(scratch / "probe.txt")]
            fault = _ran(probe, {**env, **_PROBE}, _PROBE_S)
        fault = fault or _ran([uv, *install, "-r", str(scratch / "lock.txt")], env, BUILD_S)
        if not fault:
            shutil.rmtree(place, ignore_errors=True)  # its Python does not start
            built.replace(place)
        return {"fault": fault} if fault else {"python": str(place / "bin" / "python")}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _ran(command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> str:
    """Run uv with its output as progress. Return its last lines if it fails, else an empty text."""
    deadline = time.monotonic() + timeout_s
    lines = [f"{command[0]} {command[1]} took more than {timeout_s:g} s"]
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    streams |= {"stderr": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(command, env=env, **streams) as process:
        assert process.stderr is not None
        try:
            while time.monotonic() < deadline:
                inputs: list[Any] = [0, process.stderr]
                ready, _, _ = select.select(inputs, [], [], 1.0)
                if 0 in ready:  # the notebook sends nothing now: its end has closed
                    sys.exit(0)
                if ready:
                    line = process.stderr.readline().decode(errors="replace")
                    if not line:
                        status = process.wait()
                        lines.append(f"uv ended with status {status}")
                        return "\n".join(lines[1:][-_LINES:]) if status else ""
                    lines.append(line.rstrip())
                    _answer(progress=line.strip())
        finally:
            process.kill()
    return lines[0]


def _input_ended(wait_s: float) -> bool:
    """Wait, and return True if the notebook's end of standard input has closed."""
    return bool(select.select([0], [], [], wait_s)[0])


if __name__ == "__main__":
    main()
