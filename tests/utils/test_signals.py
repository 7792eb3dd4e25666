"""Interrupts that are deferred during critical sections."""

from __future__ import annotations

import signal
import threading

import pytest

from nbdist.utils.signals import interrupt_held


@pytest.mark.processes
def test_an_interrupt_is_raised_after_the_section() -> None:
    done = []

    def interrupted() -> None:
        with interrupt_held():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done


def test_the_handler_is_restored_without_an_interrupt() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupt_held():
        pass
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.processes
def test_an_error_is_the_context_of_the_interrupt() -> None:
    def interrupted() -> None:
        with interrupt_held():
            signal.raise_signal(signal.SIGINT)
            raise ValueError

    with pytest.raises(KeyboardInterrupt) as raised:
        interrupted()
    assert isinstance(raised.value.__context__, ValueError)


def test_sections_in_other_threads_do_nothing() -> None:
    done = []

    def elsewhere() -> None:
        with interrupt_held():
            done.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(5)
    assert done
