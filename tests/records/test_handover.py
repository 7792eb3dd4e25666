"""State for the next owner of a cluster."""

from __future__ import annotations

import msgspec
import pytest

from nbdist.records import (
    BoundSocket,
    CellOptions,
    CellRequest,
    ClusterRequest,
    HandoverState,
    Host,
    RunningCell,
    Saving,
    Writer,
)


def cell(options: CellOptions) -> RunningCell:
    request = CellRequest(
        number=1, source="", label=1, strategy=None, awaits=False, options=options
    )
    return RunningCell(request=request, ranks=(0,))


@pytest.mark.parametrize(
    ("options", "detached"),
    [
        (CellOptions(), False),
        (CellOptions(detach=True), True),
        (CellOptions(saving=Saving(folder="/kept")), True),
        (CellOptions(once=True, seed=1), False),
    ],
)
def test_a_cell_survives_the_kernel_if_detached_or_saved(
    options: CellOptions, detached: bool
) -> None:
    assert cell(options).detached is detached
    assert cell(options).options == options


def test_a_state_is_equal_after_its_file() -> None:
    socket = BoundSocket(port=1, public_key=b"p", secret_key=b"s")
    state = HandoverState(
        id="0" * 12,
        request=ClusterRequest(hosts=(Host(name="gpu1"),), frameworks=("jax",)),
        owner=Writer(host="here", pid=1, started=2.5),
        stream=socket,
        dispatch=socket,
        cell=cell(CellOptions(detach=True)),
    )
    assert msgspec.json.decode(msgspec.json.encode(state), type=HandoverState) == state
