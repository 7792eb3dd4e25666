"""Look-up of chips by name, with their hosts and their rates by type."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.planner.hardware.catalog import MACHINES, PLAIN_HOST
from nbdist.records import Chip

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.hardware.machine import Host, Machine

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
"""Example of a file that describes hardware."""

_NEAR = 0.4  # difflib's ratio: 'H10' is near 'H100', and 'potato' near nothing


def find(kind: str) -> Chip | None:
    """Return the chip for a `device_kind` of JAX or a usual name; None if it is unknown.

    Case, spacing and punctuation do not matter. A name without a size of memory means the smallest
    one: `A100` is `A100-40GB`.
    """
    machine = machine_named(kind)
    return machine.chip if machine else None


def machine_named(kind: str) -> Machine | None:
    """Return the chip and its host for a name, as `find`."""
    squashed = normalized(kind)
    fitting = (machine for machine in MACHINES if re.fullmatch(machine.names, squashed))
    return next(fitting, None)


def normalized(name: str) -> str:
    """Return the lower-case letters and digits of a name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def host_of(chip: Chip) -> Host:
    """Return the usual host of a chip; a plain one with assumed figures if the catalog has none."""
    machine = machine_named(chip.name)
    return machine.host if machine else PLAIN_HOST


def known() -> tuple[str, ...]:
    """Return the names of all chips in the catalog."""
    return tuple(machine.chip.name for machine in MACHINES)


def unknown(name: str) -> str:
    """Return the message for an unknown name: known names, nearest first, and an example file."""
    by_squashed = {normalized(chip): chip for chip in known()}
    near = difflib.get_close_matches(
        normalized(name), by_squashed, n=len(by_squashed), cutoff=_NEAR
    )
    nearest = [by_squashed[match] for match in near]
    others = [chip for chip in known() if chip not in nearest]
    return (
        f"unknown hardware {name!r}: known are {', '.join([*nearest, *others])}. "
        "To describe another chip, write a file such as my.toml, and give its "
        f"path:\n{EXAMPLE}"
    )


def probed(
    kind: str,
    platform: str,
    memory_bytes: int,
    flops: Mapping[str, float],
    bytes_per_s: float,
) -> Chip:
    """Return a chip that is not in the catalog, from measured figures.

    Args:
        kind: the name that JAX reports.
        platform: name of the plugin.
        memory_bytes: memory that a program may use.
        flops: operations per second of large products, by type.
        bytes_per_s: bandwidth of copies within its memory.

    Raises:
        PlanError: a figure is not a positive number; all such figures are listed.
    """
    figures = {"memory_bytes": memory_bytes, "bytes_per_s": bytes_per_s}
    figures |= {f"flops[{dtype!r}]": rate for dtype, rate in flops.items()}
    wrong = [
        f"{name} is {value}" for name, value in figures.items() if not 0 < value < float("inf")
    ]
    wrong += [] if flops else ["flops is empty"]
    if wrong:
        raise PlanError(f"the benchmark of {kind!r} has invalid results: {', '.join(wrong)}")
    return Chip(
        name=kind,
        platform=platform,
        memory_bytes=memory_bytes,
        flops=dict(flops),
        bytes_per_s=bytes_per_s,
        source="measured by microbenchmarks on the device, not its nominal peak",
    )


def peak(chip: Chip, dtype: str) -> float:
    """Return operations per second of products of `dtype`, with JAX's default precision.

    `jax.lax.Precision.DEFAULT` computes float32 as tensorfloat32 on GPUs that have it and as
    bfloat16 on TPUs; exact float32 is `chip.flops["float32"]`. A type without units is widened to
    one that has some.

    Raises:
        PlanError: `dtype` is not planned for products, or the chip has no figure for it.
    """
    return chip.flops[computed_as(chip, dtype)]


def computed_as(chip: Chip, dtype: str) -> str:
    """Return the type in which the chip computes products of `dtype`.

    Raises:
        PlanError: the errors of `peak`.
    """
    for candidate in _computed_as(chip.platform, dtype):
        if candidate in chip.flops:
            return candidate
    raise PlanError(
        f"no rate is known for products of {dtype} on {chip.name}: it has "
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
