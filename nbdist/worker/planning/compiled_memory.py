"""Memory of a compiled step, as XLA reports it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from nbdist.worker.training.step_contract import Footprint

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax


class StepMemory(NamedTuple):
    """Memory of a step on one device, in bytes.

    Attributes:
        arguments: Bytes of the arguments.
        temporaries: Bytes of the temporary buffers.
        total: Bytes of all buffers and of the code; outputs that reuse arguments count once.
    """

    arguments: int
    temporaries: int
    total: int


def compiled(
    lower: Callable[[], jax.stages.Lowered], platform: str
) -> tuple[jax.stages.Compiled, Footprint]:
    """Trace and compile a step, and measure its memory and the time.

    Args:
        lower: Traces the step.
        platform: Platform of the devices.
    """
    began = time.perf_counter()
    made = lower().compile()
    seconds = time.perf_counter() - began
    found = memory_of(made, platform)
    return made, Footprint(found.arguments, found.temporaries, seconds)


def memory_of(made: jax.stages.Compiled, platform: str) -> StepMemory:
    """Return the memory of a compiled step; zeros if the backend does not report it.

    A TPU's compiler counts more temporaries than are in memory at once. It accepts programs with 19
    GiB of them on a device with 15.75 GiB. It checks the peak instead. Other backends omit the peak
    or report the same value (docs/facts.md), and older ones do not support it.

    Args:
        made: Compiled step.
        platform: Platform that the step was compiled for.
    """
    analysis: Any = made.memory_analysis()
    if analysis is None:
        return StepMemory(0, 0, 0)
    lasting = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    temporaries = analysis.temp_size_in_bytes
    if platform == "tpu" and analysis.peak_memory_in_bytes > lasting:
        temporaries = analysis.peak_memory_in_bytes - lasting
    total = lasting + temporaries + analysis.generated_code_size_in_bytes
    return StepMemory(analysis.argument_size_in_bytes, temporaries, total)
