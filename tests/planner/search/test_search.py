"""Choice of a step's layout, and the errors if none is possible."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

import msgspec
import pytest

from nbdist.errors import PlanError
from nbdist.planner.cost.memory import MARGIN
from nbdist.planner.search.search import layouts, plan
from nbdist.planner.search.step_variants import Steps
from nbdist.records import DATA, MODEL, REPLICATE, STAGE, Plan, PlannedTensor, Planning, Remat
from tests import plans, references
from tests.plan_models import (
    engines,
    frozen_table,
    hardware,
    model_of_program,
    regression,
    table,
    transformer,
)
from tests.plan_programs import BATCH, PROGRAMS
from tests.plans import TWO_HOSTS, fixed

FAST, SLOW = "4 hosts x 8 A100-80GB", "32 hosts x 1 A100-80GB, 10 Gbps"
TABLE = 10**9
"""Number of rows; with 16 columns of 4 bytes the table takes 64 GB."""

cached_transformer = cache(transformer)


def spec(found: Plan, path: str) -> tuple[tuple[str, ...], ...]:
    """Return the spec of the parameter whose path contains `path`."""
    (planned,) = [t for t in found.tensors if path in t.path and t.role == "parameter"]
    return planned.spec


def refusal(planning: Planning, name: str = "MLP", on: str = "8xA100") -> str:
    with pytest.raises(PlanError) as error:
        plan(model_of_program(name), hardware(on), planning)
    return str(error.value)


def test_free_memory_decides_between_layouts_of_equal_speed() -> None:
    model = cached_transformer(4096, 2, 64)
    fastest = plan(model, hardware("8xA100"), Planning())
    assert fastest.memory.available - fastest.memory.total > 5 * 2**30
    budget = fastest.memory.total + int(3.9 * 2**30)  # it needs less with a budget
    roomy = plan(model, hardware("8xA100"), Planning(budget=budget))
    assert fastest.time.step < roomy.time.step < 1.01 * fastest.time.step
    assert roomy.memory.available - roomy.memory.total > 5 * 2**30
    (faster,) = [other for other in roomy.runners_up if other.title == fastest.title]
    assert re.fullmatch(
        r"0\.\d% faster, but leaves only 4\.\d+ GiB of each device free", faster.why
    )
    tight = plan(model, hardware("8xA100"), Planning(budget=fastest.memory.total + 2**29))
    assert tight.title == fastest.title  # no layout has as much free memory


@pytest.mark.parametrize("layer", [0, 1])
def test_transformer_is_sharded_as_in_megatron(layer: int) -> None:
    """Shard columns of the input projections and rows of the output projections."""
    found = plan(
        cached_transformer(4096, 2, 64), hardware("8xA100"), Planning(fixed={DATA: 1, MODEL: 8})
    )
    columns, rows = ((), (MODEL,)), ((MODEL,), ())
    for name in ("q", "k", "v", "up"):
        assert spec(found, f"[{layer}]['{name}']") == columns
    for name in ("o", "down"):
        assert spec(found, f"[{layer}]['{name}']") == rows
    assert spec(found, f"[{layer}]['norm1']") == ((),)
    assert spec(found, "['head']") == columns


def test_embedding_rows_are_sharded() -> None:
    small = plan(model_of_program("transformer"), hardware("8xA100"), Planning(fixed={MODEL: 8}))
    assert spec(small, "['embedding']") == ((MODEL,), ())


@pytest.mark.parametrize("on", ["8xA100", "16 hosts x 1 V100, 10 Gbps", "8 x CPU"])
def test_table_that_does_not_fit_is_never_replicated(on: str) -> None:
    target = hardware(on)
    found = plan(table(TABLE), target, Planning(budget=40 * 10**9))
    assert any(found.tensors[0].spec)
    assert found.memory.arguments < TABLE * 16 * 4 / 2
    replicated = Planning(budget=40 * 10**9, fixed={DATA: target.topology.devices, "zero": 0})
    with pytest.raises(PlanError, match="the step does not fit"):
        plan(table(TABLE), target, replicated)


@pytest.mark.parametrize("on", ["8xH200", "8 x CPU"])
def test_large_table_is_replicated_only_on_request(on: str) -> None:
    """The whole table would fit (1.6e9 entries, 6.4 GB) and would need no transfers."""
    target, budget = hardware(on), 140 * 10**9
    found = plan(frozen_table(TABLE // 10), target, Planning(budget=budget))
    assert any(found.tensors[1].spec), "the table is not sharded"
    fixed = {DATA: target.topology.devices, "zero": 0}
    whole = plan(frozen_table(TABLE // 10), target, Planning(budget=budget, fixed=fixed))
    assert not any(whole.tensors[1].spec)


def test_batches_too_fast_for_one_process_are_noted() -> None:
    """A batch of 268 MB in less than a millisecond causes the warning; tokens do not."""
    warnings = plan(regression(1 << 16), hardware("8xH100"), Planning()).warnings
    pattern = r"each host needs [\d,.]+ GB/s of batches, .* --prefetch auto"
    assert any(re.fullmatch(pattern, line) for line in warnings)
    assert not plan(cached_transformer(4096, 2, 64), hardware("8xA100"), Planning()).warnings


def test_large_table_that_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(PlanError, match=r"over 1,000,000,000 entries, .* --fix tensor=1"):
        plan(table(100_000_007), hardware("7xH200"), Planning())


@pytest.mark.processes
@pytest.mark.parametrize(
    "on",
    [
        "2 hosts x 4 H100",
        *(pytest.param(o, marks=pytest.mark.full) for o in ("8xA100", "2 x v5e:2x2")),
    ],
)
def test_plan_of_a_step_is_deterministic(on: str) -> None:
    """The plan is the same in another process, where sets are ordered differently."""
    text = (
        "import msgspec\n"
        "from nbdist.planner.search.search import plan\n"
        "from nbdist.records import Planning\n"
        "from tests.plan_models import hardware, model_of_program\n"
        f"found = plan(model_of_program('experts'), hardware({on!r}), Planning())\n"
        "outcome = msgspec.json.encode(found).decode()\n"
    )
    encoded = references.plainly({"it": text}, PYTHONHASHSEED="7", JAX_PLATFORMS="cpu")["it"]
    first = plan(model_of_program("experts"), hardware(on), Planning())
    assert first == plan(model_of_program("experts"), hardware(on), Planning())
    assert first == msgspec.json.decode(encoded, type=Plan)


@pytest.mark.parametrize("name", PROGRAMS)
def test_requested_layout_is_planned(name: str) -> None:
    model, target = model_of_program(name), engines(2, 4)
    for layout in layouts(model, target, Planning()):
        fixed = {DATA: layout.data, MODEL: layout.model, "zero": layout.zero}
        found = plan(model, target, Planning(fixed=fixed))
        assert found.axes == layout.axes
        assert found.zero == layout.zero
        assert found.runners_up == ()


@pytest.mark.parametrize("fixed", [{DATA: 3}, {DATA: 4, MODEL: 4}, {MODEL: 5}, {"zero": 2}])
def test_impossible_layout_is_refused(fixed: dict[str, int]) -> None:
    message = refusal(Planning(fixed=fixed))
    request = ", ".join(f"{name}={size}" for name, size in fixed.items())
    assert f"no layout over 8 devices fulfils the request ({request})" in message
    assert "the product of the axes must be 8, data must divide the batch of 16" in message


def test_grouped_convolutions_use_only_one_axis() -> None:
    """XLA computes wrong gradients on two axes."""
    message = refusal(Planning(fixed={DATA: 2, MODEL: 4}), "depthwise CNN")
    assert (
        "the batch and the model cannot both be sharded: XLA computes a wrong gradient" in message
    )
    mlp = plan(model_of_program("MLP"), hardware("8xA100"), Planning(fixed={DATA: 2, MODEL: 4}))
    given = msgspec.structs.replace(mlp, tensors=())
    assert "data 2 x model 4 shards over several axes" in refusal(
        Planning(given=given), "depthwise CNN"
    )


def test_budget_is_respected() -> None:
    model, target = cached_transformer(4096, 2, 64), hardware("8xA100-80GB")
    unlimited = plan(model, target, Planning())
    budget = unlimited.memory.total - 1
    limited = plan(model, target, Planning(budget=budget))
    assert limited.memory.total <= budget
    assert limited.time.step >= unlimited.time.step
    too_much = [other for other in limited.runners_up if other.device_bytes > budget]
    assert all(other.why.startswith("exceeds the memory of each device by ") for other in too_much)


def test_step_that_never_fits_states_the_excess() -> None:
    model, target = cached_transformer(4096, 2, 64), hardware("8xA100-80GB")
    memories = [
        plan(model, target, Planning(fixed={**layout.axes, "zero": layout.zero})).memory
        for layout in layouts(model, target, Planning())
    ]
    least = min(memory.total - memory.margin for memory in memories)
    budget = target.topology.chip.memory_bytes // 25 + 10**9
    with pytest.raises(PlanError) as error:
        plan(model, target, Planning(budget=budget))
    head, *changes = str(error.value).splitlines()
    found = re.search(r"\(([\d,]+) bytes\) more than", head)
    assert found
    excess = least + MARGIN * budget - budget
    assert int(found[1].replace(",", "")) == pytest.approx(excess, rel=0.05)
    assert changes.pop().startswith("(no stages: there is no scan over layers")
    assert len(changes) == 3
    assert re.fullmatch(r"  - about \d+ times as many devices", changes[0])


def test_edited_plan_is_accepted() -> None:
    model, target = model_of_program("MLP"), hardware("8xA100")
    first = plan(model, target, Planning(fixed={DATA: 2, MODEL: 4, "zero": 0}))
    tensors = tuple(
        msgspec.structs.replace(tensor, spec=((DATA,), (MODEL,)))
        if tensor.shape == (128, 64)
        else tensor
        for tensor in first.tensors
    )
    accepted = plan(model, target, Planning(given=msgspec.structs.replace(first, tensors=tensors)))
    assert [tensor.spec for tensor in accepted.tensors] == [tensor.spec for tensor in tensors]
    assert accepted.memory.arguments == sum(map(device_bytes, accepted.tensors))


def device_bytes(tensor: PlannedTensor) -> int:
    """Return the bytes of a tensor on each of 2 x 4 devices."""
    parts = math.prod({DATA: 2, MODEL: 4}[axis] for axes in tensor.spec for axis in axes)
    return 4 * math.prod(tensor.shape) // parts


def test_every_fault_of_given_plan_is_listed() -> None:
    first = plan(
        model_of_program("MLP"), hardware("8xA100"), Planning(fixed={DATA: 2, MODEL: 4, "zero": 0})
    )
    kinds = {tensor.path: tensor for tensor in first.tensors if tensor.role == "parameter"}
    (w1,) = [tensor for path, tensor in kinds.items() if "['w1']" in path]
    replace = msgspec.structs.replace
    tensors = (
        replace(w1, path="gone"),
        replace(w1, spec=((),)),
        replace(w1, spec=(("pipe",), ())),
        replace(w1, spec=((DATA,), (DATA,))),
        *(replace(t, spec=((MODEL, DATA),)) for t in kinds.values() if t.shape == (16,)),
    )
    message = refusal(Planning(given=replace(first, axes={DATA: 3, MODEL: 4}, tensors=tensors)))
    for fault in (
        "data 3 x model 4 is 12 devices, and there are 8",
        "the step has no gone",
        "has 2 dimensions, and its spec has 1",
        "is sharded over pipe: the axes are data, model",
        "is sharded twice over data",
        "dimension 0 is 16, which 12 devices cannot share evenly",
    ):
        assert fault in message
    unknown_axes = refusal(Planning(given=replace(first, axes={"rows": 8})))
    assert "its axes are rows: use data and model" in unknown_axes


def test_given_plan_that_does_not_fit_is_refused() -> None:
    first = plan(model_of_program("MLP"), hardware("8xA100"), Planning())
    assert "the step does not fit" in refusal(Planning(given=first, budget=1000))


def test_fast_and_slow_links_get_different_plans() -> None:
    """Tensor parallelism pays on NVLink, but not over 10 Gb/s."""
    fast, slow = (
        plan(cached_transformer(8192, 2, 32), hardware(on), Planning()) for on in (FAST, SLOW)
    )
    assert 1 < fast.axes[MODEL] <= 8
    assert slow.axes[MODEL] == 1


@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.parametrize("on", [SLOW, FAST, "2 hosts x 2 A100-80GB, 10 Gbps", "2 x v5p:2x2x2"])
def test_products_are_not_sharded_over_slow_links(on: str, rows: int) -> None:
    model, target = cached_transformer(8192, 2, rows), hardware(on)
    inside = math.prod(lv.size for lv in target.topology.levels if lv.alone_bytes_per_s is None)
    assert plan(model, target, Planning()).axes[MODEL] <= inside


def test_products_are_sharded_over_slow_links_if_necessary() -> None:
    """The vocabulary is too large to be gathered, even for a moment."""
    model = cached_transformer(1024, 1, 4, length=64, vocabulary=2**20)
    target = hardware("4 hosts x 1 A100-80GB, 10 Gbps")
    memories = [
        plan(model, target, Planning(fixed={MODEL: 1, "zero": zero})).memory for zero in (0, 1, 3)
    ]
    whole = int(min(m.total - m.margin for m in memories) / (1 - MARGIN))
    assert plan(model, target, Planning(budget=whole + 10)).axes[MODEL] == 1
    assert plan(model, target, Planning(budget=whole - 10)).axes[MODEL] > 1


def test_tables_may_be_sharded_over_slow_links() -> None:
    """Each looked-up row is sent once; the rows are few compared with the table."""
    found = plan(table(TABLE // 100), hardware("4 hosts x 1 A100, 10 Gbps"), Planning())
    assert found.axes[MODEL] == 4


HOSTS_OVER_25_GBPS = "4 hosts x 8 A100-80GB, 25 Gbps"


@pytest.mark.parametrize("on", [HOSTS_OVER_25_GBPS, "4 x v5e:2x4"])
def test_parameters_are_not_gathered_over_slow_links(on: str) -> None:
    """Each host or slice has a copy of all arrays. Shares of gradients cross the slow links."""
    model, target = cached_transformer(4096, 2, 64), hardware(on)
    found = plan(model, target, Planning(fixed={"zero": 3, REPLICATE: 4, MODEL: 1}))
    assert list(found.axes) == [REPLICATE, DATA, MODEL]
    for tensor in found.tensors:
        used = {axis for axes in tensor.spec for axis in axes}
        assert used <= ({REPLICATE, DATA} if tensor.role == "batch" else {DATA})
    levels = {traffic.axis: traffic.level for traffic in found.time.traffic}
    slow, fast = target.topology.levels[-1].name, {lv.name for lv in target.topology.levels[:-1]}
    assert levels[REPLICATE] == slow
    assert levels[DATA] in fast


def test_copies_are_chosen_over_slow_links() -> None:
    model, target = cached_transformer(4096, 2, 64), hardware(HOSTS_OVER_25_GBPS)
    found = plan(model, target, Planning())
    assert found.title == "replicate 4 x data 8, ZeRO-3"
    flat = plan(model, target, Planning(fixed={"zero": 3, REPLICATE: 1, MODEL: 1}))
    assert flat.time.step > 1.3 * found.time.step
    assert flat.memory.arguments < found.memory.arguments


def test_equal_links_need_no_copies() -> None:
    found = layouts(cached_transformer(4096, 2, 64), hardware("8xA100"), Planning())
    assert {layout.replicate for layout in found} == {1}


@pytest.mark.parametrize(
    ("fixed", "reason"),
    [
        ({REPLICATE: 2, "zero": 0}, "replicate is 2, and ZeRO shards nothing over data"),
        ({REPLICATE: 8, DATA: 1}, "replicate is 8, and ZeRO shards nothing over data"),
        ({REPLICATE: 2, STAGE: 2}, "replicate is 2: it is not possible with stages"),
        ({REPLICATE: 8}, "replicate is 8, and ZeRO shards nothing over data"),
        ({REPLICATE: 4, MODEL: 2}, "replicate is 4, and ZeRO shards nothing over data"),
        ({REPLICATE: 3}, "replicate 3 does not divide 8 devices"),
        ({REPLICATE: 16}, "replicate 16 does not divide 8 devices"),
        ({REPLICATE: 2, DATA: 8}, "replicate 2 x data 8 does not divide 8 devices"),
        ({REPLICATE: 2, DATA: 2, MODEL: 1}, "the product of the axes must be 8"),
    ],
)
def test_impossible_copies_are_refused(fixed: dict[str, int], reason: str) -> None:
    message = refusal(Planning(fixed=fixed))
    assert reason in message
    assert ("the product of the axes" in message) == ("the product of the axes" in reason)


@pytest.mark.parametrize(
    ("fixed", "hosts", "rows", "reason"),
    [
        ({}, 1, 18, "a batch of 18 does not divide into replicate 2 x data 2: use 16 or 20 rows"),
        ({MODEL: 1}, 2, 12, "a batch of 12 does not divide into replicate 2 x data 4: use 8 or 16"),
        ({"micro": 2}, 1, 6, "into replicate 2 x data 2 x micro 2: use 8 rows"),
        ({}, 3, 7, "a batch of 7 does not divide into replicate 2: use 6 or 8 rows"),
    ],
)
def test_rows_that_copies_cannot_share(
    fixed: dict[str, int], hosts: int, rows: int, reason: str
) -> None:
    planning = Planning(fixed={REPLICATE: 2, "zero": 3, **fixed})
    with pytest.raises(PlanError, match=reason):
        plan(plans.stacked(rows=rows), hardware(f"{hosts} hosts x 4 A100"), planning)


def test_grouped_convolutions_have_no_copies() -> None:
    message = refusal(Planning(fixed={REPLICATE: 2}), "depthwise CNN")
    assert "replicate is 2: " in message
    assert "convolution" in message
    found = layouts(model_of_program("depthwise CNN"), hardware("2 hosts x 4 A100"), Planning())
    assert {layout.replicate for layout in found} == {1}


def test_batch_rows_limit_the_data_axis() -> None:
    found = layouts(model_of_program("MLP"), hardware("32xA100"), Planning())
    assert max(layout.data for layout in found) == BATCH


def test_microbatches_must_divide_the_batch() -> None:
    model, target = model_of_program("MLP"), hardware("8xA100")
    with pytest.raises(PlanError, match="does not divide into micro 3: use 15 or 18 rows"):
        plan(model, target, Planning(fixed={"micro": 3}))
    given = msgspec.structs.replace(plan(model, target, Planning()), micro=0)
    with pytest.raises(PlanError, match="micro is 0: use 1 or more"):
        plan(model, target, Planning(given=given))


LAYERS = 8


def stage_refusal(planning: Planning, model: Any = None, on: str = TWO_HOSTS) -> str:
    with pytest.raises(PlanError) as refused:
        plan(model or plans.stacked(), hardware(on), planning)
    return str(refused.value)


def test_model_without_layers_has_no_stages() -> None:
    model = model_of_program("MLP")
    assert all(layout.stage == 1 for layout in layouts(model, hardware(TWO_HOSTS), Planning()))
    assert "no stages" in stage_refusal(fixed(stage=2), model)


def refusing_stages(reason: str, *remats: Remat) -> Steps:
    """Return a step whose rewriter refuses stages: always, or only for some remat modes."""

    def layers(remat: Remat) -> tuple[int, ...]:
        if not remats or remat in remats:
            raise PlanError(reason)
        return (LAYERS,)

    return Steps(plans.stacked(), lambda *_: plans.stacked(), layers)


def test_reason_against_stages_is_stated() -> None:
    steps = refusing_stages("a layer mixes rows: sort")
    found = plan(steps, hardware(TWO_HOSTS), Planning())
    assert "no stages: a layer mixes rows (docs/planner.md, Pipelines)" in found.notes
    on_cpus = plan(steps, engines(4, 2), Planning()).notes
    assert not any("no stages" in note for note in on_cpus)
    assert "(stage=2): no stages: a layer mixes rows: sort" in stage_refusal(fixed(stage=2), steps)
    assert not any(
        "no stages" in note for note in plan(plans.stacked(), hardware(TWO_HOSTS), Planning()).notes
    )


def test_stages_use_remat_modes_that_are_possible() -> None:
    steps = refusing_stages("it draws in a loop", "full")
    with pytest.raises(PlanError, match="no stages: it draws in a loop"):
        plan(steps, hardware(TWO_HOSTS), Planning(fixed={STAGE: 2}, remat="full"))
    assert plan(steps, hardware(TWO_HOSTS), Planning(fixed={STAGE: 2}, remat="selective")).remat


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"stage": 3}, "stage 3 does not divide 8 devices"),
        ({"stage": 4, "micro": 1}, "micro is 1: stages need 2 microbatches"),
        ({"stage": 4, "zero": 3}, "zero is 3: with stages, ZeRO is 0 or 1"),
        ({"stage": 16}, "divided into 16 stages: use 2 to 8; stage 16 does not divide 8 devices"),
        ({"stage": 4, "data": 4}, "stage 4 x data 4 does not divide 8 devices"),
        ({"stage": 4, "micro": 3}, "micro 3 does not divide the batch of 64"),
    ],
)
def test_impossible_stages_are_refused(sizes: dict[str, int], reason: str) -> None:
    message = stage_refusal(Planning(fixed=sizes))
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
    found = plan(plans.stacked(), hardware(TWO_HOSTS), fixed(data=8))
    assert found.axes == {DATA: 8, MODEL: 1}
    assert found.time.bubble == 0


def test_stages_replace_tensor_parallelism_over_slow_links() -> None:
    model = plans.stacked(LAYERS, 8192, 512)
    target = hardware("8 hosts x 1 A100, 25 Gbps")
    found = plan(model, target, Planning(budget=20 * 2**30))
    assert found.axes[STAGE] > 1
    assert found.axes[MODEL] == 1
    split = plan(model, target, Planning(budget=20 * 2**30, fixed={STAGE: 1, DATA: 1}))
    assert split.time.step > found.time.step


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


def test_every_fault_of_plan_with_stages_is_listed() -> None:
    own = plans.piped(stage=2, data=4, micro=4)
    edited = msgspec.structs.replace(own, axes={STAGE: 8, DATA: 3, MODEL: 1}, micro=1, zero=3)
    message = stage_refusal(Planning(given=edited), plans.stacked(4))
    assert "stage 8 x data 3 x model 1 is 24 devices, and there are 8" in message
    assert "a batch of 64 cannot be divided into 3" in message
    assert "the layers cannot be divided into 8 stages: use 2 to 4" in message
    assert "micro is 1: stages need 2 microbatches or more" in message
    assert "zero is 3: with stages, ZeRO is 0 or 1" in message
    edited = msgspec.structs.replace(own, zero=3)
    mixing = stage_refusal(Planning(given=edited), refusing_stages("a layer mixes rows"))
    assert "no stages: a layer mixes rows" in mixing
    assert "zero is 3" in mixing
    assert "no stages" in stage_refusal(Planning(given=own), model_of_program("MLP"))


def test_empty_batch_is_refused() -> None:
    with pytest.raises(PlanError, match="the batch is empty: use data with at least one row"):
        plan(regression(0), hardware("8xA100"), Planning())
