"""Resumed runs end with the same bits as uninterrupted runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist.records import Saving
from tests import clusters, training

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

RANKS = 2
EVERY = 7
"""Steps between checkpoints: divides neither the steps of an epoch nor those of a run."""


@pytest.fixture(scope="module")
def cluster(form: training.Form) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=RANKS, framework=form.framework) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(cluster: nbdist.Cluster, form: training.Form) -> str:
    """Digest of the state after an undisturbed training."""
    cluster.run(form.setup, strategy=form.strategy)
    assert form.run(cluster).summary.epochs == training.EPOCHS
    return form.digest_of(cluster)


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


@training.forms("pjrt step")  # test_recovery.py resumes the others
def test_resumed_run_ends_with_the_same_bits(
    cluster: nbdist.Cluster, form: training.Form, undisturbed: str, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    cluster.run(form.setup, strategy=form.strategy)
    saving = Saving(folder=str(folder), every_steps=EVERY, keep=2)
    form.run(cluster, epochs=1, saving=saving)
    assert steps_of(folder) == [7, 8]
    cluster.run(form.setup, strategy=form.strategy)
    run = form.run(cluster, saving=Saving(folder=str(folder), every_steps=EVERY, resume=True))
    assert form.digest_of(cluster) == undisturbed
    assert steps_of(folder) == [14, 21, 24]
    assert [note.text.split(",")[0] for note in run.notes if note.topic == "checkpoint"] == [
        "resumed from the checkpoint of step 8"
    ] * RANKS
