"""Which chip a name means, what it computes, and what its links are taken for."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.planner.hardware.catalog import MACHINES, PLAIN_HOST, Host, Machine
from nbdist.records import Chip

if TYPE_CHECKING:
    from collections.abc import Mapping

EXAMPLE = """\
[chip]
name = "MyChip"
platform = "gpu"
memory_bytes = 80e9
bytes_per_s = 2e12        # of its memory
[chip.flops]
float32 = 20e12
bfloat16 = 300e12
[[levels]]
name = "host"
size = 8                  # devices in a host
latency_s = 4e-6
bytes_per_s = 300e9       # each sends, one way
[[levels]]
name = "network"
size = 4                  # hosts
latency_s = 14e-6
bytes_per_s = 25e9
"""
"""A file that describes hardware."""

_NEAR = 0.4  # difflib's ratio: 'H10' is near 'H100', and 'potato' near nothing


def find(kind: str) -> Chip | None:
    """The chip that a `device_kind` of JAX's, or a name of people's, means; None where unknown.

    Case, spacing and punctuation do not matter. Of two sizes of memory the smaller is meant where
    none is said: `A100` is `A100-40GB`.
    """
    machine = machine_named(kind)
    return machine.chip if machine else None


def machine_named(kind: str) -> Machine | None:
    """As `find`, with what the chip is built into."""
    squashed = squash(kind)
    fitting = (machine for machine in MACHINES if re.fullmatch(machine.names, squashed))
    return next(fitting, None)


def squash(name: str) -> str:
    """Small letters and digits only."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def host_of(chip: Chip) -> Host:
    """The chip's usual host; a plain one, whose figures are assumed, where the table has none."""
    machine = machine_named(chip.name)
    return machine.host if machine else PLAIN_HOST


def known() -> tuple[str, ...]:
    """What the chips of the table are called."""
    return tuple(machine.chip.name for machine in MACHINES)


def unknown(name: str) -> str:
    """What to say of a name that means no chip: nearest first, and how to describe one."""
    by_squashed = {squash(chip): chip for chip in known()}
    near = difflib.get_close_matches(squash(name), by_squashed, n=len(by_squashed), cutoff=_NEAR)
    nearest = [by_squashed[match] for match in near]
    others = [chip for chip in known() if chip not in nearest]
    return (
        f"nobody knows the hardware {name!r}: known are {', '.join([*nearest, *others])}. To "
        f"describe another, write a file such as my.toml, and give its path:\n{EXAMPLE}"
    )


def probed(
    kind: str,
    platform: str,
    memory_bytes: int,
    flops: Mapping[str, float],
    bytes_per_s: float,
) -> Chip:
    """A chip that is in no table, of figures that were measured on one.

    Args:
        kind: what JAX calls it.
        platform: the plugin's name.
        memory_bytes: that a program may use.
        flops: reached by large products, by type, in operations a second.
        bytes_per_s: reached in copies within its memory.

    Raises:
        PlanError: a figure that cannot have been measured, each of them.
    """
    figures = {"memory_bytes": memory_bytes, "bytes_per_s": bytes_per_s}
    figures |= {f"flops[{dtype!r}]": rate for dtype, rate in flops.items()}
    wrong = [
        f"{name} is {value}" for name, value in figures.items() if not 0 < value < float("inf")
    ]
    wrong += [] if flops else ["flops is empty"]
    if wrong:
        raise PlanError(f"the probe of {kind!r} measured nothing to plan with: {', '.join(wrong)}")
    return Chip(
        name=kind,
        platform=platform,
        memory_bytes=memory_bytes,
        flops=dict(flops),
        bytes_per_s=bytes_per_s,
        source="probed: reached by microbenchmarks on the device, not its nominal peak",
    )


def peak(chip: Chip, dtype: str) -> float:
    """Operations a second of products of `dtype`, as JAX computes them unless told otherwise.

    `jax.lax.Precision.DEFAULT` computes float32 as tensorfloat32 on GPUs that have it and as
    bfloat16 on TPUs; exact float32 is `chip.flops["float32"]`. A type that the chip does not
    compute in is widened to one that it does.

    Raises:
        PlanError: `dtype` is none that products are planned in, or the chip has no figure for it.
    """
    return chip.flops[computed_as(chip, dtype)]


def computed_as(chip: Chip, dtype: str) -> str:
    """The type that the chip's products of `dtype` are computed in.

    Raises:
        PlanError: as for `peak`.
    """
    for candidate in _computed_as(chip.platform, dtype):
        if candidate in chip.flops:
            return candidate
    raise PlanError(
        f"there is no figure for products of {dtype} on {chip.name}: it has "
        f"{', '.join(sorted(chip.flops))}; cast to one of them"
    )


def _computed_as(platform: str, dtype: str) -> tuple[str, ...]:
    if dtype == "float32":
        return ("bfloat16", "float32") if platform == "tpu" else ("tensorfloat32", "float32")
    if dtype.startswith("float8"):
        return (dtype, "float8", "bfloat16", "float16", "float32")
    if dtype in {"int8", "uint8", "float16"}:
        return (dtype, dtype.removeprefix("u"), "bfloat16", "float32")
    return (dtype, "float32") if dtype == "bfloat16" else (dtype,)
