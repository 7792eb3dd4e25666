"""Options of other trainers, held against published commands of the same layouts."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from nbdist.views.plan.flags import flags
from tests.plans import by_hand, tensor

PLAN = by_hand(tensor("w", 8, 4, first="model"), tensor("x", 8, 4, role="batch", first="data"))


def of(**changes: Any) -> dict[str, str]:
    return flags(replace(PLAN, **changes))


def test_a_pipeline_of_gpt_3() -> None:
    """175 billion weights on 1,024 A100s: tensor 8, 16 stages, 96 microbatches (Megatron-LM)."""
    found = of(
        axes={"stage": 16, "data": 8, "model": 8},
        rows=1536,
        micro=192,
        schedule="1f1b",
        rounds=3,
        remat="full",
        zero=1,
    )
    assert found["Megatron-LM"] == (
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
        "--num-virtual-stages-per-pipeline-rank 3 --micro-batch-size 1 --global-batch-size 1536 "
        "--use-distributed-optimizer --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"
    )
    assert found["MaxText"] == (
        "ici_data_parallelism=8 ici_fsdp_parallelism=1 ici_tensor_parallelism=8 "
        "ici_pipeline_parallelism=16 num_pipeline_microbatches=192 num_pipeline_repeats=3 "
        "per_device_batch_size=1.5 shard_optimizer_over_data=true remat_policy=full"
    )


def test_fully_sharded_layers_with_accumulation() -> None:
    found = of(axes={"data": 16, "model": 1}, rows=128, micro=4, zero=3, sequence=True)
    assert found["Megatron-LM"].endswith(
        "--micro-batch-size 2 --global-batch-size 128 --use-megatron-fsdp "
        "--data-parallel-sharding-strategy optim_grads_params --sequence-parallel"
    )
    assert found["MaxText"] == (
        "ici_data_parallelism=1 ici_fsdp_parallelism=16 ici_tensor_parallelism=1 "
        "gradient_accumulation_steps=4 per_device_batch_size=2 "
        "remat_policy=minimal_with_context"
    )


def test_copies_of_sharded_layers() -> None:
    found = of(axes={"replicate": 4, "data": 8, "model": 2}, rows=128, zero=3)
    assert found["Megatron-LM"].endswith(
        "--micro-batch-size 4 --global-batch-size 128 --use-megatron-fsdp "
        "--data-parallel-sharding-strategy optim_grads_params "
        "--num-distributed-optimizer-instances 4"
    )
    assert found["MaxText"].startswith(
        "ici_data_parallelism=4 ici_fsdp_parallelism=8 ici_tensor_parallelism=2 "
    )


def test_maxtext_has_no_copies_of_sharded_state() -> None:
    found = of(axes={"replicate": 4, "data": 8, "model": 1}, rows=128, zero=1)
    assert list(found) == ["Megatron-LM"]
    assert found["Megatron-LM"].endswith(
        "--use-distributed-optimizer --num-distributed-optimizer-instances 4"
    )


def test_a_plan_that_they_cannot_run_has_none() -> None:
    assert of(axes={"data": 1}, rows=8) == {}
    assert of(axes={"data": 3}, rows=8) == {}
