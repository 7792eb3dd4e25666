"""Patch of JAX: run callbacks on every process, with the global value.

In a program over several devices, JAX lowers `pure_callback`, `io_callback`, `jax.debug.callback`
and `jax.debug.print` for the first device only. With several processes, only rank 0 calls back. The
other ranks get zeros from `pure_callback` and `io_callback`. JAX also refuses `ordered=True` of
`jax.debug`, and arrays that span processes outside of `jax.jit`.

This module lowers such a callback inside a `jax.shard_map` over all devices, and each device
receives the complete operands. A callback with an effect runs once per process. Callbacks inside a
`jax.shard_map` of the user are unchanged: each device calls back with its own rows.

JAX also runs callbacks under the mesh of the cell, and there refuses operations on their
single-device operands. This module runs them without a mesh.

Tested with JAX 0.10.2. `tests/worker/jax/arrays/test_callbacks_patch.py` fails when the patch is no
longer needed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

import jax

from nbdist.errors import StepError
from nbdist.private_api.jax import (
    ShardingContext,
    callbacks,
    debugging,
    dispatch,
    effects,
    mesh,
    mlir,
    sharding_impls,
)
from nbdist.worker.jax.arrays.leaves import gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_WAIT_S = 60.0
"""Seconds to wait until the other devices of a process reach the same callback."""

_muted: list[bool] = []
_pure_impl = callbacks.pure_callback_impl
_io_impl = callbacks.io_callback_impl
_debug_impl = debugging.debug_callback_impl
_pure_lowering = callbacks.pure_callback_lowering
_io_lowering = callbacks.io_callback_lowering
_debug_lowering = debugging.debug_callback_lowering


def apply() -> None:
    """Patch JAX so that every process of a program calls back."""
    callbacks.pure_callback_impl = _without_mesh(_pure_impl)
    callbacks.io_callback_impl = _without_mesh(_io_impl)
    debugging.debug_callback_impl = _call_debug
    debugging.debug_callback_p.def_impl(_call_debug)
    effects.shardable_ordered_effects.add_type(debugging.OrderedDebugEffect)
    dispatch.prim_requires_devices_during_lowering |= {
        debugging.debug_callback_p,
        debugging.debug_print_p,
    }
    pure = _on_every_process(callbacks.pure_callback_p, _pure_lowering, has_effect=False)
    mlir.register_lowering(callbacks.pure_callback_p, pure, cacheable=False)
    io = _on_every_process(callbacks.io_callback_p, _io_lowering)
    mlir.register_lowering(callbacks.io_callback_p, io, cacheable=False)
    debug = _on_every_process(debugging.debug_callback_p, _debug_lowering)
    debugging.debug_callback_lowering = debug  # used by `jax.debug.print`
    for platform in ("cpu", "gpu"):
        mlir.register_lowering(debugging.debug_callback_p, debug, platform=platform)
    mlir.register_lowering(debugging.debug_callback_p, debug, platform="tpu", cacheable=False)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Disable `jax.debug.callback` and `jax.debug.print` during trial steps."""
    _muted.append(True)
    try:
        yield
    finally:
        jax.effects_barrier()
        _muted.pop()


def check_repeatable(found: Collection[object]) -> None:
    """Refuse trial steps with callbacks whose effects would be repeated.

    Args:
        found: Effects of the step.

    Raises:
        StepError: The step calls `io_callback`.
    """
    if any(isinstance(effect, (callbacks.IOEffect, callbacks.OrderedIOEffect)) for effect in found):
        raise StepError(
            "--check runs the first step several times, and each run would call io_callback: leave "
            "out --check, or use jax.debug.callback, which --check does not call"
        )


def _on_every_process(
    primitive: Any, upstream: Callable[..., Any], *, has_effect: bool = True
) -> Callable[..., Any]:
    """Return the lowering of a callback; in a program of one process it is JAX's own."""

    def lower(ctx: Any, *args: Any, callback: Any, **params: Any) -> Any:
        context = ctx.module_context.axis_context
        if params.get("partitioned") or not _is_over_processes(context):
            return upstream(ctx, *args, callback=callback, **params)
        over = _mesh_of(context)
        params |= {"sharding": None} if "sharding" in params else {}

        def each(*operands: Any) -> Any:
            if not has_effect:
                return primitive.bind(*operands, callback=callback, **params)
            called = _OnceEach(callback, context.device_assignment, with_result=bool(ctx.avals_out))
            index = jax.lax.axis_index(over.axis_names)
            return primitive.bind(index, *operands, callback=called, **params)

        def on_all(*operands: Any) -> Any:
            spread = jax.shard_map(
                each, mesh=over, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
            )
            return spread(*operands)

        with mesh.use_abstract_mesh(mesh.empty_abstract_mesh), mesh.use_abstract_mesh(over):
            return mlir.lower_fun(on_all)(ctx, *args)

    return lower


def _is_over_processes(context: Any) -> bool:
    if not isinstance(context, ShardingContext):
        return False
    return len({device.process_index for device in context.device_assignment or ()}) > 1


def _mesh_of(context: Any) -> Any:
    """Return the mesh of the program's arrays or of its scope; by default one with one axis."""
    for over in (context.abstract_mesh, mesh.get_abstract_mesh()):
        if over is not None and over.size == context.num_devices and not over.empty:
            return over
    auto = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh((context.num_devices,), ("devices",), axis_types=auto)


class _OnceEach:
    """Function that is called on every device and runs once per process.

    Args:
        function: Function of the operands.
        devices: Devices of the program, in their order.
        with_result: True if the other devices of the process need the result.
    """

    def __init__(
        self, function: Callable[..., Any], devices: tuple[jax.Device, ...], *, with_result: bool
    ) -> None:
        own = [i for i, device in enumerate(devices) if device.process_index == jax.process_index()]
        self._function = function
        self._first = own[0]
        self._result: Any = ()
        waits = with_result and len(own) > 1
        self._all = threading.Barrier(len(own), timeout=_WAIT_S) if waits else None

    def __call__(self, index: Any, *operands: Any) -> Any:
        if self._all is None:
            return self._function(*operands) if int(index) == self._first else ()
        self._all.wait()
        if int(index) == self._first:
            try:
                self._result = self._function(*operands)
            except BaseException:
                self._all.abort()
                raise
        self._all.wait()
        return self._result


def _without_mesh(impl: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(impl)
    def called(*args: Any, **params: Any) -> Any:
        with _no_mesh():
            return impl(*args, **params)

    return called


@contextlib.contextmanager
def _no_mesh() -> Iterator[None]:
    """Leave the mesh, as JAX does for `jax.debug.callback`."""
    with (
        sharding_impls._internal_use_concrete_mesh(mesh.empty_concrete_mesh),
        mesh.use_abstract_mesh(mesh.empty_abstract_mesh),
    ):
        yield


def _call_debug(*args: Any, **params: Any) -> Any:
    """Call back outside of `jax.jit`, where operands may span several processes."""
    return () if _muted else _debug_impl(*map(_local, args), **params)


def _local(array: Any) -> Any:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return gathered(array).addressable_data(0)
    return array
