"""Interrupts that are deferred during critical sections."""

from __future__ import annotations

import signal
import threading

import pytest

from nbdist.utils.signals import interrupt_held


def test_an_interrupt_comes_when_all_is_done() -> None:
    done = []

    def interrupted() -> None:
        with interrupt_held():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done


def test_without_an_interrupt_nothing_comes_and_the_handler_is_as_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupt_held():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_is_told_with_the_interrupt() -> None:
    def interrupted() -> None:
        with interrupt_held():
            signal.raise_signal(signal.SIGINT)
            raise ValueError

    with pytest.raises(KeyboardInterrupt) as raised:
        interrupted()
    assert isinstance(raised.value.__context__, ValueError)


def test_another_thread_is_left_alone() -> None:
    done = []

    def elsewhere() -> None:
        with interrupt_held():
            done.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(5)
    assert done
