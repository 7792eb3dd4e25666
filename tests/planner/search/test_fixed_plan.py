"""Plans that a user has edited: their layouts, and every fault of impossible ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from nbdist.errors import PlanError
from nbdist.planner.graph.layout import Layout, ShardedModel
from nbdist.planner.search.fixed_plan import sharded_as
from nbdist.planner.search.search import plan
from nbdist.planner.search.step_variants import Steps
from nbdist.records import (
    DATA,
    MODEL,
    REPLICATE,
    STAGE,
    Plan,
    PlannedMemory,
    PlannedTensor,
    PlannedTime,
    Planning,
)
from tests import plans
from tests.plan_models import hardware
from tests.planner.steps import LINEAR, OUT, SCAN, WIDE
from tests.plans import TWO_HOSTS, fixed, spec

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Model
    from nbdist.records import Spec


def edited(model: Model = LINEAR, specs: dict[str, Spec] | None = None, **fields: Any) -> Plan:
    """Return a plan of a step over 8 devices of the data axis, with other fields and specs."""
    specs = specs or {}
    tensors = tuple(
        PlannedTensor(t.path, t.role, t.value.sizes, "float32", specs.get(t.path, ((), ())), 0)
        for t in model.tensors
    )
    whole = Plan(
        axes={DATA: 8, MODEL: 1},
        zero=0,
        rows=model.rows,
        on="",
        tensors=tensors,
        memory=PlannedMemory(0, 0, 0, 0, 0),
        time=PlannedTime(0.0, 0.0, (), 0.0),
    )
    return msgspec.structs.replace(whole, **fields)


def taken(plan: Plan, model: Model = LINEAR, devices: int = 8) -> ShardedModel:
    return sharded_as(plan, Steps(model), devices)


def faults(plan: Plan, model: Model = LINEAR, devices: int = 8) -> list[str]:
    with pytest.raises(PlanError) as refused:
        taken(plan, model, devices)
    head, *lines = str(refused.value).split("\n")
    assert head == "the plan is impossible:"
    assert all(line.startswith("  - ") for line in lines)
    return [line.removeprefix("  - ") for line in lines]


def test_layout_is_that_of_the_plan() -> None:
    plan = edited(axes={DATA: 2, MODEL: 4}, zero=1)
    assert taken(plan).layout == Layout(2, 4, zero=1)
    fields = {"axes": {STAGE: 4, DATA: 2, MODEL: 1}, "micro": 8, "rounds": 2, "schedule": "1f1b"}
    expected = Layout(2, 1, micro=8, stage=4, schedule="1f1b", rounds=2)
    assert taken(edited(SCAN, **fields), SCAN).layout == expected


def test_specs_are_used_and_determine_the_split() -> None:
    specs: dict[str, Spec] = {"w": ((MODEL,), ()), "x": ((), (MODEL,))}
    sharded = taken(edited(specs=specs, axes={DATA: 2, MODEL: 4}))
    assert sharded.layout.split == {WIDE}
    w, m, x = LINEAR.tensors
    assert sharded.spec(w) == ((MODEL,), ())
    assert sharded.spec(m) == ((), ())
    assert sharded.spec(x) == ((DATA, MODEL), ())  # the batch is over all devices


def test_tensors_without_entry_get_a_spec_of_the_layout() -> None:
    plan = edited(specs={"w": ((), (MODEL,))}, axes={DATA: 2, MODEL: 4})
    plan = msgspec.structs.replace(plan, tensors=plan.tensors[:1])
    sharded = taken(plan)
    assert sharded.layout.split == {OUT}
    assert sharded.spec(LINEAR.tensors[1]) == ((), (MODEL,))


def test_axis_of_one_stage_is_removed() -> None:
    specs: dict[str, Spec] = {"w": ((STAGE, DATA), ())}
    sharded = taken(edited(specs=specs, axes={STAGE: 1, DATA: 8, MODEL: 1}))
    assert list(sharded.layout.axes) == [DATA, MODEL]
    assert sharded.spec(LINEAR.tensors[0]) == ((DATA,), ())


def test_axis_of_copies_is_taken() -> None:
    sharded = taken(edited(axes={REPLICATE: 2, DATA: 4, MODEL: 1}, zero=3))
    assert (sharded.layout.data, sharded.layout.replicate, sharded.layout.shards) == (8, 2, 4)
    whole = taken(edited(axes={REPLICATE: 1, DATA: 8, MODEL: 1}))
    assert list(whole.layout.axes) == [DATA, MODEL]


@pytest.mark.parametrize(
    ("axes", "named"), [({"rows": 8}, "rows"), ({DATA: 8}, "data"), ({}, "none")]
)
def test_other_axes_are_the_only_fault(axes: dict[str, int], named: str) -> None:
    expected = f"its axes are {named}: use data and model, "
    expected += "stage for stages, and replicate for copies of what ZeRO shards"
    assert faults(edited(axes=axes, micro=0)) == [expected]


NO_COPIES = (
    "replicate is 2, and ZeRO shards nothing over data: use data in its place, or zero=1 or 3 "
    "with data=2 or more"
)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"axes": {DATA: 4, MODEL: 1}}, "data 4 x model 1 is 4 devices, and there are 8"),
        ({"axes": {DATA: -8, MODEL: -1}}, "data -8 x model -1 is 8 devices, and there are 8"),
        ({"micro": 0}, "micro is 0: use 1 or more"),
        ({"micro": 3}, "a batch of 32 cannot be divided into 8 in 3 microbatches"),
        ({"schedule": "1f1b"}, "schedule is 1f1b, and there are no stages: use gpipe"),
        ({"rounds": 2}, "rounds is 2, and there are no stages: use 1"),
        ({"axes": {REPLICATE: 2, DATA: 4, MODEL: 1}}, NO_COPIES),
        ({"specs": {"w": ((),)}}, "w has 2 dimensions, and its spec has 1"),
        ({"specs": {"w": (("rows",), ())}}, "w is sharded over rows: the axes are data, model"),
        ({"specs": {"w": ((DATA,), (DATA,))}}, "w is sharded twice over data"),
    ],
    ids=str,
)
def test_fault_names_the_value(fields: dict[str, Any], fault: str) -> None:
    assert faults(edited(**fields)) == [fault]


def test_batch_must_divide_by_the_data_axis() -> None:
    plan = edited(axes={DATA: 5, MODEL: 1})
    assert faults(plan, devices=5) == ["a batch of 32 cannot be divided into 5"]
    assert faults(edited(axes={DATA: 0, MODEL: 1}), devices=0) == [
        "data 0 x model 1 is 0 devices, and there are 0"
    ]


def test_dimensions_must_divide_by_their_axes() -> None:
    plan = edited(specs={"w": ((), (DATA, MODEL)), "x": (("other",),)}, axes={DATA: 16, MODEL: 16})
    assert faults(plan, devices=256) == [
        "w dimension 1 is 128, which 256 devices cannot share evenly"
    ]


def test_unknown_tensors_are_listed() -> None:
    plan = edited()
    gone = msgspec.structs.replace(plan.tensors[0], path="gone")
    assert faults(msgspec.structs.replace(plan, tensors=(gone,))) == ["the step has no gone"]


def test_every_fault_is_listed() -> None:
    plan = edited(specs={"w": ((),), "m": (("rows",), ())}, micro=0, rounds=2)
    assert len(faults(plan, devices=4)) == 5


def test_batch_and_model_stay_apart_if_they_must() -> None:
    apart = replace(LINEAR, apart="a reason")
    plan = edited(axes={DATA: 2, MODEL: 4})
    assert faults(plan, apart) == ["data 2 x model 4 shards over several axes: a reason"]
    assert taken(edited(axes={DATA: 1, MODEL: 8}), apart).layout.model == 8


def test_faults_of_stages_are_listed() -> None:
    plan = edited(SCAN, axes={STAGE: 4, DATA: 2, MODEL: 1}, micro=1, zero=3)
    assert faults(plan, SCAN) == [
        "micro is 1: stages need 2 microbatches or more",
        "zero is 3: with stages, ZeRO is 0 or 1",
    ]


def test_sequence_parallelism_needs_a_model_axis_and_a_sequence() -> None:
    (flat,) = faults(edited(sequence=True))
    assert flat.startswith("sequence is true: sequence parallelism needs tensor parallelism")
    (fault,) = faults(edited(specs={"w": ((MODEL,), ())}, axes={DATA: 2, MODEL: 4}, sequence=True))
    assert fault.startswith("sequence is true: no product")


def test_edited_plan_with_stages_is_accepted() -> None:
    own = plans.piped(stage=2, data=4, micro=4)
    edited = msgspec.structs.replace(own, axes={STAGE: 4, DATA: 2, MODEL: 1}, micro=8)
    accepted = plan(plans.stacked(), hardware(TWO_HOSTS), Planning(given=edited))
    expected = plans.piped(stage=4, data=2, micro=8)
    assert accepted.axes == expected.axes
    assert (accepted.memory, accepted.time) == (expected.memory, expected.time)


def test_edited_plan_with_one_stage_has_no_stage_axis() -> None:
    own = plan(plans.stacked(), hardware(TWO_HOSTS), fixed(data=8))
    edited = msgspec.structs.replace(own, axes={STAGE: 1, **own.axes})
    first, *others = edited.tensors
    staged = msgspec.structs.replace(first, spec=((STAGE,), *first.spec[1:]))
    edited = msgspec.structs.replace(edited, tensors=(staged, *others))
    accepted = plan(plans.stacked(), hardware(TWO_HOSTS), Planning(given=edited))
    assert (accepted.axes, accepted.tensors) == (own.axes, own.tensors)


def test_edited_batch_spec_is_ignored() -> None:
    own = plans.piped(stage=2, data=4, micro=4)
    batch = [msgspec.structs.replace(t, spec=((DATA,), ())) for t in own.tensors if t.path == "x"]
    others = [tensor for tensor in own.tensors if tensor.path != "x"]
    edited = msgspec.structs.replace(own, tensors=(*others, *batch))
    accepted = plan(plans.stacked(), hardware(TWO_HOSTS), Planning(given=edited))
    assert spec(accepted, "x") == ((STAGE, DATA), ())
    assert accepted.memory == own.memory
