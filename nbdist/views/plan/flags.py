"""Options of other trainers that have the layout of a plan.

Sources: `megatron/training/arguments.py` of Megatron-LM (core 0.14), and `configs/base.yml` and
`configs/types.py` of MaxText, read in 2026-11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.records import DATA, MODEL, REPLICATE, STAGE

if TYPE_CHECKING:
    from nbdist.records import Plan

_FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
_RECOMPUTE = {
    "": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
_POLICIES = {"": "minimal_with_context", "selective": "minimal", "full": "full"}
"""Closest policies of MaxText, which has none without any recomputation."""


def flags(plan: Plan) -> dict[str, str]:
    """Return options for Megatron-LM and MaxText, by the name of the trainer.

    Empty if a device alone runs the plan, or its rows cannot be divided. MaxText shards the state
    over all replicas with ZeRO-1, so that it cannot keep copies of it.
    """
    if plan.devices == 1 or plan.rows % (plan.replicas * plan.micro):
        return {}
    has_copied_state = plan.zero == 1 and plan.axes.get(REPLICATE, 1) > 1
    found = {"Megatron-LM": _megatron(plan)}
    return found if has_copied_state else found | {"MaxText": _maxtext(plan)}


def _megatron(plan: Plan) -> str:
    stages, copies = plan.axes.get(STAGE, 1), plan.axes.get(REPLICATE, 1)
    words = [
        f"--tensor-model-parallel-size {plan.axes.get(MODEL, 1)}",
        f"--pipeline-model-parallel-size {stages}",
        f"--num-virtual-stages-per-pipeline-rank {plan.rounds}" if plan.rounds > 1 else "",
        f"--micro-batch-size {plan.rows // (plan.replicas * plan.micro)}",
        f"--global-batch-size {plan.rows}",
        {0: "", 1: "--use-distributed-optimizer", 3: _FSDP}[plan.zero],
        f"--num-distributed-optimizer-instances {copies}" if copies > 1 else "",
        "--sequence-parallel" if plan.sequence else "",
        _RECOMPUTE[plan.remat],
    ]
    return " ".join(filter(None, words))


def _maxtext(plan: Plan) -> str:
    stages, tensor = plan.axes.get(STAGE, 1), plan.axes.get(MODEL, 1)
    is_fsdp, copies = plan.zero == 3, plan.axes.get(REPLICATE, 1)
    words = [
        f"ici_data_parallelism={copies if is_fsdp else plan.replicas}",
        f"ici_fsdp_parallelism={plan.axes[DATA] if is_fsdp else 1}",
        f"ici_tensor_parallelism={tensor}",
        f"ici_pipeline_parallelism={stages}" if stages > 1 else "",
        f"num_pipeline_microbatches={plan.micro}" if stages > 1 else "",
        f"num_pipeline_repeats={plan.rounds}" if plan.rounds > 1 else "",
        f"gradient_accumulation_steps={plan.micro}" if plan.micro > 1 and stages == 1 else "",
        f"per_device_batch_size={_number(plan, stages)}",
        "shard_optimizer_over_data=true" if plan.zero == 1 else "",
        f"remat_policy={_POLICIES[plan.remat]}",
    ]
    return " ".join(filter(None, words))


def _number(plan: Plan, stages: int) -> str:
    """Return MaxText's batch of a device, which it multiplies by devices and accumulated steps."""
    steps = plan.micro if stages == 1 else 1
    return f"{plan.rows / plan.devices / steps:g}"
