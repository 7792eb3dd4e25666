"""Programs that the tests compare workers with run in forks of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.references import ForkServer, plainly

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    running = ForkServer(("decimal",), {"ANSWER": "42"})
    yield running
    running.stop()


def test_programs_have_modules_and_names_of_their_own(server: ForkServer) -> None:
    read = "import os, sys\noutcome = ['decimal' in sys.modules, os.environ['ANSWER']]"
    named = "outcome = 'own' in globals()"
    programs = {"one": "print('text')\nown = outcome = 1", "two": read, "three": named}
    assert server.run(programs) == {"one": 1, "two": [True, "42"], "three": False}


def test_error_of_a_program_is_shown_and_the_next_one_runs(server: ForkServer) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        server.run({"one": "outcome = 1 / 0"})
    assert server.run({"one": "outcome = 3"}) == {"one": 3}


def test_a_server_that_was_ended_is_replaced() -> None:
    end = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos._exit(0)"
    with pytest.raises(AssertionError, match="the process ended"):
        plainly({"one": end}, "decimal")
    not_stored = "outcome = 3  # without nbdist"
    assert plainly({"one": not_stored}, "decimal") == {"one": 3}
