"""A step planned for the devices that are there."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import zlib
from typing import TYPE_CHECKING, Any, Protocol

import jax
import msgspec
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

from nbdist.jaxpr.pipeline.build import check_alternates, layers_of
from nbdist.jaxpr.planner_model import model_of
from nbdist.planner.cost.measured import benched_chip, benched_links
from nbdist.planner.cost.time import Target
from nbdist.planner.hardware.efficiency import calibration_of
from nbdist.planner.hardware.topology import parse
from nbdist.planner.hardware.topology_live import live
from nbdist.planner.search.search import plan
from nbdist.planner.search.step_variants import Steps
from nbdist.records import DATA, LocalDevices
from nbdist.worker.jax.runtime import processes
from nbdist.worker.planning.rewrite import rewritten

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from jax.sharding import Mesh

    from nbdist.planner.graph.model import Model, Role
    from nbdist.records import Bench, Plan, Planning, Remat, Spec

_MB = 2**20


def plan_of(
    traced: Any,
    inputs: Sequence[tuple[str, Role]],
    target: Target,
    wishes: Planning,
    pinned: Mapping[str, Spec],
) -> Plan:
    """How a step is laid out.

    Args:
        traced: its jaxpr, closed.
        inputs: the path and the role of each of its inputs.
        target: the hardware.
        wishes: what is asked of the plan.
        pinned: arrays that stay as their user has cut them, by path.

    Raises:
        PlanError: it fits nowhere, or not as it was asked for.
    """

    @functools.cache
    def anew(remat: Remat, micro: int) -> Any:
        return rewritten(traced, inputs, remat, micro)

    def again(remat: Remat, micro: int) -> Model:
        return model_of(anew(remat, micro), inputs)

    def layers(remat: Remat) -> tuple[int, ...]:
        return layers_of(anew(remat, 1), inputs)

    def alternates(remat: Remat) -> None:
        check_alternates(anew(remat, 1), inputs)

    steps = Steps(model_of(traced, inputs), again, layers, alternates)
    if wishes.verify and jax.process_index() == 0:
        from nbdist.worker.planning.compiler_check import verified_plan

        return verified_plan(traced, inputs, steps, target, wishes, pinned)
    return plan(steps, target, wishes, pinned)


def named_target(text: str) -> Target:
    """Hardware that may not be there, as in `32xH100`.

    Raises:
        PlanError: nobody knows it.
    """
    topology = parse(text)
    return Target(topology, calibration_of(topology.chip))


class MeshWithTarget(Protocol):
    """The part of `PjRTStrategy` that planning uses.

    Attributes:
        mesh: over all devices.
    """

    mesh: Any

    @property
    def target(self) -> Target:
        """The hardware that steps are planned for."""
        ...


def target_of(wishes: Planning, strategy: MeshWithTarget) -> Target:
    """The hardware that is planned for; where it is that which there is, every process has to ask.

    Raises:
        PlanError: nobody knows what is asked for.
    """
    return named_target(wishes.on) if wishes.on else strategy.target


def batch_inputs(named: Mapping[str, Any]) -> list[tuple[str, Role]]:
    """The arrays of a batch, as inputs of `plan_of`; by the name of each of its parts."""
    return [
        (f"{name}{jax.tree_util.keystr(path)}", "batch")
        for name, tree in named.items()
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def mesh_to_trace(wishes: Planning, live: Mesh) -> Mesh | AbstractMesh:
    """The devices that a step is traced for: those that there are, or as many as are planned for.

    Raises:
        PlanError: nobody knows the hardware that is asked for.
    """
    if not wishes.on:
        return live
    devices = named_target(wishes.on).topology.devices
    return AbstractMesh((devices,), (DATA,), axis_types=(AxisType.Auto,))


def outline(array: Any, mesh: Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
    """An array of its shape and type, everywhere: one trace serves the plan and the step."""
    kind = jax.typeof(array)
    everywhere = jax.NamedSharding(mesh, jax.P())
    return jax.ShapeDtypeStruct(
        kind.shape, kind.dtype, sharding=everywhere, weak_type=kind.weak_type
    )


@contextlib.contextmanager
def over(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Within it, a step is traced for these devices; live ones are set by their strategy."""
    if isinstance(mesh, AbstractMesh):
        none = AbstractMesh((), ())  # JAX goes from one number of devices to another by way of none
        with use_abstract_mesh(none), use_abstract_mesh(mesh):
            yield
    else:
        yield


def live_target(said: list[LocalDevices], bench: Bench | None) -> Target:
    """The devices of all processes.

    Args:
        said: what each process drives.
        bench: what was measured of them; None leaves it to tables.

    Raises:
        PlanError: they are no topology; see `planner.hardware.topology_live`.
    """
    chip = benched_chip(bench, said[0]) if bench else None
    topology = live(said, chip=chip, links=benched_links(bench, chip) if bench and chip else None)
    cautious = said[0].platform == "cpu"
    return Target(topology, calibration_of(topology.chip), cautious=cautious)


def local_devices() -> list[LocalDevices]:
    """What each process drives; every process has to ask."""
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


def _shared_out(said: list[LocalDevices]) -> list[LocalDevices]:
    """CPUs' devices have their host's memory between them."""
    if said[0].platform != "cpu":
        return said
    on_host = {own.host: sum(o.devices for o in said if o.host == own.host) for own in said}
    return [
        msgspec.structs.replace(own, memory_bytes=(own.memory_bytes or 0) // on_host[own.host])
        for own in said
    ]


def _host_bytes() -> int:
    """Of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
