"""Results of magics, which are shown once, assigned and converted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kernels import Kernel


def shown(kernel: Kernel, cell: str) -> list[str]:
    """Run a cell and return the text of each output that displays an object."""
    return kernel.run(cell).check().plain


@pytest.mark.parametrize("line", ["%dist_status", "status = %dist_status", "%dist_status\nx = 1"])
def test_a_result_is_shown_once(kernel: Kernel, line: str) -> None:
    (text,) = shown(kernel, line)
    assert text.startswith("nbdist: 2 workers, 2 idle")


def test_a_result_is_shown_again_by_a_later_cell(kernel: Kernel) -> None:
    shown(kernel, "status = %dist_status")
    (text,) = shown(kernel, "status")
    assert text.startswith("nbdist: 2 workers, 2 idle")
    first, second = shown(kernel, "%dist_status\nhosts = %dist_hosts\nhosts")
    assert first.startswith("nbdist: 2 workers, 2 idle")
    assert second.startswith("nbdist: 2 workers on 1 host")


def test_results_are_sequences_of_rows(kernel: Kernel) -> None:
    kernel.run("status = %dist_status").check()
    assert value(kernel, "len(status), [worker.rank for worker in status]") == (2, [0, 1])
    assert value(kernel, "status[1].rank, status[-1] == status[1], status[0] in status") == (
        1,
        True,
        True,
    )
    assert value(kernel, "dict(status[0])['state'], list(dict(status))") == ("idle", [0, 1])
    kernel.run("hosts = %dist_hosts\nseen = %dist_devices\nfound = %dist_doctor").check()
    assert value(kernel, "[row.rank for row in hosts], hosts == hosts") == ([0, 1], True)
    assert value(kernel, "[d.platform for d in seen], seen['cpu:0'].process") == (["cpu"] * 2, 0)
    assert value(kernel, "isinstance(list(found), list)")


def test_an_array_is_found_by_its_name(kernel: Kernel) -> None:
    kernel.run("%%dist_run --strategy pjrt\nimport jax.numpy as jnp\np = {'w': jnp.ones(4)}")
    kernel.run("arrays = %dist_show p").check()
    assert value(kernel, "arrays[\"p['w']\"].shape, list(dict(arrays))") == ((4,), ["p['w']"])


def test_name_that_only_the_notebook_has_is_named_with_its_size(kernel: Kernel) -> None:
    kernel.run("import numpy as np\nonly_here, too = np.ones(1000), 'x'").check()
    done = kernel.run("%%dist_run\nonly_here + 1")
    hint = "only the notebook has `only_here` (ndarray, 7.8 KiB): run %dist_push only_here"
    assert hint in done.traceback
    done = kernel.run("%%dist_run --data missing --batch 4\nloss = only_here.sum() + len(too)")
    assert "`only_here` (ndarray, 7.8 KiB), `too` (str): run %dist_push only_here too" in (
        done.traceback
    )
    assert "only the notebook" not in kernel.run("%%dist_run\nnowhere + 1").traceback
    kernel.run("%dist_push only_here").check()
    kernel.run("%%dist_run\nonly_here + 1").check()


def test_results_become_data_frames(kernel: Kernel) -> None:
    kernel.run("status = %dist_status").check()
    assert value(kernel, "list(status.to_dataframe().columns)[:4]") == [
        "rank",
        "host",
        "pid",
        "devices",
    ]
    assert value(kernel, "list(status.to_dataframe()['devices'])") == ["1 x cpu", "1 x cpu"]
    assert value(kernel, "'jax' in status.to_dataframe() and 'versions' not in status")
    kernel.run("hosts = %dist_hosts\nseen = %dist_devices").check()
    assert value(kernel, "list(hosts.to_dataframe()['rank'])") == [0, 1]
    assert value(kernel, "seen.to_dataframe()['name'].is_unique")


def value(kernel: Kernel, expression: str) -> object:
    (text,) = shown(kernel, expression)
    return eval(text)


def test_a_plan_is_returned(kernel: Kernel) -> None:
    kernel.run("%%dist_run --strategy pjrt\nimport numpy as np, jax.numpy as jnp\nw = jnp.ones(4)")
    kernel.run("%%dist_run --strategy pjrt\nrows = np.ones((8, 4), 'f')").check()
    done = kernel.run("%%dist_plan --data rows --batch 4\nloss = (batch * w).sum()\nw = w - 1")
    assert len(done.check().plain) == 1
    assert value(kernel, "_['w'].shape, [array.role for array in _]") == (
        (4,),
        ["parameter", "read", "batch"],
    )
