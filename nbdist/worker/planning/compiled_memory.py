"""What XLA says of the memory that a compiled step takes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from nbdist.worker.training.step_contract import Footprint

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax


class Taken(NamedTuple):
    """Bytes on one device.

    Attributes:
        arguments: of what the step is given.
        temporaries: of what it makes on its way.
        total: of all, code too; what is given back takes the place of what was given.
    """

    arguments: int
    temporaries: int
    total: int


def compiled(
    lower: Callable[[], jax.stages.Lowered], platform: str
) -> tuple[jax.stages.Compiled, Footprint]:
    """Trace and compile a step, and measure that.

    Args:
        lower: traces it.
        platform: of the devices.
    """
    began = time.perf_counter()
    made = lower().compile()
    seconds = time.perf_counter() - began
    found = taken(made, platform)
    return made, Footprint(found.arguments, found.temporaries, seconds)


def taken(made: jax.stages.Compiled, platform: str) -> Taken:
    """What a compiled step takes; nothing where its backend does not tell.

    A TPU's compiler counts more temporaries than it has places for in the device's memory: it lets
    programs through that would have 19 GiB of 15.75. What it refuses them by is the peak, which
    other backends leave out or have the same (docs/facts.md), and older ones do not tell.

    Args:
        made: the step.
        platform: of the devices that it was compiled for.
    """
    told: Any = made.memory_analysis()
    if told is None:
        return Taken(0, 0, 0)
    lasting = told.argument_size_in_bytes + told.output_size_in_bytes - told.alias_size_in_bytes
    temporaries = told.temp_size_in_bytes
    if platform == "tpu" and told.peak_memory_in_bytes > lasting:
        temporaries = told.peak_memory_in_bytes - lasting
    total = lasting + temporaries + told.generated_code_size_in_bytes
    return Taken(told.argument_size_in_bytes, temporaries, total)
