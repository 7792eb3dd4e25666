"""A real notebook kernel, so that both sides pay for what a notebook pays for."""

from __future__ import annotations

import json
import queue
import sys
from dataclasses import dataclass
from typing import Any, Self

from jupyter_client.manager import KernelManager

TIMEOUT_S = 300


@dataclass(frozen=True)
class Outcome:
    """What a cell sent to the front end."""

    stdout: str
    sent_bytes: int
    messages: int


class Kernel:
    """An ipykernel in a process of its own."""

    def __enter__(self) -> Self:
        self._manager = KernelManager(kernel_name="python3")
        self._manager.kernel_spec.argv[0] = sys.executable
        self._manager.start_kernel()
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel()
        self._manager.cleanup_resources()

    def run(self, code: str) -> Outcome:
        """Run a cell to its end and count all that the kernel sent meanwhile; an error raises.

        ipyparallel streams from a thread, under headers of its own: every message counts.
        """
        request = self._client.execute(code)
        stdout, sent, messages = "", 0, 0
        while True:
            message: Any = self._client.get_iopub_msg(timeout=TIMEOUT_S)
            content, kind = message["content"], message["msg_type"]
            messages += 1
            sent += len(json.dumps(content, default=str))
            if message["parent_header"].get("msg_id") != request:
                continue
            if kind == "error":
                raise RuntimeError("\n".join(content["traceback"]))
            if kind == "stream" and content["name"] == "stdout":
                stdout += content["text"]
            if kind == "status" and content["execution_state"] == "idle":
                self._settle(request)
                return Outcome(stdout, sent, messages)

    def _settle(self, request: str) -> None:
        while True:
            try:
                reply = self._client.get_shell_msg(timeout=TIMEOUT_S)
            except queue.Empty:
                raise RuntimeError(f"no reply within {TIMEOUT_S} s") from None
            if reply["parent_header"].get("msg_id") == request:
                return


BOTH_CLUSTERS = """
import logging, time, ipyparallel as ipp
%load_ext nbdist
%dist_start 4 --framework jax
peer = ipp.Cluster(n=4, log_level=logging.ERROR)
client = peer.start_and_connect_sync()
view = client[:]
view.block = True
view.activate()
from IPython import get_ipython
def ours(cell):
    start = time.perf_counter()
    get_ipython().run_cell_magic("dist_run", "", cell)
    return time.perf_counter() - start
def theirs(cell):
    start = time.perf_counter()
    get_ipython().run_cell_magic("px", "", cell)
    return time.perf_counter() - start
"""
"""Four engines of ours, and four of ipyparallel's own, in one kernel."""

STOP_BOTH = "%dist_stop\nclient.close()\npeer.stop_cluster_sync()"
