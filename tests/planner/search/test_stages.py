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
def test_layers_are_scans_over_stacked_parameters(name: str) -> None:
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


def test_stages_shard_only_layers_and_their_state() -> None:
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


def test_zero_shards_state_within_each_stage() -> None:
    found = plans.piped(stage=2, data=4, micro=4, zero=1)
    assert spec(found, "params['layers']['up']") == ((STAGE,), (), ())
    assert spec(found, "moments['layers']['up']") == ((STAGE,), (), (DATA,))


def test_stages_combine_with_tensor_parallelism() -> None:
    planning = fixed(stage=2, data=2, model=2, micro=4)
    found = plan(plans.stacked(LAYERS, 1024, 2048), hardware(HOSTS), planning)
    assert spec(found, "params['layers']['up']") == ((STAGE,), (), (MODEL,))
    assert spec(found, "params['layers']['down']") == ((STAGE,), (MODEL,), ())


@given(
    stage=st.sampled_from([2, 4, 8]),
    data=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([2, 4, 8]),
)
def test_stages_divide_the_bytes_of_layers(stage: int, data: int, micro: int) -> None:
    model = plans.stacked()
    layout = Layout(data, 1, micro=micro, stage=stage)
    staged, whole = (
        ShardedModel(model, one, states_of(model)) for one in (layout, Layout(data, 1))
    )
    for tensor in model.tensors:
        parts = stage if "layers" in tensor.path or tensor.role == "batch" else 1
        assert staged.device_bytes(tensor) * parts == whole.device_bytes(tensor)


def test_model_without_layers_has_no_stages() -> None:
    model = model_of_program("MLP")
    assert all(layout.stage == 1 for layout in layouts(model, hardware(HOSTS), Planning()))
    assert "no stages" in refusal(fixed(stage=2), model)


def refusing_stages(reason: str, *remats: Remat) -> Steps:
    """Return a step whose rewriter refuses stages: always, or only for some remat modes."""

    def layers(remat: Remat) -> tuple[int, ...]:
        if not remats or remat in remats:
            raise PlanError(reason)
        return (LAYERS,)

    return Steps(plans.stacked(), lambda *_: plans.stacked(), layers)


def test_reason_against_stages_is_stated() -> None:
    steps = refusing_stages("a layer mixes rows: sort")
    found = plan(steps, hardware(HOSTS), Planning())
    assert "no stages: a layer mixes rows (docs/planner.md, Pipelines)" in found.notes
    on_cpus = plan(steps, engines(4, 2), Planning()).notes
    assert not any("no stages" in note for note in on_cpus)
    assert "(stage=2): no stages: a layer mixes rows: sort" in refusal(fixed(stage=2), steps)
    assert not any(
        "no stages" in note for note in plan(plans.stacked(), hardware(HOSTS), Planning()).notes
    )


def test_stages_use_remat_modes_that_are_possible() -> None:
    steps = refusing_stages("it draws in a loop", "full")
    with pytest.raises(PlanError, match="no stages: it draws in a loop"):
        plan(steps, hardware(HOSTS), Planning(fixed={STAGE: 2}, remat="full"))
    assert plan(steps, hardware(HOSTS), Planning(fixed={STAGE: 2}, remat="selective")).remat


def test_scan_lengths_without_common_divisor_are_listed() -> None:
    steps = Steps(plans.stacked(), None, lambda _: (8, 3))
    assert "divides all scans over layers, which have 8 and 3 layers" in refusal(
        fixed(stage=2), steps
    )


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"stage": 3}, "the layers cannot be divided into 3 stages: use 2, 4, 8; stage 3 does"),
        ({"stage": 4, "micro": 1}, "micro is 1: stages need 2 microbatches"),
        ({"stage": 4, "zero": 3}, "zero is 3: with stages, ZeRO is 0 or 1"),
        ({"stage": 16}, "divided into 16 stages: use 2, 4, 8; stage 16 does not divide 8 devices"),
        ({"stage": 4, "data": 4}, "stage 4 x data 4 does not divide 8 devices"),
        ({"stage": 4, "micro": 3}, "micro 3 does not divide the batch of 64"),
    ],
)
def test_impossible_stages_are_refused(sizes: dict[str, int], reason: str) -> None:
    message = refusal(Planning(fixed=sizes))
    assert message.startswith("no layout over 8 devices fulfils the request (")
    assert reason in message


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(4, {"stage": 8}), (6, {"stage": 4, "data": 2}), (64, {"stage": 2, "data": 1})],
)
def test_requested_stages_are_planned(rows: int, sizes: dict[str, int]) -> None:
    """Also with fewer microbatches than stages, or tensor parallelism over slow links."""
    found = plan(plans.stacked(LAYERS, 256, rows), hardware("8 hosts x 1 A100"), fixed(**sizes))
    assert found.axes.items() >= sizes.items()


def test_cpus_get_stages_only_on_request() -> None:
    model, target = plans.stacked(), engines(4, 2)
    assert {layout.stage for layout in layouts(model, target, Planning())} == {1}
    found = plan(model, target, fixed(stage=4))
    assert found.axes == {STAGE: 4, DATA: 2, MODEL: 1}
    assert found.micro == 4


def test_plan_without_stages_has_no_stage_axis() -> None:
    found = plan(plans.stacked(), hardware(HOSTS), fixed(data=8))
    assert found.axes == {DATA: 8, MODEL: 1}
    assert found.time.bubble == 0


def test_more_microbatches_reduce_the_bubble() -> None:
    few, more = (plans.piped(stage=4, data=2, micro=micro) for micro in (4, 16))
    assert few.time.bubble > more.time.bubble > 0
    assert few.memory.activations > more.memory.activations
    assert any("bubble" in text for text in few.warnings)
    level = {traffic.level for traffic in few.time.traffic if traffic.axis == STAGE}
    assert level == {"network"}


def test_bubble_of_plan_matches_gpipe() -> None:
    """The layers are so wide that other costs are small."""
    model = plans.stacked(LAYERS, 4096, 4096)
    found = plan(model, hardware("4xA100"), fixed(stage=4, micro=16))
    assert found.time.bubble == pytest.approx(3 / 19, rel=0.15)


def test_stages_replace_tensor_parallelism_over_slow_links() -> None:
    model = plans.stacked(LAYERS, 8192, 512)
    target = hardware("8 hosts x 1 A100, 25 Gbps")
    found = plan(model, target, Planning(budget=20 * 2**30))
    assert found.axes[STAGE] > 1
    assert found.axes[MODEL] == 1
    cut = plan(model, target, Planning(budget=20 * 2**30, fixed={STAGE: 1, DATA: 1}))
    assert cut.time.step > found.time.step


@pytest.mark.parametrize(
    ("wide", "rows", "reason"),
    [
        (1024, 2**17, r"% slower: its stages are idle for \d+% of a step"),
        (512, 2**14, r"operations may hide the transfers of the best one; use --fix stage=\d"),
    ],
)
def test_rejected_pipeline_states_the_reason(wide: int, rows: int, reason: str) -> None:
    found = plan(plans.stacked(LAYERS, wide, rows), hardware("8xH100"), Planning())
    assert STAGE not in found.axes
    (why,) = [other.why for other in found.runners_up if "stages" in other.title]
    assert re.search(reason, why)


def test_alternatives_to_chosen_pipeline_are_listed() -> None:
    found = plan(
        plans.stacked(LAYERS, 8192, 512), hardware("8 hosts x 1 A100, 25 Gbps"), Planning()
    )
    assert STAGE in found.axes
    assert any("stages" not in other.title for other in found.runners_up)


def test_edited_plan_with_stages_is_accepted() -> None:
    own = plans.piped(stage=2, data=4, micro=4)
    edited = msgspec.structs.replace(own, axes={STAGE: 4, DATA: 2, MODEL: 1}, micro=8)
    accepted = plan(plans.stacked(), hardware(HOSTS), Planning(given=edited))
    expected = plans.piped(stage=4, data=2, micro=8)
    assert accepted.axes == expected.axes
    assert (accepted.memory, accepted.time) == (expected.memory, expected.time)


def test_edited_plan_with_one_stage_has_no_stage_axis() -> None:
    own = plan(plans.stacked(), hardware(HOSTS), fixed(data=8))
    edited = msgspec.structs.replace(own, axes={STAGE: 1, **own.axes})
    first, *others = edited.tensors
    cut = msgspec.structs.replace(first, spec=((STAGE,), *first.spec[1:]))
    edited = msgspec.structs.replace(edited, tensors=(cut, *others))
    accepted = plan(plans.stacked(), hardware(HOSTS), Planning(given=edited))
    assert (accepted.axes, accepted.tensors) == (own.axes, own.tensors)


def test_edited_batch_spec_is_ignored() -> None:
    own = plans.piped(stage=2, data=4, micro=4)
    batch = [msgspec.structs.replace(t, spec=((DATA,), ())) for t in own.tensors if t.path == "x"]
    others = [tensor for tensor in own.tensors if tensor.path != "x"]
    edited = msgspec.structs.replace(own, tensors=(*others, *batch))
    accepted = plan(plans.stacked(), hardware(HOSTS), Planning(given=edited))
    assert spec(accepted, "x") == ((STAGE, DATA), ())
    assert accepted.memory == own.memory


def test_every_fault_of_plan_with_stages_is_listed() -> None:
    own = plans.piped(stage=2, data=4, micro=4)
    edited = msgspec.structs.replace(own, axes={STAGE: 8, DATA: 3, MODEL: 1}, micro=1, zero=3)
    message = refusal(Planning(given=edited), plans.stacked(4))
    assert "stage 8 x data 3 x model 1 is 24 devices, and there are 8" in message
    assert "a batch of 64 cannot be divided into 3" in message
    assert "the layers cannot be divided into 8 stages: use 2, 4" in message
    assert "micro is 1: stages need 2 microbatches or more" in message
    assert "zero is 3: with stages, ZeRO is 0 or 1" in message
    edited = msgspec.structs.replace(own, zero=3)
    mixing = refusal(Planning(given=edited), refusing_stages("a layer mixes rows"))
    assert "no stages: a layer mixes rows" in mixing
    assert "zero is 3" in mixing
    assert "no stages" in refusal(Planning(given=own), model_of_program("MLP"))
