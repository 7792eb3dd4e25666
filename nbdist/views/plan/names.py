"""Layout of some arrays of a plan, by name."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from nbdist.errors import UsageError
from nbdist.views import formatting
from nbdist.views.plan import html as plan_html
from nbdist.views.plan.picture import PlanPicture, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.records import Plan, PlannedTensor


class NamesPicture(PlanPicture):
    """Arrays of a plan with some names.

    Attributes:
        plan: plan with these arrays only.

    Args:
        plan: full plan.
        names: names in the step.

    Raises:
        UsageError: the plan has no array of a name.
    """

    def __init__(self, plan: Plan, names: Sequence[str]) -> None:
        missing = [name for name in names if not any(_is_of(t, name) for t in plan.tensors)]
        if missing:
            known = dict.fromkeys(filter(str.isidentifier, map(_name, plan.tensors)))
            raise UsageError(
                f"the plan contains no {', '.join(missing)}: it contains {', '.join(known)}"
            )
        own = tuple(t for t in plan.tensors if any(_is_of(t, name) for name in names))
        super().__init__(msgspec.structs.replace(plan, tensors=own))
        self._names = names

    @cached_property
    def _html(self) -> str:
        return plan_html.part(self._title, self.plan, self._placement, self._tree)

    @property
    def _title(self) -> str:
        plan = self.plan
        size = formatting.size(sum(tensor.device_bytes for tensor in plan.tensors))
        whole = formatting.size(plan.memory.total)
        names, hardware = ", ".join(self._names), plan.on.partition(",")[0]
        return f"{names} in {plan.title} on {hardware}: {size} of the {whole} on each device"

    def _lines(self) -> Iterator[str]:
        yield from wrapped(self._title)
        yield from ("", *self._tree_lines(), "")
        yield from self._block_lines()


def _name(tensor: PlannedTensor) -> str:
    return tensor.path.partition("[")[0].partition(".")[0]


def _is_of(tensor: PlannedTensor, name: str) -> bool:
    rest = tensor.path.removeprefix(name)
    return tensor.path == name or (rest != tensor.path and rest[0] in "[.")
