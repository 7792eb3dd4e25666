"""The vocabulary of all records, and their base."""

from __future__ import annotations

from typing import Literal

import msgspec

Framework = Literal["tensorflow", "jax"]
StrategyName = Literal["mirrored", "pjrt"]
STRATEGY_OF: dict[Framework, StrategyName] = {"tensorflow": "mirrored", "jax": "pjrt"}
StreamName = Literal["stdout", "stderr"]
Precision = Literal["bfloat16", "float16"]
Communication = Literal["auto", "ring", "nccl"]
Launcher = Literal["slurm", "pbs", "sge", "lsf", "htcondor", "mpi", "kubernetes"]
OnNan = Literal["stop", "warn"]
RunViewName = Literal["auto", "lab", "widget", "text"]
NoteTopic = Literal["batch", "checkpoint", "compiled", "nan", "starved", "strategy"]
MimeBundle = dict[str, object]

RANK_VARIABLE = "NBDIST_RANK"
"""The environment variable that tells an engine its rank."""

BATCH_NAME = "batch"
"""What a step cell calls the element it is given."""

MASK_NAME = "mask"
"""What a step cell calls the positions of the batch that are not padding."""


MOST_SEED = 2**32 - 1
"""The largest seed that NumPy accepts."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A plain frozen record; never sent over the stream by itself."""
