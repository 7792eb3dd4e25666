"""Bounds of the waits of the tests' Jupyter kernel."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

import pytest

from tests import kernels
from tests.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.full  # a helper of tests


@pytest.fixture(scope="module")
def plain_kernel() -> Iterator[Kernel]:
    with Kernel() as running:
        yield running


def test_a_cell_ends_if_the_message_on_the_idle_kernel_is_lost(
    plain_kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "TIMEOUT_S", 20)
    receive = plain_kernel.client.get_iopub_msg

    def without_idle(timeout: float) -> Any:
        message = receive(timeout=timeout)
        if message["content"].get("execution_state") == "idle":
            raise queue.Empty
        return message

    monkeypatch.setattr(plain_kernel.client, "get_iopub_msg", without_idle)
    assert plain_kernel.run("print('complete')").check().stdout == "complete\n"


def test_a_cell_that_does_not_end_is_an_error(
    plain_kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = plain_kernel.send("import time\nprint('begun')\ntime.sleep(600)")
    plain_kernel.wait_for_text(request, "begun")
    monkeypatch.setattr(kernels, "TIMEOUT_S", 0.5)
    with pytest.raises(TimeoutError, match="did not end within"):
        plain_kernel.collect(request)
    with pytest.raises(TimeoutError, match="did not print 'more' within"):
        plain_kernel.wait_for_text(request, "more")
    with pytest.raises(TimeoutError, match="did not reply within"):
        plain_kernel.reply(request)
    monkeypatch.undo()
    plain_kernel.manager.interrupt_kernel()
    assert plain_kernel.reply(request)["status"] == "error"
