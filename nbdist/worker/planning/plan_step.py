"""Plan a step for live or named devices."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
import socket
import zlib
from typing import TYPE_CHECKING, Any, Protocol

import jax
import msgspec
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

from nbdist.jaxpr.flatten import flat
from nbdist.jaxpr.pipeline.build import check_1f1b, for_stages, layers_of
from nbdist.jaxpr.planner_model import model_of, model_of_stages
from nbdist.planner.cost.measured import benched_chip, benched_links
from nbdist.planner.cost.time import Target
from nbdist.planner.hardware.efficiency import calibration_of
from nbdist.planner.hardware.topology import parse
from nbdist.planner.hardware.topology_live import live
from nbdist.planner.search.search import plan
from nbdist.planner.search.step_variants import Steps
from nbdist.records import DATA, LocalDevices
from nbdist.worker.jax.runtime import processes
from nbdist.worker.planning.program_text import program_text
from nbdist.worker.planning.rewrite import rewritten

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jax.sharding import Mesh

    from nbdist.planner.graph.model import Model, Role
    from nbdist.records import Bench, Plan, Planning, Remat
    from nbdist.worker.planning.query import PlanQuery

_MB = 2**20
_MAX_KEPT = 16

_kept: dict[bytes, Plan] = {}
"""Latest plans, by a digest of all that they depend on. A repeated cell is not planned again."""


def plan_of(query: PlanQuery) -> Plan:
    """Plan the layout of a step, or return the plan that an equal step got before.

    Raises:
        PlanError: No layout fits in memory and meets the request.
    """
    key = _digest(query)
    if query.request.verify or key not in _kept:
        found = _planned(query)
        while len(_kept) >= _MAX_KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = found
    return _kept[key]


def _digest(query: PlanQuery) -> bytes:
    """Return a digest of a program and of all else that its plan depends on.

    The digest reads a program as text. The text contains the shapes of constants, not their values,
    and a plan does not depend on the values either. If the text contains the address of an object,
    an equal program may have another digest. It is then planned again.
    """
    parts = (query.inputs, query.target, query.request, query.pinned)
    content = [
        program_text(query.traced).encode(),
        *(msgspec.json.encode(part, order="sorted") for part in parts),
    ]
    return hashlib.sha256(b"\0".join(content)).digest()


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the collection of garbage.

    A search creates many objects and few cycles. The collector would go through all of the step's
    operations several times.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Variants:
    """Variants of a step, each rewritten once.

    Args:
        query: the step.
    """

    def __init__(self, query: PlanQuery) -> None:
        self._query = query
        self._whole = functools.cache(self._without_stages)
        self._staged = functools.cache(self._for_stages)

    def _without_stages(self, remat: Remat, micro: int) -> Any:
        traced, inputs = self._query.traced, self._query.inputs
        if remat and micro > 1:
            return rewritten(self._whole("", micro), inputs, remat, 1)
        return rewritten(traced, inputs, remat, micro)

    def _for_stages(self, remat: Remat) -> Any:
        """Return the step with its layers in scans."""
        if not remat:
            return for_stages(self._query.traced, self._query.inputs)
        if self._has_scans:
            return self._whole(remat, 1)
        return rewritten(self._staged(""), self._query.inputs, remat, 1)

    @property
    def _has_scans(self) -> bool:
        """True if the user's step has scans over its layers."""
        return self._staged("") is self._query.traced

    def model(self, remat: Remat, micro: int) -> Model:
        return model_of(self._whole(remat, micro), self._query.inputs)

    def staged_model(self, remat: Remat) -> Model | None:
        """Return the model for stages; None if it is the same as without stages."""
        if self._has_scans:
            return None
        return model_of_stages(flat(self._staged(remat)), self._query.inputs)

    def layers(self, remat: Remat) -> tuple[int, ...]:
        return layers_of(self._staged(remat), self._query.inputs)

    def check_1f1b(self, remat: Remat) -> None:
        check_1f1b(self._staged(remat), self._query.inputs)


def _planned(query: PlanQuery) -> Plan:
    with _without_collection():
        made = _Variants(query)
        whole = model_of(query.traced, query.inputs)
        steps = Steps(whole, made.model, made.layers, made.check_1f1b, made.staged_model)
        if not query.request.verify or jax.process_index():
            return plan(steps, query.target, query.request, query.pinned)
    from nbdist.worker.planning.compiler_check import verified_plan

    return verified_plan(query, steps)


def named_target(text: str) -> Target:
    """Return the target for a description such as `32xH100`; the hardware need not be present.

    Raises:
        PlanError: The hardware is unknown.
    """
    topology = parse(text)
    return Target(topology, calibration_of(topology.chip))


class MeshWithTarget(Protocol):
    """Part of `PjRTStrategy` that planning uses.

    Attributes:
        mesh: Mesh over all devices.
    """

    mesh: Any

    @property
    def target(self) -> Target:
        """Hardware that steps are planned for."""
        ...


def target_of(request: Planning, strategy: MeshWithTarget) -> Target:
    """Return the target of a plan; collective if it is the live hardware.

    Raises:
        PlanError: The requested hardware is unknown.
    """
    return named_target(request.on) if request.on else strategy.target


def batch_inputs(named: Mapping[str, Any]) -> list[tuple[str, Role]]:
    """Return the arrays of a batch as inputs of `plan_of`, given its parts by name."""
    return [
        (f"{name}{jax.tree_util.keystr(path)}", "batch")
        for name, tree in named.items()
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def mesh_to_trace(request: Planning, live: Mesh) -> Mesh | AbstractMesh:
    """Return the mesh to trace a step for: the live one, or an abstract one of the planned size.

    Raises:
        PlanError: The requested hardware is unknown.
    """
    if not request.on:
        return live
    devices = named_target(request.on).topology.devices
    return AbstractMesh((devices,), (DATA,), axis_types=(AxisType.Auto,))


def outline(array: Any, mesh: Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
    """Return an array's shape and type, replicated: one trace serves the plan and the step.

    An array over a mesh with explicit axes keeps its sharding, which is a part of its type.
    """
    kind = jax.typeof(array)
    sharding = jax.NamedSharding(mesh, jax.P())
    if AxisType.Explicit in mesh.axis_types and isinstance(array, jax.Array):
        own = array.sharding
        is_over = isinstance(own, jax.NamedSharding) and own.mesh == mesh
        sharding = own if is_over else sharding
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding, weak_type=kind.weak_type)


@contextlib.contextmanager
def over(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Set an abstract mesh for tracing; the strategy has already set a live one."""
    if isinstance(mesh, AbstractMesh):
        none = AbstractMesh((), ())  # JAX changes the number of devices only via an empty mesh
        with use_abstract_mesh(none), use_abstract_mesh(mesh):
            yield
    else:
        yield


def live_target(per_process: list[LocalDevices], bench: Bench | None) -> Target:
    """Return the target for the devices of all processes.

    Args:
        per_process: Local devices of each process.
        bench: Measurements of the devices; None to use tables.

    Raises:
        PlanError: The devices form no supported topology; see `planner.hardware.topology_live`.
    """
    chip = benched_chip(bench, per_process[0]) if bench else None
    topology = live(
        per_process, chip=chip, links=benched_links(bench, chip) if bench and chip else None
    )
    cautious = per_process[0].platform == "cpu"
    return Target(topology, calibration_of(topology.chip), cautious=cautious)


def local_devices() -> list[LocalDevices]:
    """Return the local devices of each process. Collective."""
    own = _own_devices()
    hosts = processes.agree([zlib.crc32(own.host.encode()), (own.memory_bytes or 0) // _MB])
    return _shared_out(
        [
            msgspec.structs.replace(
                own, host=f"{host:08x}", memory_bytes=int(megabytes) * _MB or None
            )
            for host, megabytes in hosts
        ]
    )


def _own_devices() -> LocalDevices:
    devices = jax.local_devices()
    first = devices[0]
    stats = first.memory_stats() or {}
    coords = tuple(tuple(d.coords) for d in devices) if first.platform == "tpu" else ()
    return LocalDevices(
        host=socket.gethostname(),
        platform=first.platform,
        kind=first.device_kind,
        devices=len(devices),
        memory_bytes=stats.get("bytes_limit", _host_bytes() if first.platform == "cpu" else None),
        slice_index=getattr(first, "slice_index", 0),
        coords=coords,
    )


def _shared_out(per_process: list[LocalDevices]) -> list[LocalDevices]:
    """Divide the memory of a host among its CPU devices."""
    if per_process[0].platform != "cpu":
        return per_process
    on_host = {
        own.host: sum(o.devices for o in per_process if o.host == own.host) for own in per_process
    }
    return [
        msgspec.structs.replace(own, memory_bytes=(own.memory_bytes or 0) // on_host[own.host])
        for own in per_process
    ]


def _host_bytes() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
