"""What the plan of a step has foretold, beside what is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from nbdist.records import PlanCheck, Planned, StepFigures

if TYPE_CHECKING:
    from nbdist.records import Compiled, Plan
    from nbdist.telemetry.diagnostics import Pace


class PlanComparison:
    """The figures of one run.

    Args:
        former: those that another process has kept of it.
    """

    def __init__(self, former: PlanCheck | None) -> None:
        self._check = former

    def note(self, record: Planned | Compiled) -> None:
        """Of executables, the first is what was planned: later ones are of other batches."""
        if isinstance(record, Planned):
            self._check = None if record.only else _of_plan(record.plan)
        elif record.arguments and self._check and self._check.measured.arguments is None:
            memory = record.arguments + record.temporaries
            self._measure(arguments=record.arguments, memory=memory)

    def check(self, pace: Pace) -> PlanCheck | None:
        """None where nothing was planned.

        Args:
            pace: of the last steps; where there are too few, what was known stays.
        """
        if pace.step_s is not None:
            self._measure(step_s=pace.step_s)
        if pace.collectives is not None:
            self._measure(collectives=pace.collectives)
        return self._check

    def _measure(self, **figures: float) -> None:
        if self._check is not None:
            self._check = replace(self._check, measured=replace(self._check.measured, **figures))


def _of_plan(plan: Plan) -> PlanCheck:
    time, memory = plan.time, plan.memory
    planned = StepFigures(
        step_s=time.step,
        collectives=time.exposed / time.step if time.step else 0.0,
        arguments=memory.arguments,
        memory=memory.needed,
    )
    return PlanCheck(title=plan.title, planned=planned, measured=StepFigures())
