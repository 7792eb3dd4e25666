"""Export of cells that the user has deleted or edited in JupyterLab, as the kernel learns of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kernels import Kernel

LOSS = "%%dist_run\nimport jax.numpy as jnp\ndef loss_of(w, x): return jnp.mean((w - x) ** 2)"
DATA = "%%dist_run\ntrain = jnp.arange(8.0)\nw = jnp.zeros(())"
STEP = "%%dist_run --data train --batch 4\nw = w - 0.1 * batch.mean()\nloss = loss_of(w, batch)"


def test_deleted_and_edited_cells(kernel: Kernel, tmp_path: Path) -> None:
    for cell, source in (("a", LOSS), ("b", DATA), ("c", STEP)):
        kernel.run(source, cellId=cell).check()
    kernel.run(DATA.replace("8.0", "16.0"), cellId="b").check()
    edited = kernel.run(f"%dist_export {tmp_path}/edited").check()
    assert "nbdist: cell [3] ran again as [5] with another text" in edited.stdout
    assert "[3] ran again as [5]" in (tmp_path / "edited" / "README.md").read_text()
    assert "arange(8.0)" in (tmp_path / "edited" / "train.py").read_text()
    kernel.run("1 + 1", cellId="d", deletedCells=["a", "x"]).check()
    refused = kernel.run(f"%dist_export {tmp_path}/refused", cellId="e", deletedCells=[])
    assert (refused.status, refused.ename) == ("error", "UsageError")
    assert "`loss_of` comes from cell [2], which was deleted" in refused.traceback
    assert not (tmp_path / "refused").exists()
    kernel.run(LOSS, cellId="f").check()
    kernel.run(f"%dist_export {tmp_path}/pasted", cellId="e").check()
