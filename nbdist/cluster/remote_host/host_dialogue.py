"""Dialogue with the program that installs an environment on a host."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nbdist.cluster.remote_host import host_program
from nbdist.errors import StartError
from nbdist.views import formatting

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Mapping

    from nbdist.utils.wheels import Wheel

_CHUNK_BYTES = 1 << 20
_MATCHES = 42
_FIND = """
for python in {candidates}; do
  "$python" -c "import sys; sys.exit({matches} * (sys.version_info[:2] == {version}))" 2>/dev/null
  if [ $? = {matches} ]; then
    exec "$python" -c "import sys
exec(compile(sys.stdin.buffer.read({length}), \\"install\\", \\"exec\\"))"
  fi
done
echo "{no_python}" >&2
exit 1
"""
"""Program of the host's shell: run the program from standard input by a Python of this version."""


def command_of(candidates: Iterable[str], minor: str) -> str:
    """Return the command that starts the program on a host.

    Args:
        candidates: names or paths of Python. They contain no special characters of a shell.
        minor: version that the Python needs, such as `3.11`.
    """
    script = _FIND.format(
        candidates=" ".join(candidates),
        matches=_MATCHES,
        version=tuple(map(int, minor.split("."))),
        length=len(_program()),
        no_python=f"no Python {minor} there: install it, or use --python PATH",
    )
    return f"exec sh -c {shlex.quote(script)}"


def _program() -> bytes:
    return Path(host_program.__file__).read_bytes()


class HostDialogue:
    """Requests to the program on a host, and its answers.

    Args:
        key: key of the host.
        process: the ssh client that runs `command_of`, with pipes.
        log: the file that receives the client's errors.
        show: receives progress as text.

    Attributes:
        key: key of the host.
        show: receives progress as text.
    """

    def __init__(
        self,
        key: str,
        process: subprocess.Popen[bytes],
        log: IO[bytes],
        show: Callable[[str], None],
    ) -> None:
        self.key = key
        self.show = show
        self._process = process
        self._log = log
        self._write(_program())

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a request, and return the answer.

        Raises:
            StartError: the program has ended, or reports that it cannot store or read files.
        """
        self._write(f"{json.dumps(message)}\n".encode())
        return self._answer()

    def missing(self, wheels: Mapping[str, Wheel]) -> dict[str, int]:
        """Return the wheels that the host lacks, each with the number of bytes that it has."""
        by_digest = {wheel.sha256: name for name, wheel in wheels.items()}
        lacking = self.ask(op="lacking", names=list(by_digest))["lacking"]
        return {by_digest[digest]: have for digest, have in lacking.items()}

    def send(self, files: Mapping[str, Wheel], missing: Mapping[str, int]) -> None:
        """Send the files that the host lacks. A file that arrived in part is continued."""
        total = sum(files[name].path.stat().st_size - have for name, have in missing.items())
        sent = 0
        for number, (name, have) in enumerate(missing.items()):
            file, size = files[name], files[name].path.stat().st_size
            request = {"op": "store", "name": file.sha256, "offset": have, "bytes": size - have}
            self._write(f"{json.dumps(request)}\n".encode())
            with file.path.open("rb") as source:
                source.seek(have)
                while chunk := source.read(_CHUNK_BYTES):
                    self._write(chunk)
                    sent += len(chunk)
                    parts = f"{formatting.size(sent)} of {formatting.size(total)}"
                    self.show(f"receives file {number + 1} of {len(missing)} ({parts})")
            self._answer()

    def _write(self, content: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(content)
            stdin.flush()
        except OSError:
            raise StartError(self._why_ended()) from None

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        while line := stdout.readline().decode(errors="replace"):
            if not line.startswith(host_program.MARK):
                continue
            answer: dict[str, Any] = json.loads(line.removeprefix(host_program.MARK))
            if "progress" in answer:
                self.show(answer["progress"])
            elif "error" in answer:
                raise StartError(answer["error"])
            else:
                return answer
        raise StartError(self._why_ended())

    def _why_ended(self) -> str:
        self._process.wait()
        self._log.seek(0)
        text = re.sub(r"\s+", " ", self._log.read().decode(errors="replace")).strip()
        return text or "the connection broke during the installation: start again"
