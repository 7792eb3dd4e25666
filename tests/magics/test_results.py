"""Results of magics, which are shown once, assigned and converted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nbdist

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

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


def test_a_shell_without_the_extension_shows_results(shell: InteractiveShell) -> None:
    formatter = shell.display_formatter.ipython_display_formatter
    assert len(formatter.type_printers) == 1
    shell.run_line_magic("unload_ext", "nbdist")
    assert not formatter.type_printers
    shell.run_line_magic("load_ext", "nbdist")


def test_devices_without_a_cluster(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = shell.run_line_magic("dist_devices", "")
    assert capsys.readouterr().out.count("nbdist: ") == 1
    assert devices[0].name == "cpu:0"
    assert devices.to_dataframe()["name"].tolist() == [device.name for device in devices]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(nbdist.UsageError, match="to_dataframe needs pandas: run %pip install"):
        devices.to_dataframe()


def test_a_trace_in_this_kernel_is_returned(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = "import jax.numpy as jnp\n(jnp.ones((64, 64)) @ jnp.ones((64, 64))).block_until_ready()"
    trace = shell.run_cell_magic("dist_trace", "", cell)
    assert capsys.readouterr().out.count("%%dist_trace: ") == 1
    assert trace.trace.ranks == (0,)
    assert [operation.name for operation in trace] == trace.to_dataframe()["name"].tolist()


def test_a_plan_is_returned(kernel: Kernel) -> None:
    kernel.run("%%dist_run --strategy pjrt\nimport numpy as np, jax.numpy as jnp\nw = jnp.ones(4)")
    kernel.run("%%dist_run --strategy pjrt\nrows = np.ones((8, 4), 'f')").check()
    done = kernel.run("%%dist_plan --data rows --batch 4\nloss = (batch * w).sum()\nw = w - 1")
    assert len(done.check().plain) == 1
    assert value(kernel, "_['w'].shape, [array.role for array in _]") == (
        (4,),
        ["parameter", "read", "batch"],
    )
