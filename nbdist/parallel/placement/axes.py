"""Roles of mesh axes, by their usual names; case does not matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nbdist.errors import UsageError

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

Axes = tuple[str, ...]


class Role(NamedTuple):
    """Role of a mesh axis.

    Attributes:
        names: its names in MaxText, Megatron-LM and JAX's own examples.
        sends: description of its communication.
    """

    names: frozenset[str]
    sends: str


PIPELINE = Role(
    frozenset({"stage", "stages", "pipe", "pipeline", "pp"}),
    "passes activations between neighbours: outermost",
)
DATA = Role(frozenset({"replica", "dp", "data", "batch"}), "reduces gradients once a step")
OTHER = Role(frozenset({"fsdp", "zero", "expert", "ep"}), "sends several times a step")
SEQUENCE = Role(
    frozenset({"sequence", "seq", "context", "cp", "sp"}), "sends in each layer: near the innermost"
)
MODEL = Role(frozenset({"model", "tensor", "tp", "mp"}), "sends in each layer: innermost")
ROLES = (PIPELINE, DATA, OTHER, SEQUENCE, MODEL)
"""Roles by communication, least first. The order is that of Megatron-LM (Narayanan et al., 2021,
section 3.2: tensor parallelism within a host, pipelines across hosts)."""


def role_of(axis: str) -> Role:
    """Return the role of an axis of this name; `OTHER` if the name is unknown."""
    return next((role for role in ROLES if axis.lower() in role.names), OTHER)


def batch_axes(mesh: Mesh | AbstractMesh) -> Axes:
    """Return the axes that shard rows: those of neither the model nor a pipeline."""
    flat = _flat(mesh)
    model = () if len(flat) == 1 else _models(flat)
    rest = tuple(a for a in flat if a not in model and role_of(a) is not SEQUENCE)
    return rest or flat


def model_axes(mesh: Mesh | AbstractMesh) -> Axes:
    """Return the axes that shard parameters: those of the model, or the only axis.

    Raises:
        UsageError: there are several axes, and none is the model's.
    """
    flat = _flat(mesh)
    found = flat if len(flat) == 1 else _models(flat)
    if found:
        return found
    raise UsageError(
        f"the mesh has the axes {', '.join(map(repr, mesh.axis_names))}, and none "
        f"is for the model: name one {', '.join(map(repr, sorted(MODEL.names)))}, "
        "or use a PartitionSpec"
    )


def _models(flat: Axes) -> Axes:
    """Return axes with names of the model, else the last one if its name is unknown."""
    of_model = tuple(axis for axis in flat if role_of(axis) is MODEL)
    is_known = any(flat[-1].lower() in role.names for role in ROLES)
    return of_model or (() if is_known else flat[-1:])


def _flat(mesh: Mesh | AbstractMesh) -> Axes:
    """Return all axes but a pipeline's, if there are others."""
    names = tuple(mesh.axis_names)
    return tuple(axis for axis in names if role_of(axis) is not PIPELINE) or names
