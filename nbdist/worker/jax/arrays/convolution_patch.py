"""Patch of JAX: right values of grouped convolutions over several devices.

`jax.vmap(jax.grad(loss), in_axes=(None, 0))` of a convolution, as in differentially private
training, is a convolution with one group of features for each sample. If the samples are sharded
over devices, XLA also shards the groups, and the gradients of all devices but the first are wrong:
another program gives other values, without an error (JAX 0.10.2).

This module keeps the features of grouped convolutions unsharded in programs over several devices.
Depthwise convolutions on a sharded batch are unchanged: their features are not sharded.

The gradient of a depthwise kernel sums over the batch. If an axis of the mesh does not shard the
batch, XLA sums over its devices too, and the gradient is too large by the size of that axis. This
module shards the batch of such a sum over all devices.

`tests/worker/jax/arrays/test_convolution_patch.py` fails when the patch is no longer needed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax

from nbdist.private_api.jax import ShardingContext, convolution, mlir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_AXIS = "device"
"""Axis over all devices of a program."""


@functools.cache
def apply() -> None:
    """Patch JAX's lowering of convolutions."""
    lower = convolution._conv_general_dilated_lower
    primitive = convolution.conv_general_dilated_p
    mlir.register_lowering(primitive, _patched(lower))
    for platform in ("cpu", "gpu"):  # as upstream: it computes complex numbers in parts
        complex_lower = functools.partial(lower, expand_complex_convolutions=True)
        mlir.register_lowering(primitive, _patched(complex_lower), platform=platform)


def _patched(lower: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    def patched(ctx: Any, lhs: Any, rhs: Any, **params: Any) -> Sequence[Any]:
        devices = ctx.module_context.axis_context
        if not isinstance(devices, ShardingContext) or devices.num_devices == 1:
            return lower(ctx, lhs, rhs, **params)
        constrained = functools.partial(_constrained, ctx, devices.num_devices)
        lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
        lhs_aval, rhs_aval = ctx.avals_in
        if params["batch_group_count"] > 1:
            lhs = constrained(lhs, lhs_aval, lhs_spec[1], _AXIS)
            rhs = constrained(rhs, rhs_aval, rhs_spec[1], _AXIS)
        if params["feature_group_count"] == 1:
            return lower(ctx, lhs, rhs, **params)
        lhs = constrained(lhs, lhs_aval, lhs_spec[1], None)
        rhs = constrained(rhs, rhs_aval, rhs_spec[0], None)
        (out,) = lower(ctx, lhs, rhs, **params)
        return [constrained(out, ctx.avals_out[0], out_spec[1], None)]

    return patched


def _constrained(
    ctx: Any, devices: int, value: Any, aval: Any, dimension: int, axis: str | None
) -> Any:
    """Return a value with one dimension sharded over all devices or none.

    XLA chooses the sharding of the other dimensions.
    """
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((devices,), (_AXIS,), axis_types=auto)
    entries = [axis if each == dimension else jax.P.UNCONSTRAINED for each in range(aval.ndim)]
    sharding = jax.NamedSharding(mesh, jax.P(*entries))
    if jax.config.jax_use_shardy_partitioner:
        return mlir.wrap_with_sharding_op(ctx, value, aval, sharding._to_sdy_sharding(aval.ndim))
    form = sharding._to_xla_hlo_sharding(aval.ndim).to_proto()
    others = set(range(aval.ndim)) - {dimension}
    return mlir.wrap_with_sharding_op(ctx, value, aval, form, unspecified_dims=others)
