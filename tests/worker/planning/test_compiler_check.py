"""Plans checked by the hardware's compiler. The CPU compiler is always available."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest

from nbdist.errors import PlanError
from nbdist.planner.hardware.compiler_targets import is_compiler_installed
from nbdist.records import Collective, Plan, Planning
from nbdist.worker.planning import compiler_check
from nbdist.worker.planning.compile_job import collectives_in
from nbdist.worker.planning.plan_step import named_target, plan_of
from nbdist.worker.planning.query import PlanQuery
from tests import plans
from tests.oracles import there

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Role
    from nbdist.records import Remat

pytestmark = pytest.mark.processes

LAYERS = 3


def verified_plan(on: str, *, wide: int = 64, rows: int = 32, **options: Any) -> Plan:
    layer = {
        "up": plans.shape(wide, 4 * wide),
        "down": plans.shape(4 * wide, wide),
        "b": plans.shape(4 * wide),
    }
    params = {"layers": [layer] * LAYERS, plans.HOSTILE[2:-2]: plans.shape(wide, wide)}
    batch = plans.shape(rows, wide)
    carried = jax.tree_util.tree_leaves_with_path((params, params))
    inputs: list[tuple[str, Role]] = [
        *((jax.tree_util.keystr(path), "carried") for path, _ in carried),
        ("x", "batch"),
        ("y", "batch"),
    ]
    traced = jax.jit(plans.step).trace(params, params, batch, batch).jaxpr
    target = named_target(on)
    planning = Planning(verify=True, **options)
    return plan_of(PlanQuery(traced, inputs, target, planning))


@pytest.mark.parametrize(
    "fixed",
    [
        pytest.param({"data": 8, "zero": 0}, marks=pytest.mark.full),
        pytest.param({"data": 8, "zero": 3}, marks=pytest.mark.full),
        {"data": 4, "model": 2, "zero": 1},
    ],
    ids=str,
)
def test_arguments_are_exact_and_collectives_are_counted(fixed: dict[str, int]) -> None:
    plan = verified_plan("8xCPU", fixed=fixed)
    found = plan.verified
    assert found is not None
    assert found.arguments == plan.memory.arguments
    assert found.total >= found.arguments + found.temporaries
    assert {one.kind for one in found.collectives} >= {"all-reduce"}
    assert all(one.count and one.bytes for one in found.collectives)


def test_plan_that_does_not_fit_when_compiled_is_refused() -> None:
    """The plan compiled for CPUs needs more memory than predicted."""
    fixed = {"data": 8, "zero": 0}
    expected = verified_plan("8xCPU", fixed=fixed)
    assert expected.verified is not None
    budget = (expected.memory.total - expected.memory.margin + expected.verified.total) // 2
    with pytest.raises(
        PlanError, match=r"none of the best plans fits .*: data 8: compiled, it needs"
    ):
        verified_plan("8xCPU", fixed=fixed, given=expected, budget=budget)


@pytest.mark.full  # rare
def test_next_best_plan_is_compiled_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The TPU compiler reports exhausted memory and compiles nothing."""
    compile_, jobs, job_ = compiler_check._compile, [], compiler_check._job
    refused = compiler_check.Outcome(error="JaxRuntimeError: RESOURCE_EXHAUSTED: 19.4G of 15.7G")

    def job(*given: Any) -> Any:
        jobs.append(job_(*given))
        return jobs[-1]

    monkeypatch.setattr(compiler_check, "_job", job)
    monkeypatch.setattr(
        compiler_check, "_compile", lambda job: refused if job is jobs[0] else compile_(job)
    )
    plan = verified_plan("8xCPU")
    assert plan.verified is not None
    first = plan.runners_up[0]
    assert first.why == "the compiler rejects it: 19.4G of 15.7G"
    assert first.title != plan.title


def test_best_three_plans_are_compiled() -> None:
    plan = verified_plan("8xCPU")
    assert plan.verified is not None
    compiled = [one for one in plan.runners_up if one.compiled_bytes]
    assert len(compiled) == compiler_check.MOST - 1
    assert all(one.compiled_bytes > plan.verified.arguments / 8 for one in compiled)


@pytest.mark.full  # the next test compiles with remat
@pytest.mark.parametrize("how", ["selective", "full"])
def test_remat_is_compiled(how: Remat) -> None:
    plan = verified_plan("8xCPU", fixed={"data": 8, "zero": 0}, remat=how)
    assert plan.verified is not None
    assert plan.title == f"data 8, {how} remat"
    assert plan.verified.arguments == plan.memory.arguments


@pytest.mark.parametrize(
    ("remat", "rounds"),
    [("full", 1), *(pytest.param(*own, marks=pytest.mark.full) for own in (("", 1), ("full", 2)))],
)
def test_stages_are_compiled(remat: Remat, rounds: int) -> None:
    """Stages send activations to the next stage, and layers if a stage has several blocks."""
    target = named_target("8xCPU")
    fixed = {"stage": 4, "data": 2, "micro": 8, "rounds": rounds}
    planning = Planning(verify=True, fixed=fixed, remat=remat)
    plan = plan_of(PlanQuery(*plans.stacked_traced(), target, planning))
    found = plan.verified
    assert found is not None
    assert found.arguments == plan.memory.arguments
    if rounds == 1:
        own = plan.memory.gradients + plan.memory.activations
        assert 0.5 * found.temporaries < own < 1.5 * found.temporaries
    expected = plan.memory.total - plan.memory.margin
    assert 0.6 * found.total < expected < 1.4 * found.total
    sent = {one.kind: one.bytes for one in found.collectives}
    layers = sum(t.device_bytes for t in plan.tensors if t.path.startswith("params['layers']"))
    moved_bytes = 2 * layers * (rounds > 1)
    assert moved_bytes <= sent["collective-permute"] < moved_bytes + layers
    assert sent.get("all-gather", 0) < layers / 4


def test_slow_compiler_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_check, "_COMPILE_S", 0.05)
    with pytest.raises(
        PlanError, match=r"data 8.* cannot be compiled: the compiler did not finish within 0.05 s"
    ):
        verified_plan("8xCPU", fixed={"data": 8, "zero": 0})


def test_crash_of_the_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiler_check._ENVIRONMENT, "JAX_PLATFORMS", "no_such_platform")
    with pytest.raises(PlanError, match=r"cannot be compiled: RuntimeError: .*no_such_platform"):
        verified_plan("8xCPU", fixed={"data": 8, "zero": 0})


@pytest.mark.skipif(
    is_compiler_installed("tpu") and is_compiler_installed("cuda"),
    reason="all compilers are installed",
)
def test_missing_compiler_is_named() -> None:
    missing = {"tpu": "v5e:2x2", "cuda": "8xH100"}
    on = next(on for name, on in missing.items() if not is_compiler_installed(name))
    with pytest.raises(PlanError, match=r"is not installed .*pip install 'nbdist\[oracle\]'"):
        verified_plan(on)


@pytest.mark.parametrize(
    "on",
    [
        pytest.param("v5e:4x4", marks=there("tpu")),
        pytest.param("v5p:4x4x4", marks=(there("tpu"), pytest.mark.full)),
        pytest.param("2 x v5e:4x4", marks=(there("tpu"), pytest.mark.full)),
        pytest.param("16xH100", marks=there("cuda")),
        pytest.param("8xA100-40GB", marks=(there("cuda"), pytest.mark.full)),
        pytest.param("72xGB200", marks=(there("cuda"), pytest.mark.full)),
    ],
)
def test_plans_compile_for_absent_hardware(on: str) -> None:
    plan = verified_plan(on, wide=1024, rows=4608)
    found = plan.verified
    assert found is not None
    assert found.arguments == pytest.approx(plan.memory.arguments, rel=0.02)  # TPUs pad to tiles


@pytest.mark.parametrize(
    "on",
    [
        pytest.param("2 hosts x 8 H100", marks=there("cuda")),
        pytest.param("2 x v5e:2x4", marks=there("tpu")),
    ],
)
def test_copies_send_what_their_plan_states(on: str) -> None:
    """On TPUs, the text contains only the all-reduces within a slice. Others are host transfers."""
    fixed = {"zero": 3, "data": 8, "replicate": 2}
    plan = verified_plan(on, wide=1024, rows=4608, fixed=fixed)
    found = plan.verified
    assert found is not None
    assert found.arguments == pytest.approx(plan.memory.arguments, rel=0.02)
    sent = {one.kind: one.bytes for one in found.collectives}
    planned = {traffic.axis: traffic.bytes for traffic in plan.time.traffic}
    if "H100" in on:
        assert sent["all-reduce"] == pytest.approx(planned["replicate"], rel=0.01)
        assert sent["reduce-scatter"] == pytest.approx(planned["replicate"], rel=0.01)
    else:
        assert sent["all-reduce"] == pytest.approx(8 * planned["replicate"], rel=0.01)


@there("tpu")
def test_plan_accepted_by_tpu_compiler_fits_in_memory() -> None:
    """XLA counts 19 GiB of temporaries here, but allocates 14.9 GiB in all."""
    layers, wide, rows, vocabulary = 4, 2048, 2**18, 8192

    def loss(params: Any, x: Any, y: Any) -> Any:
        def layer(x: Any, own: Any) -> tuple[Any, None]:
            return x + jnp.maximum(x @ own, 0), None

        x, _ = jax.lax.scan(layer, x, params["layers"])
        scores = jax.nn.log_softmax((x @ params["head"]).astype(jnp.float32))
        return -jnp.take_along_axis(scores, y[:, None], -1).mean()

    def step(params: Any, x: Any, y: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(params, x, y)
        return value, jax.tree.map(lambda p, g: p - g, params, slopes)

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    params = {"head": shape(wide, vocabulary), "layers": shape(layers, wide, wide)}
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
    traced = jax.jit(step).trace(params, shape(rows, wide), labels).jaxpr
    inputs: list[tuple[str, Role]] = [("head", "carried"), ("layers", "carried")]
    inputs += [("x", "batch"), ("y", "batch")]
    target = named_target("v5e:1x1")
    planning = Planning(verify=True, budget=2**38, fixed={"data": 1, "micro": 1})
    found = plan_of(PlanQuery(traced, inputs, target, planning)).verified
    assert found is not None
    assert found.temporaries > 2 * 2 * layers * rows * wide  # activations that layers store
    assert found.total < 15.75 * 2**30


@there("tpu")
def test_plan_too_large_for_tpu_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"none of the best plans fits .*: .*the compiler rejects it"
    ):
        verified_plan("v5e:1x1", wide=8192, rows=2**17, budget=2**38)


def test_collectives_are_parsed_from_a_program() -> None:
    program = """
  %all-reduce.7 = (bf16[64,8]{1,0:T(8,128)(2,1)S(1)}, f32[]) all-reduce(%a, %b), channel_id=4
  %ar = f32[128,2]{1,0} all-reduce-start(%c), replica_groups={{0,1}}
  %ar.done = f32[128,2]{1,0} all-reduce-done(%ar)
  ROOT %ag = (f32[4]{0}, f32[8]{0}) all-gather-start(%d), dimensions={0}
"""
    assert collectives_in(program) == (
        Collective(kind="all-gather", count=1, bytes=32),
        Collective(kind="all-reduce", count=2, bytes=64 * 8 * 2 + 4 + 128 * 2 * 4),
    )
    assert collectives_in(None) == ()
