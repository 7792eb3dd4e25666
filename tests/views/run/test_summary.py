"""Latest reports of a run, and its text."""

from __future__ import annotations

from nbdist.records import Metrics, PlanCheck, StepFigures
from nbdist.views.run.summary import Reached, described
from tests.runs import new_state


def report(step: int, time_s: float, *, epoch: int = 1, rank: int = 0, **own: float) -> Metrics:
    return Metrics(rank=rank, cell=1, epoch=epoch, step=step, time_s=time_s, own=own)


def test_the_loss_of_a_step_cell_is_that_of_its_last_step() -> None:
    reports = [report(1, 0.1, loss=4.0), report(2, 0.2, loss=2.0), report(-1, 0.3, loss=3.0)]
    assert str(Reached.of(reports, "step")) == "loss 2 (last step)"
    assert str(Reached.of(reports, "fit")) == "loss 3 (epoch mean)"
    evaluated = report(-1, 0.4, epoch=-1, loss=9.0)
    assert str(Reached.of([*reports, evaluated], "fit")) == "loss 3 (epoch mean)"
    assert str(Reached.of([evaluated], "")) == "loss 9 (last report)"


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


def test_a_text_names_a_step_time_far_from_the_plan() -> None:
    def text(measured_s: float | None) -> str:
        plan = PlanCheck(
            title="data 2",
            planned=StepFigures(step_s=0.010),
            measured=StepFigures(step_s=measured_s),
        )
        return described(new_state(status="finished", plan=plan), Reached())

    assert "step time 4.2 times the planned one" in text(0.042)
    assert "step time 0.25 times the planned one" in text(0.0025)
    assert "planned" not in text(0.019) + text(None)
