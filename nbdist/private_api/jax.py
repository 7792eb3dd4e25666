"""Private names of JAX."""

from __future__ import annotations

from typing import Any

from nbdist.private_api.features import Library

LIBRARY = Library(
    "JAX",
    "jax",
    {
        "ArrayImpl": "jax._src.array:ArrayImpl",
        "BatchTracer": "jax._src.interpreters.batching:BatchTracer",
        "CacheInterface": "jax._src.compilation_cache_interface:CacheInterface",
        "DropVar": ("jax.extend.core:DropVar", "jax._src.core:DropVar"),
        "NamedSharding": "jax.sharding:NamedSharding",
        "PRNGKeyArray": ("jax._src.random.prng:PRNGKeyArray", "jax._src.prng:PRNGKeyArray"),
        "PjitInfo": "jax._src.pjit:PjitInfo",
        "ShardingContext": "jax._src.sharding_impls:ShardingContext",
        "UnspecifiedValue": "jax._src.sharding_impls:UnspecifiedValue",
        "_jax": "jaxlib._jax",
        "api": "jax._src.api",
        "callbacks": "jax._src.callback",
        "compilation_cache": "jax._src.compilation_cache",
        "compiler": "jax._src.compiler",
        "concrete_or_error": (
            "jax.extend.core:concrete_or_error",
            "jax._src.core:concrete_or_error",
        ),
        "convert_element_type": "jax._src.lax.lax:_convert_element_type",
        "convolution": "jax._src.lax.convolution",
        "core": "jax._src.core",
        "debugging": "jax._src.debugging",
        "default_device": "jax._src.config:default_device",
        "dispatch": "jax._src.dispatch",
        "distributed": "jax._src.distributed",
        "effects": "jax._src.effects",
        "flattree": "jax._src.flattree",
        "hlo": ("jax._src.lib:hlo", "jaxlib._jax"),
        "jaxprs_in_params": ("jax.extend.core:jaxprs_in_params", "jax._src.core:jaxprs_in_params"),
        "mesh": "jax._src.mesh",
        "mlir": "jax._src.interpreters.mlir",
        "new_jaxpr_eqn": ("jax.extend.core:new_jaxpr_eqn", "jax._src.core:new_jaxpr_eqn"),
        "numpy_util": "jax._src.numpy.util",
        "partial_eval": "jax._src.interpreters.partial_eval",
        "pxla": "jax._src.interpreters.pxla",
        "sharding_impls": "jax._src.sharding_impls",
        "trace_state_clean": "jax._src.core:trace_state_clean",
        "unmapped_aval": ("jax.extend.core:unmapped_aval", "jax._src.core:unmapped_aval"),
        "xla_bridge": "jax._src.xla_bridge",
    },
    since={"flattree": (0, 11), "partial_eval": (0, 12)},
)

_CALLBACKS = (
    *("ShardingContext", "callbacks.IOEffect", "callbacks.OrderedIOEffect"),
    *("callbacks.io_callback_impl", "callbacks.io_callback_lowering", "callbacks.io_callback_p"),
    *("callbacks.pure_callback_impl", "callbacks.pure_callback_lowering"),
    *("callbacks.pure_callback_p", "debugging.OrderedDebugEffect", "debugging.debug_callback_impl"),
    *("debugging.debug_callback_lowering", "debugging.debug_callback_p.def_impl"),
    *("debugging.debug_print_p", "dispatch.prim_requires_devices_during_lowering"),
    *("effects.shardable_ordered_effects.add_type", "mesh.empty_abstract_mesh"),
    *("mesh.empty_concrete_mesh", "mesh.get_abstract_mesh", "mesh.use_abstract_mesh"),
    *("mlir.lower_fun", "mlir.register_lowering", "mlir.wrap_with_sharding_op"),
    "sharding_impls._internal_use_concrete_mesh",
)

PJRT = LIBRARY.feature(
    "the pjrt strategy",
    *("ArrayImpl", "PRNGKeyArray._base_array", "_jax.JaxRuntimeError"),
    "_jax.get_distributed_runtime_client",
    *("_jax.get_distributed_runtime_service", "_jax.make_gloo_tcp_collectives"),
    *("callbacks", "default_device._parser", "dispatch.runtime_tokens"),
    *("distributed.global_state.client", "distributed.initialize"),
    *("pxla.ExecuteReplicated.__call__", "trace_state_clean"),
    *("xla_bridge._jax.make_gloo_tcp_collectives", "xla_bridge.backends_are_initialized"),
)
"""Each start checks the connection of the processes by an all-reduce."""

STEP_CELLS = LIBRARY.feature(
    "step cells under the pjrt strategy",
    *("DropVar", "concrete_or_error", "convert_element_type", "core.Tracer"),
    *("core.trace_ctx.trace", "flattree.nones", "flattree.pack", "jaxprs_in_params"),
    *("new_jaxpr_eqn", "partial_eval.lower_jaxpr2", "unmapped_aval"),
    *_CALLBACKS,
    is_tested_only=True,
)
"""`--check` compares the first step with one replica, which confirms an untested version."""

FIT = LIBRARY.feature(
    "`fit` under the pjrt strategy",
    *("DropVar", "jaxprs_in_params", "new_jaxpr_eqn"),
    is_tested_only=True,
)
"""Rewritten programs rely on the parameters of JAX's operations."""

LOOPS = LIBRARY.feature(
    "training loops under the pjrt strategy",
    *("BatchTracer", "UnspecifiedValue", "api.vjp"),
    is_tested_only=True,
)
"""Gradients are found by replaced functions of JAX, whose callers only tests can confirm."""

INSIDE_JIT = LIBRARY.feature(
    "`nbdist.place` and `nbdist.autoplace` in functions that JAX traces",
    *("concrete_or_error", "trace_state_clean"),
)

AUTOPLACE = LIBRARY.feature(
    "`nbdist.autoplace`",
    *("PjitInfo.backend", "PjitInfo.device", "PjitInfo.out_shardings_leaves"),
    *("PjitInfo.static_argnames", "PjitInfo.static_argnums"),
    "PjitInfo.user_specified_in_shardings",
)
"""`jax.jit` stores this record in its functions."""

PROFILES = LIBRARY.feature(
    "times of lines of a step",
    *("hlo.HloModule.from_serialized_hlo_module_proto", "hlo.HloPrintOptions"),
)

COMPILE_CACHE = LIBRARY.feature(
    "the compilation cache of replaced workers",
    *("CacheInterface", "compilation_cache.get_file_cache", "compilation_cache.reset_cache"),
    *("compilation_cache.put_executable_and_time", "compiler._cache_write"),
    is_tested_only=True,
)

CALLBACKS = LIBRARY.feature("callbacks on all ranks", *_CALLBACKS, is_tested_only=True)

CONVOLUTIONS = LIBRARY.feature(
    "sharded grouped convolutions",
    *("NamedSharding._to_sdy_sharding", "NamedSharding._to_xla_hlo_sharding", "ShardingContext"),
    "convolution._conv_general_dilated_lower",
    *("convolution.conv_general_dilated_p", "mlir.register_lowering"),
    is_tested_only=True,
)

DEVICE_PUT = LIBRARY.feature(
    "`jax.device_put` to own devices",
    "numpy_util.canonicalize_device_to_sharding",
    is_tested_only=True,
)


def __getattr__(name: str) -> Any:
    return LIBRARY.find(name)
