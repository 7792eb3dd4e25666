"""What axes of a mesh are for, by the names that people give them; case does not matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nbdist.errors import UsageError

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

Axes = tuple[str, ...]


class Role(NamedTuple):
    """What an axis is for.

    Attributes:
        names: what it is called, by MaxText, Megatron-LM and JAX's own examples.
        sends: what goes over its links, for people.
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
"""By how much an axis sends, the least first. The order is Megatron-LM's (Narayanan et al., 2021,
section 3.2: tensors are cut within a host, pipelines go across)."""


def role_of(axis: str) -> Role:
    """What an axis of this name is for; `OTHER` of a name that nobody knows."""
    return next((role for role in ROLES if axis.lower() in role.names), OTHER)


def batch_axes(mesh: Mesh | AbstractMesh) -> Axes:
    """The axes that rows are cut over: neither the model's nor the pipeline's."""
    flat = _flat(mesh)
    model = () if len(flat) == 1 else _models(flat)
    rest = tuple(a for a in flat if a not in model and role_of(a) is not SEQUENCE)
    return rest or flat


def model_axes(mesh: Mesh | AbstractMesh) -> Axes:
    """The axes that parameters are cut over: those called so, or the only one there is.

    Raises:
        UsageError: there are several, and none is the model's.
    """
    flat = _flat(mesh)
    found = flat if len(flat) == 1 else _models(flat)
    if found:
        return found
    raise UsageError(
        f"the mesh has the axes {', '.join(map(repr, mesh.axis_names))}, of which none is the "
        f"model's: call one {', '.join(map(repr, sorted(MODEL.names)))}, or give a PartitionSpec"
    )


def _models(flat: Axes) -> Axes:
    """Those called so, else the last one, if nobody knows its name."""
    called = tuple(axis for axis in flat if role_of(axis) is MODEL)
    is_known = any(flat[-1].lower() in role.names for role in ROLES)
    return called or (() if is_known else flat[-1:])


def _flat(mesh: Mesh | AbstractMesh) -> Axes:
    """All but the pipeline's, where there are others."""
    names = tuple(mesh.axis_names)
    return tuple(axis for axis in names if role_of(axis) is not PIPELINE) or names
