"""What a plan looks like."""

from nbdist.records import Plan


class PlanPicture:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __repr__(self) -> str:
        return f"{self._plan.title} on {self._plan.on}"
