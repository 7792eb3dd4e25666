"""Layers in stages: their layouts, specs and expected costs."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.errors import PlanError
from nbdist.planner.graph.layers import stages_of
from nbdist.planner.graph.layout import Layout, ShardedModel
from nbdist.planner.graph.optimizer_state import states_of
from nbdist.planner.search.search import layouts, plan
from nbdist.planner.search.step_variants import Steps
from nbdist.records import DATA, MODEL, STAGE, Plan, Planning, Remat
from tests import plans
from tests.plan_models import engines, hardware, model_of_program, traced
from tests.plan_programs import PROGRAMS

LAYERS = 8
HOSTS = "2 hosts x 4 A100"


def spec(found: Plan, path: str) -> tuple[tuple[str, ...], ...]:
    (own,) = [t for t in found.tensors if t.path == path]
    return own.spec


def fixed(**sizes: int) -> Planning:
    return Planning(fixed=sizes)


def refusal(planning: Planning, model: Any = None, on: str = HOSTS) -> str:
    with pytest.raises(PlanError) as refused:
        plan(model or plans.stacked(), hardware(on), planning)
    return str(refused.value)


@pytest.mark.parametrize("name", PROGRAMS)
def test_layers_are_what_a_scan_with_parameters_of_its_own_goes_over(name: str) -> None:
    """The time steps of an LSTM are no layers."""
    found = stages_of(model_of_program(name))
    assert found == ((2, 4) if name == "tied transformer" else ())


def test_stages_divide_the_layers_of_all_scans() -> None:
    def step(params: Any, _: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch
            for own in params:
                x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, own)
            return (x**2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    model = traced(step, [jnp.zeros((n, 4, 4)) for n in (12, 8)], (), jnp.zeros((16, 4)))
    assert stages_of(model) == (2, 4)


def test_stages_cut_layers_their_state_and_nothing_else() -> None:
    found = plans.piped(stage=4, data=2, micro=8)
    assert found.axes == {STAGE: 4, DATA: 2, MODEL: 1}
    assert list(found.axes) == [STAGE, DATA, MODEL]
    for name in ("params", "moments"):
        assert spec(found, f"{name}['layers']['up']") == ((STAGE,), (), ())
        assert spec(found, f"{name}['layers']['b']") == ((STAGE,), ())
        assert spec(found, f"{name}['head']") == ((), ())
    assert spec(found, "x") == ((STAGE, DATA), ())
    assert found.title == "data 2 x 4 stages, 8 microbatches"
    assert msgspec.json.decode(msgspec.json.encode(found), type=Plan) == found


def test_state_is_cut_by_zero_within_each_stage() -> None:
    found = plans.piped(stage=2, data=4, micro=4, zero=1)
    assert spec(found, "params['layers']['up']") == ((STAGE,), (), ())
    assert spec(found, "moments['layers']['up']") == ((STAGE,), (), (DATA,))


def test_a_stage_has_its_tensor_parallel_part() -> None:
    asked = fixed(stage=2, data=2, model=2, micro=4)
    found = plan(plans.stacked(LAYERS, 1024, 2048), hardware(HOSTS), asked)
    assert spec(found, "params['layers']['up']") == ((STAGE,), (), (MODEL,))
    assert spec(found, "params['layers']['down']") == ((STAGE,), (MODEL,), ())


@given(
    stage=st.sampled_from([2, 4, 8]),
    data=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([2, 4, 8]),
)
def test_parts_of_layers_are_as_large_as_they_are_many(stage: int, data: int, micro: int) -> None:
    model = plans.stacked()
    layout = Layout(data, 1, micro=micro, stage=stage)
    laid, whole = (ShardedModel(model, one, states_of(model)) for one in (layout, Layout(data, 1)))
    for tensor in model.tensors:
        parts = stage if "layers" in tensor.path or tensor.role == "batch" else 1
        assert laid.device_bytes(tensor) * parts == whole.device_bytes(tensor)


def test_without_layers_there_are_no_stages() -> None:
    model = model_of_program("MLP")
    assert all(layout.stage == 1 for layout in layouts(model, hardware(HOSTS), Planning()))
    assert "no stages" in refusal(fixed(stage=2), model)


def uncut(reason: str, *remats: Remat) -> Steps:
    """Return a step whose rewriter refuses stages: always, or only for some remat modes."""

    def layers(remat: Remat) -> tuple[int, ...]:
        if not remats or remat in remats:
            raise PlanError(reason)
        return (LAYERS,)

    return Steps(plans.stacked(), lambda *_: plans.stacked(), layers)


def test_why_the_layers_cannot_be_cut_is_said() -> None:
    steps = uncut("a layer mixes rows: sort")
    found = plan(steps, hardware(HOSTS), Planning())
    assert "no stages: a layer mixes rows (docs/planner.md, Pipelines)" in found.notes
    on_cpus = plan(steps, engines(4, 2), Planning()).notes
    assert not any("no stages" in note for note in on_cpus)
    assert "(stage=2): no stages: a layer mixes rows: sort" in refusal(fixed(stage=2), steps)
    assert not any(
        "no stages" in note for note in plan(plans.stacked(), hardware(HOSTS), Planning()).notes
    )


def test_stages_come_with_what_can_be_made_again_in_them() -> None:
    steps = uncut("it draws in a loop", "full")
    with pytest.raises(PlanError, match="no stages: it draws in a loop"):
        plan(steps, hardware(HOSTS), Planning(fixed={STAGE: 2}, remat="full"))
    assert plan(steps, hardware(HOSTS), Planning(fixed={STAGE: 2}, remat="selective")).remat


def test_the_lengths_of_scans_that_no_number_divides_are_told() -> None:
    steps = Steps(plans.stacked(), None, lambda _: (8, 3))
    assert "divides all scans over layers, which have 8 and 3 layers" in refusal(
        fixed(stage=2), steps
    )


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"stage": 3}, "the layers cannot be cut into 3 stages: use 2, 4, 8; stage 3 does"),
        ({"stage": 4, "micro": 1}, "micro is 1: stages need 2 microbatches"),
        ({"stage": 4, "zero": 3}, "zero is 3: with stages, ZeRO is 0 or 1"),
        ({"stage": 16}, "cut into 16 stages: use 2, 4, 8; stage 16 does not divide 8 devices"),
        ({"stage": 4, "data": 4}, "stage 4 x data 4 does not divide 8 devices"),
        ({"stage": 4, "micro": 3}, "micro 3 does not divide the batch of 64"),
    ],
)
def test_stages_that_cannot_be_had_are_refused(asked: dict[str, int], says: str) -> None:
    said = refusal(Planning(fixed=asked))
    assert said.startswith("no layout over 8 devices fulfils the request (")
    assert says in said


@pytest.mark.parametrize(
    ("rows", "asked"),
    [(4, {"stage": 8}), (6, {"stage": 4, "data": 2}), (64, {"stage": 2, "data": 1})],
)
def test_stages_that_are_asked_for_are_had_where_they_can_be(
    rows: int, asked: dict[str, int]
) -> None:
    """Also with fewer microbatches than stages, or tensor parallelism over slow links."""
    found = plan(plans.stacked(LAYERS, 256, rows), hardware("8 hosts x 1 A100"), fixed(**asked))
    assert found.axes.items() >= asked.items()


def test_processors_of_the_host_have_no_stages_unless_asked_for() -> None:
    model, target = plans.stacked(), engines(4, 2)
    assert {layout.stage for layout in layouts(model, target, Planning())} == {1}
    found = plan(model, target, fixed(stage=4))
    assert found.axes == {STAGE: 4, DATA: 2, MODEL: 1}
    assert found.micro == 4


def test_without_stages_a_plan_has_no_such_axis() -> None:
    found = plan(plans.stacked(), hardware(HOSTS), fixed(data=8))
    assert found.axes == {DATA: 8, MODEL: 1}
    assert found.time.bubble == 0


def test_more_microbatches_wait_less_and_send_as_much() -> None:
    few, more = (plans.piped(stage=4, data=2, micro=micro) for micro in (4, 16))
    assert few.time.bubble > more.time.bubble > 0
    assert few.memory.activations > more.memory.activations
    assert any("bubble" in text for text in few.warnings)
    level = {traffic.level for traffic in few.time.traffic if traffic.axis == STAGE}
    assert level == {"network"}


def test_each_stage_waits_as_gpipe_does() -> None:
    """The layers are so wide that other costs are small."""
    model = plans.stacked(LAYERS, 4096, 4096)
    found = plan(model, hardware("4xA100"), fixed(stage=4, micro=16))
    assert found.time.bubble == pytest.approx(3 / 19, rel=0.15)


def test_stages_take_the_place_of_tensor_parallelism_over_slow_links() -> None:
    model = plans.stacked(LAYERS, 8192, 512)
    target = hardware("8 hosts x 1 A100, 25 Gbps")
    found = plan(model, target, Planning(budget=20 * 2**30))
    assert found.axes[STAGE] > 1
    assert found.axes[MODEL] == 1
    cut = plan(model, target, Planning(budget=20 * 2**30, fixed={STAGE: 1, DATA: 1}))
    assert cut.time.step > found.time.step


@pytest.mark.parametrize(
    ("wide", "rows", "says"),
    [
        (1024, 2**17, r"% slower: its stages are idle for \d+% of a step"),
        (512, 2**14, r"operations may hide the transfers of the best one; use --fix stage=\d"),
    ],
)
def test_a_pipeline_that_is_not_chosen_says_why(wide: int, rows: int, says: str) -> None:
    found = plan(plans.stacked(LAYERS, wide, rows), hardware("8xH100"), Planning())
    assert STAGE not in found.axes
    (why,) = [other.why for other in found.runners_up if "stages" in other.title]
    assert re.search(says, why)


def test_what_a_pipeline_was_preferred_to_is_told() -> None:
    found = plan(
        plans.stacked(LAYERS, 8192, 512), hardware("8 hosts x 1 A100, 25 Gbps"), Planning()
    )
    assert STAGE in found.axes
    assert any("stages" not in other.title for other in found.runners_up)


def test_a_plan_with_stages_is_taken_as_it_is_edited() -> None:
    own = plans.piped(stage=2, data=4, micro=4)
    edited = msgspec.structs.replace(own, axes={STAGE: 4, DATA: 2, MODEL: 1}, micro=8)
    taken = plan(plans.stacked(), hardware(HOSTS), Planning(given=edited))
    asked = plans.piped(stage=4, data=2, micro=8)
    assert taken.axes == asked.axes
    assert (taken.memory, taken.time) == (asked.memory, asked.time)


def test_one_stage_of_an_edited_plan_is_none() -> None:
    own = plan(plans.stacked(), hardware(HOSTS), fixed(data=8))
    edited = msgspec.structs.replace(own, axes={STAGE: 1, **own.axes})
    first, *others = edited.tensors
    cut = msgspec.structs.replace(first, spec=((STAGE,), *first.spec[1:]))
    edited = msgspec.structs.replace(edited, tensors=(cut, *others))
    taken = plan(plans.stacked(), hardware(HOSTS), Planning(given=edited))
    assert (taken.axes, taken.tensors) == (own.axes, own.tensors)


def test_how_a_batch_comes_is_not_edited() -> None:
    own = plans.piped(stage=2, data=4, micro=4)
    batch = [msgspec.structs.replace(t, spec=((DATA,), ())) for t in own.tensors if t.path == "x"]
    others = [tensor for tensor in own.tensors if tensor.path != "x"]
    edited = msgspec.structs.replace(own, tensors=(*others, *batch))
    taken = plan(plans.stacked(), hardware(HOSTS), Planning(given=edited))
    assert spec(taken, "x") == ((STAGE, DATA), ())
    assert taken.memory == own.memory


def test_every_fault_of_a_plan_with_stages_is_named() -> None:
    own = plans.piped(stage=2, data=4, micro=4)
    edited = msgspec.structs.replace(own, axes={STAGE: 8, DATA: 3, MODEL: 1}, micro=1, zero=3)
    said = refusal(Planning(given=edited), plans.stacked(4))
    assert "stage 8 x data 3 x model 1 is 24 devices, and there are 8" in said
    assert "a batch of 64 cannot be cut in 3" in said
    assert "the layers cannot be cut into 8 stages: use 2, 4" in said
    assert "micro is 1: stages need 2 microbatches or more" in said
    assert "zero is 3: with stages, ZeRO is 0 or 1" in said
    edited = msgspec.structs.replace(own, zero=3)
    mixing = refusal(Planning(given=edited), uncut("a layer mixes rows"))
    assert "no stages: a layer mixes rows" in mixing
    assert "zero is 3" in mixing
    assert "no stages" in refusal(Planning(given=own), model_of_program("MLP"))
