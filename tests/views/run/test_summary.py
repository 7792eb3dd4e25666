"""Latest reports of a run, and its text."""

from __future__ import annotations

from nbdist.records import Metrics
from nbdist.views.run.summary import Reached, described
from tests.runs import new_state


def report(step: int, time_s: float, *, epoch: int = 1, rank: int = 0, **own: float) -> Metrics:
    return Metrics(rank=rank, cell=1, epoch=epoch, step=step, time_s=time_s, own=own)


def test_the_loss_of_a_step_cell_is_that_of_its_last_step() -> None:
    reports = [report(1, 0.1, loss=4.0), report(2, 0.2, loss=2.0), report(-1, 0.3, loss=3.0)]
    assert str(Reached.of(reports, "step")) == "loss 2 (last step)"
    assert str(Reached.of(reports, "fit")) == "loss 3 (epoch mean)"


def test_the_value_is_the_mean_over_the_last_reports_of_the_ranks() -> None:
    reports = [report(2, 0.2, acc=1.0), report(1, 0.1, rank=1, acc=0.5), report(1, 0.0, acc=9.0)]
    assert str(Reached.of(reports, "")) == "acc 0.75 (last step)"
    assert str(Reached.of([], "")) == ""


def test_a_text_has_the_outcome_and_the_first_line_of_an_error() -> None:
    state = new_state(status="failed", began=10.0, ended=16.6, steps=9, error="ValueError: a\nb")
    reached = Reached.of([report(3, 1.0, loss=0.5)], state.kind)
    assert described(state, reached) == (
        "failed after 6.6 s, 2 workers, epoch 1, step 3 of 9, loss 0.5 (last step), ValueError: a"
    )
