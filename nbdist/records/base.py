"""Types and constants that all records share, and their base class."""

from __future__ import annotations

from typing import Literal

import msgspec

from nbdist.errors import RowKeyError

Framework = Literal["tensorflow", "jax"]
StrategyName = Literal["mirrored", "pjrt"]
STRATEGY_OF: dict[Framework, StrategyName] = {"tensorflow": "mirrored", "jax": "pjrt"}
StreamName = Literal["stdout", "stderr"]
Precision = Literal["bfloat16", "float16"]
Communication = Literal["auto", "ring", "nccl"]
Launcher = Literal["slurm", "pbs", "sge", "lsf", "htcondor", "mpi", "kubernetes"]
OnNan = Literal["stop", "warn"]
SampleOrder = Literal["auto", "exact", "source"]
RunViewName = Literal["auto", "lab", "widget", "text"]
NoteTopic = Literal[
    "batch", "checkpoint", "compiled", "media", "nan", "starved", "strategy", "watch"
]
MimeBundle = dict[str, object]

RANK_VARIABLE = "NBDIST_RANK"
"""Environment variable that contains the rank of an engine."""

JOB_VARIABLE = "NBDIST_JOB"
"""Environment variable that contains the id of the submitted job whose program runs."""

JOB_FOLDER_VARIABLE = "NBDIST_JOB_FOLDER"
"""Environment variable with the folder of the submitted job that runs this program."""

BATCH_NAME = "batch"
"""Name of the batch in a step cell."""

MASK_NAME = "mask"
"""Name of the padding mask in a step cell."""


MOST_SEED = 2**32 - 1
"""Largest seed that NumPy accepts."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen record. Messages contain records; a record is not a message."""


class ResultRow(Record, frozen=True):
    """A record that users receive as a row: `dict(row)` contains its fields."""

    def keys(self) -> tuple[str, ...]:
        return self.__struct_fields__

    def __getitem__(self, name: str) -> object:
        """Return the value of a field.

        Raises:
            RowKeyError: The row has no such field; its fields are listed.
        """
        if name not in self.__struct_fields__:
            fields = ", ".join(self.__struct_fields__)
            raise RowKeyError(f"{name!r} is no field: fields are {fields}")
        value: object = getattr(self, name)
        return value
