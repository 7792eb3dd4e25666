"""Descriptions of absent hardware for XLA's compilers.

A TPU's compiler knows every slice by its name. A GPU's compiler needs the figures of the device:
openxla/xla, xla/backends/gpu/target_config/specs, by chip.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Literal

from nbdist.errors import PlanError
from nbdist.planner.hardware.links import AXES
from nbdist.records.base import Record

if TYPE_CHECKING:
    from nbdist.records import Topology

_PACKAGES = {"tpu": "libtpu", "cuda": "jax_cuda13_plugin"}
"""Modules with compilers that need no hardware; `nbdist[oracle]` installs them."""


def is_compiler_installed(platform: str) -> bool:
    """Return True if the compiler for `tpu`, `cuda` or `cpu` is installed."""
    package = _PACKAGES.get(platform)
    return package is None or importlib.util.find_spec(package) is not None


class CompilerTarget(Record, frozen=True):
    """Arguments of `jax.experimental.topologies.get_topology_desc`.

    Attributes:
        platform: the compiler's platform; that of `cpu` is JAX's own, and needs no arguments.
        name: name of the slice or the chip.
        options: keyword arguments.
        devices: number of devices.
    """

    platform: Literal["cpu", "cuda", "tpu"]
    name: str
    options: dict[str, str | int | tuple[int, ...]]
    devices: int


class _Gpu(Record, frozen=True):
    """Figures of a chip that the compiler needs, beside its memory.

    Attributes:
        capability: major CUDA compute capability; from 9 on with the features of this chip only.
        cores: number of multiprocessors.
        units: float32 units in each core.
        cache: bytes of the L2 cache.
        shared: shared memory of a core, and the largest size that a block may request, in bytes.
        clock_ghz: clock rate.
    """

    capability: int
    cores: int
    units: int
    cache: int
    shared: tuple[int, int]
    clock_ghz: float


_AMPERE = _Gpu(8, 108, 64, 41943040, (167936, 166912), 1.41)
_HOPPER = _Gpu(9, 132, 128, 52428800, (233472, 232448), 1.98)
_GPUS = {
    "V100-16GB": _Gpu(7, 80, 64, 6291456, (98304, 98304), 1.53),
    "V100-32GB": _Gpu(7, 80, 64, 6291456, (98304, 98304), 1.53),
    "A100-40GB": _AMPERE,
    "A100-80GB": _AMPERE,
    "H100": _HOPPER,
    "H200": _HOPPER,
    "B200": _Gpu(10, 148, 128, 132644864, (233472, 232448), 1.965),
    "GB200": _Gpu(10, 152, 128, 135528448, (233472, 232448), 2.062),
}


def compiler_target(topology: Topology) -> CompilerTarget:
    """Return the compiler's description of a topology.

    Raises:
        PlanError: no compiler knows this hardware, or the topology is not supported.
    """
    chip = topology.chip
    if chip.platform == "tpu" and chip.name.startswith("TPU "):
        return _slices(topology)
    if chip.name in _GPUS:
        return _hosts(topology)
    if chip.platform == "cpu":
        return CompilerTarget(platform="cpu", name="", options={}, devices=topology.devices)
    raise PlanError(
        f"--verify: no compiler supports {chip.name}; supported are TPUs, CPUs "
        f"and {', '.join(_GPUS)}"
    )


def _slices(topology: Topology) -> CompilerTarget:
    axes = {f"ICI {axis}": 1 for axis in AXES}
    axes |= {level.name: level.size for level in topology.levels if level.name in axes}
    slices = {level.name: level.size for level in topology.levels}.get("DCN", 1)
    generation = topology.chip.name.removeprefix("TPU ")
    flat = generation.endswith("e")
    shape = "x".join(str(size) for size in list(axes.values())[: 2 if flat else 3])
    options: dict[str, str | int | tuple[int, ...]] = {}
    if slices > 1:
        options["num_slices"] = slices
    if any(size % 2 for size in list(axes.values())[:2]):  # the default is 2x2x1
        options["chips_per_host_bounds"] = tuple(axes.values())
    name = f"{generation}:{shape}"
    return CompilerTarget(platform="tpu", name=name, options=options, devices=topology.devices)


def _hosts(topology: Topology) -> CompilerTarget:
    inside = topology.levels[0].size
    name = topology.chip.name
    options: dict[str, str | int | tuple[int, ...]] = {
        "target_config": _config(topology, _GPUS[name]),
        "topology": f"1x{topology.devices // inside}x{inside}",
    }
    return CompilerTarget(platform="cuda", name=name, options=options, devices=topology.devices)


def _config(topology: Topology, gpu: _Gpu) -> str:
    """Return a GpuTargetConfigProto as text."""
    chip = topology.chip
    own = "ACCELERATED_FEATURES" if gpu.capability >= 9 else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared[0]}
  shared_memory_per_block_optin: {gpu.shared[1]}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {chip.bytes_per_s:.0f}
  l2_cache_size: {gpu.cache}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {chip.memory_bytes}
  cuda_compute_capability {{ major: {gpu.capability} feature_extension: {own} }}
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  name: "{chip.name}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{chip.name}"
"""
