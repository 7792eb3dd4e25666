"""Real Jupyter kernel, used as a front end uses it."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Self

from jupyter_client.manager import KernelManager

TIMEOUT_S = 300
QUIET_S = 1.0
"""Time without a message after which the reply to a cell is taken as its end."""


@dataclass
class Execution:
    """Outputs of one cell."""

    status: str = ""
    stdout: str = ""
    stderr: str = ""
    plain: list[str] = field(default_factory=list)
    ename: str = ""
    traceback: str = ""
    sent_bytes: int = 0
    messages: int = 0

    def check(self) -> Self:
        assert self.status == "ok", f"{self.status}: {self.traceback or self.stderr}"
        return self


class Kernel:
    """An ipykernel in its own process."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        spec = self.manager.kernel_spec
        assert spec is not None
        spec.argv[0] = sys.executable
        self._replies: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        self.manager.cleanup_resources()

    def send(self, code: str, **metadata: object) -> str:
        """Queue a cell. Call `collect` for its outputs.

        Args:
            code: its text.
            **metadata: metadata of the request, such as the `cellId` that JupyterLab sends.
        """
        self.client.session.metadata = metadata
        request: str = self.client.execute(code)
        return request

    def run(self, code: str, **metadata: object) -> Execution:
        return self.collect(self.send(code, **metadata))

    def collect(self, request: str) -> Execution:
        """Collect all messages of a cell until the kernel is idle and has replied.

        Count every message that the kernel sends meanwhile, because ipyparallel streams from a
        thread with its own headers. ZeroMQ drops messages of a kernel that sends too many, also the
        one that reports the idle kernel. After the reply, a quiet `QUIET_S` therefore also ends
        the cell.

        Raises:
            TimeoutError: the cell did not end in time.
        """
        done = Execution()
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            has_replied = request in self._replies
            try:
                message = self.client.get_iopub_msg(timeout=QUIET_S)
            except queue.Empty:
                if has_replied:
                    break
                self._store_reply(0)
                continue
            done.messages += 1
            done.sent_bytes += len(json.dumps(message["content"], default=str))
            if message["parent_header"].get("msg_id") == request and self._take(done, message):
                break
        else:
            raise TimeoutError(
                f"the cell did not end within {TIMEOUT_S} s. Its output: {done.stdout[-1000:]}"
            )
        done.status = self.reply(request)["status"]
        return done

    def complete(self, code: str) -> Any:
        """Return the kernel's completions at the end of `code`."""
        return self.reply(self.client.complete(code, len(code)))

    def wait_for_text(self, request: str, text: str) -> None:
        """Wait until a running cell has printed `text` on standard output.

        Raises:
            TimeoutError: the cell did not print it in time.
        """
        seen = ""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in seen:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the cell did not print {text!r} within {TIMEOUT_S} s: {seen}")
            with contextlib.suppress(queue.Empty):
                message = self.client.get_iopub_msg(timeout=QUIET_S)
                if message["parent_header"].get("msg_id") == request:
                    seen += message["content"].get("text", "")

    def reply(self, request: str) -> Any:
        """Return the content of the kernel's reply to a request.

        Raises:
            TimeoutError: the kernel did not reply in time.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while request not in self._replies:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the kernel did not reply within {TIMEOUT_S} s")
            self._store_reply(QUIET_S)
        return self._replies.pop(request)

    def _store_reply(self, timeout_s: float) -> None:
        """Store the next reply of the kernel, if one arrives in time."""
        with contextlib.suppress(queue.Empty):
            reply = self.client.get_shell_msg(timeout=timeout_s)
            self._replies[reply["parent_header"].get("msg_id")] = reply["content"]

    @staticmethod
    def _take(done: Execution, message: Any) -> bool:
        """Record one message. Returns True when the kernel is idle again."""
        content, kind = message["content"], message["msg_type"]
        if kind == "stream" and content["name"] == "stdout":
            done.stdout += content["text"]
        elif kind == "stream":
            done.stderr += content["text"]
        elif kind in ("display_data", "update_display_data", "execute_result"):
            done.plain.append(content["data"].get("text/plain", ""))
        elif kind == "error":
            done.ename = content["ename"]
            done.traceback = "\n".join(content["traceback"])
        return bool(kind == "status" and content["execution_state"] == "idle")
