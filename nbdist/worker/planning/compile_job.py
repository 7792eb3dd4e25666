"""Process that compiles one step for hardware that need not be present.

Reads a `Job` from standard input and writes an `Outcome` to a file. It is separate from the workers
for three reasons. A compiler for other hardware takes hundreds of megabytes and may abort its
process. It also must not be visible to the JAX that trains.
"""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.experimental import topologies

from nbdist.planner.hardware.compiler_targets import CompilerTarget
from nbdist.records import Collective, Spec, Verified
from nbdist.records.base import Record
from nbdist.worker.planning.compiled_memory import memory_of

REFUSED = "RESOURCE_EXHAUSTED"
_CALL = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"ragged-all-to-all)(-start)?\("
)
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


class Job(Record, frozen=True):
    """Compilation job.

    Attributes:
        target: Compiler and hardware to compile for.
        program: The step, serialized by `jax.export`.
        axes: Sizes of the mesh axes, outermost first.
        inputs: Spec of each input array.
        outputs: Spec of each output array.
        carried: Number of leading inputs whose buffers are reused for outputs.
    """

    target: CompilerTarget
    program: bytes
    axes: dict[str, int]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    carried: int


class Outcome(Record, frozen=True):
    """Result of a compilation.

    Attributes:
        verified: Result of the compiler; None if the compilation failed.
        error: Reason of the failure.
    """

    verified: Verified | None = None
    error: str = ""


def partition(axes: Spec) -> jax.P:
    """Convert a spec to JAX's `PartitionSpec`."""
    return jax.P(*(names or None for names in axes))


def _compiled(job: Job) -> Verified:
    exported = jax.export.deserialize(bytearray(job.program))
    mesh = jax.sharding.Mesh(
        np.array(_devices(job.target)).reshape(tuple(job.axes.values())),
        tuple(job.axes),
        axis_types=(jax.sharding.AxisType.Auto,) * len(job.axes),
    )

    def over(spec: Spec) -> jax.NamedSharding:
        return jax.NamedSharding(mesh, partition(spec))

    kinds, used = exported.in_avals, exported.module_kept_var_idx

    def given(*arrays: Any) -> Any:
        """Call the step; inputs that it does not use are zeros and take no memory."""
        there = dict(zip(used, arrays, strict=True))
        return exported.call(
            *(
                there[i] if i in there else jnp.zeros(kind.shape, kind.dtype)
                for i, kind in enumerate(kinds)
            )
        )

    arguments = [
        jax.ShapeDtypeStruct(kinds[i].shape, kinds[i].dtype, sharding=over(job.inputs[i]))
        for i in used
    ]
    began = time.perf_counter()
    step = jax.jit(
        given,
        donate_argnums=[number for number, i in enumerate(used) if i < job.carried],
        out_shardings=[over(spec) for spec in job.outputs],
    )
    made = step.lower(*arguments).compile()
    seconds = time.perf_counter() - began
    return Verified(
        **memory_of(made, job.target.platform)._asdict(),
        collectives=collectives_in(made.as_text()),
        seconds=seconds,
    )


def _devices(target: CompilerTarget) -> list[Any]:
    if target.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", target.devices)
    own: list[Any] = jax.devices()  # also discovers the plugins
    if target.platform == "cpu":
        return own
    described = topologies.get_topology_desc(
        platform=target.platform, topology_name=target.name, **target.options
    )
    return list(described.devices)


def collectives_in(program: str | None) -> tuple[Collective, ...]:
    """Sum up the collectives in the text of a compiled program, by kind."""
    found: dict[str, list[int]] = defaultdict(list)
    for made, kind, starts in _CALL.findall(program or ""):
        sizes = [_bytes(dtype, shape) for dtype, shape in _ARRAY.findall(made)]
        # The result of an asynchronous start contains its operands, too.
        of_result = sizes[len(sizes) // 2 :] if starts and made.startswith("(") else sizes
        found[kind].append(sum(of_result))
    return tuple(
        Collective(kind=kind, count=len(sizes), bytes=sum(sizes))
        for kind, sizes in sorted(found.items())
    )


def _bytes(dtype: str, shape: str) -> int:
    bits = _BITS.search(dtype)
    width = int(bits[0]) if bits else 8  # pred
    count = int(np.prod([int(size) for size in shape.split(",") if size], dtype=np.int64))
    return -(-count * width // 8)


def main() -> None:
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    try:
        outcome = Outcome(verified=_compiled(job))
    except Exception as error:  # noqa: BLE001 - process boundary: the error is reported to the parent
        outcome = Outcome(error=f"{type(error).__name__}: {error}")
    with open(sys.argv[1], "wb") as file:  # noqa: PTH123 - compilers write to standard output
        file.write(msgspec.msgpack.encode(outcome))


if __name__ == "__main__":
    main()
