"""Private names of TensorFlow."""

from __future__ import annotations

from typing import Any

from nbdist.private_api.features import Library

LIBRARY = Library(
    "TensorFlow",
    "tensorflow",
    {
        "AutoShardDataset": (
            "tensorflow.python.data.experimental.ops.distribute:_AutoShardDataset"
        ),
        "BatchDataset": "tensorflow.python.data.ops.batch_op:_BatchDataset",
        "CacheDataset": "tensorflow.python.data.ops.cache_op:CacheDataset",
        "Checkpoint": "tensorflow.python.checkpoint.checkpoint:Checkpoint",
        "CollectiveAllReduceExtended": (
            "tensorflow.python.distribute.collective_all_reduce_strategy:"
            "CollectiveAllReduceExtended"
        ),
        "CollectiveKeys": "tensorflow.python.distribute.cross_device_utils:CollectiveKeys",
        "CondBranchFuncGraph": (
            "tensorflow.python.ops.control_flow_v2_func_graphs:CondBranchFuncGraph"
        ),
        "DatasetV2": "tensorflow.python.data.ops.dataset_ops:DatasetV2",
        "DistributedVariable": "tensorflow.python.distribute.values:DistributedVariable",
        "Function": ("tensorflow.python.eager.polymorphic_function.polymorphic_function:Function"),
        "GradientTape": "tensorflow.python.eager.backprop:GradientTape",
        "MapDataset": "tensorflow.python.data.ops.map_op:_MapDataset",
        "OptionsDataset": "tensorflow.python.data.ops.dataset_ops:_OptionsDataset",
        "PaddedBatchDataset": "tensorflow.python.data.ops.padded_batch_op:_PaddedBatchDataset",
        "ParallelMapDataset": "tensorflow.python.data.ops.map_op:_ParallelMapDataset",
        "PrefetchDataset": "tensorflow.python.data.ops.prefetch_op:_PrefetchDataset",
        "RepeatDataset": "tensorflow.python.data.ops.repeat_op:_RepeatDataset",
        "ResourceVariable": "tensorflow.python.ops.resource_variable_ops:ResourceVariable",
        "ShuffleDataset": "tensorflow.python.data.ops.shuffle_op:_ShuffleDataset",
        "SkipDataset": "tensorflow.python.data.ops.skip_op:_SkipDataset",
        "StructuredFunctionWrapper": (
            "tensorflow.python.data.ops.structured_function:StructuredFunctionWrapper"
        ),
        "TakeDataset": "tensorflow.python.data.ops.take_op:_TakeDataset",
        "WhileBodyFuncGraph": (
            "tensorflow.python.ops.control_flow_v2_func_graphs:WhileBodyFuncGraph"
        ),
        "ag_ctx": "tensorflow.python.autograph.core.ag_ctx",
        "api": "tensorflow.python.autograph.impl.api",
        "checkpoint_management": "tensorflow.python.checkpoint.checkpoint_management",
        "context": "tensorflow.python.eager.context",
        "cross_device_ops": "tensorflow.python.distribute.cross_device_ops",
        "dataset_ops": "tensorflow.python.data.ops.dataset_ops",
        "distribute_lib": "tensorflow.python.distribute.distribute_lib",
        "distribute_utils": "tensorflow.python.distribute.distribute_utils",
        "errors": "tensorflow.python.framework.errors",
        "execute": "tensorflow.python.eager.execute",
        "func_graph": "tensorflow.python.framework.func_graph",
        "gen_collective_ops": "tensorflow.python.ops.gen_collective_ops",
        "gen_random_ops": "tensorflow.python.ops.gen_random_ops",
        "gen_stateless_random_ops": "tensorflow.python.ops.gen_stateless_random_ops",
        "gen_stateless_random_ops_v2": "tensorflow.python.ops.gen_stateless_random_ops_v2",
        "load_lib": "tensorflow.python.saved_model.load",
        "mirrored_run": "tensorflow.python.distribute.mirrored_run",
        "mirrored_strategy": "tensorflow.python.distribute.mirrored_strategy",
        "op_def_registry": "tensorflow.python.framework.op_def_registry",
        "ops": "tensorflow.python.framework.ops",
        "random_seed": "tensorflow.python.framework.random_seed",
        "save_lib": "tensorflow.python.saved_model.save",
        "scatter_error_msg": "tensorflow.python.distribute.values_util:scatter_error_msg",
        "script_ops": "tensorflow.python.ops.script_ops",
        "structure": "tensorflow.python.data.util.structure",
        "tensor_util": "tensorflow.python.framework.tensor_util",
        "values_util": "tensorflow.python.distribute.values_util",
    },
)

MIRRORED = LIBRARY.feature(
    "the mirrored strategy",
    *("CollectiveAllReduceExtended._collective_keys", "CollectiveKeys._instance_key_table"),
    "CollectiveAllReduceExtended._replica_ctx_all_reduce",
    *("DistributedVariable", "context.Context._collective_ops_server_def"),
    *("context.Context._context_handle", "context._reset_context", "context.global_seed"),
    *("context.context", "cross_device_ops.__file__", "errors.NotFoundError"),
    *("execute", "gen_collective_ops", "mirrored_run._MirroredReplicaThread", "script_ops"),
)
"""Each start checks the connection of the processes by an all-reduce."""

SEEDS = LIBRARY.feature(
    "random numbers of TensorFlow, the same on each rank",
    *("context.Context._rng", "context.Context._seed", "context.Context._set_global_seed"),
    *("context.context", "context.executing_eagerly", "context.global_seed"),
    *("ops.get_default_graph", "random_seed.DEFAULT_GRAPH_SEED", "random_seed._truncate_seed"),
    "random_seed.get_seed",
)

STEPS = LIBRARY.feature(
    "step cells, training loops and `fit` under the mirrored strategy",
    *("CondBranchFuncGraph", "Function.__call__", "Function._function_cache"),
    "Function._omit_frequent_tracing_warning",
    *("ResourceVariable._unique_id", "WhileBodyFuncGraph"),
    *("ag_ctx.ControlStatusCtx", "ag_ctx.Status.ENABLED", "api.tf_convert"),
    *("distribute_lib.ReplicaContext.all_reduce", "distribute_lib.ReplicaContextBase._merge_call"),
    *("distribute_lib.in_cross_replica_context", "func_graph.func_graph_from_py_func"),
    *("gen_random_ops", "gen_stateless_random_ops", "gen_stateless_random_ops_v2"),
    *("mirrored_run._MirroredReplicaContext._merge_call", "mirrored_run.threading.current_thread"),
    *("tensor_util.constant_value_as_shape", "values_util.on_read_assign_cross_replica"),
    is_tested_only=True,
)
"""The arithmetic of replicas relies on the callers of these functions in TensorFlow and Keras."""

DATA = LIBRARY.feature(
    "`tf.data` on several workers",
    *("AutoShardDataset", "DatasetV2._flat_structure", "DatasetV2._functions"),
    *("DatasetV2._inputs", "dataset_ops.UnaryUnchangedStructureDataset", "op_def_registry.get"),
    *("structure.from_compatible_tensor_list", "structure.to_tensor_list"),
)

OWN_ROWS = LIBRARY.feature(
    "maps of a `tf.data.Dataset` that run for a worker's own samples only",
    *("BatchDataset._batch_size", "BatchDataset._drop_remainder", "BatchDataset._input_dataset"),
    *("CacheDataset._filename", "CacheDataset._input_dataset", "DatasetV2._as_serialized_graph"),
    *("DatasetV2._variant_tensor", "MapDataset._force_synchronous", "MapDataset._input_dataset"),
    *("MapDataset._map_func", "OptionsDataset._input_dataset", "OptionsDataset._options_attr"),
    *("PaddedBatchDataset._batch_size", "PaddedBatchDataset._drop_remainder"),
    *("PaddedBatchDataset._input_dataset", "PaddedBatchDataset._padded_shapes"),
    *("PaddedBatchDataset._padding_values", "ParallelMapDataset._deterministic"),
    *("ParallelMapDataset._input_dataset", "ParallelMapDataset._map_func"),
    *("ParallelMapDataset._num_parallel_calls", "ParallelMapDataset._use_unbounded_threadpool"),
    *("PrefetchDataset._buffer_size", "PrefetchDataset._input_dataset", "RepeatDataset._count"),
    *("RepeatDataset._input_dataset", "ShuffleDataset._buffer_size"),
    *("ShuffleDataset._input_dataset", "ShuffleDataset._reshuffle_each_iteration"),
    *("ShuffleDataset._seed", "ShuffleDataset._seed2", "SkipDataset._count"),
    *("SkipDataset._input_dataset", "StructuredFunctionWrapper._input_structure"),
    *("TakeDataset._count", "TakeDataset._input_dataset"),
)

ONE_STRATEGY = LIBRARY.feature(
    "other strategies of TensorFlow in a cell",
    *("DistributedVariable", "GradientTape._tape", "ops._default_graph_stack"),
    is_tested_only=True,
)

SCALARS = LIBRARY.feature(
    "variables as Python numbers",
    *("DistributedVariable", "cross_device_ops.check_destinations"),
    "mirrored_strategy.MirroredExtended._broadcast_to",
    "mirrored_strategy.MirroredExtended._get_cross_device_ops",
    is_tested_only=True,
)

SLICES = LIBRARY.feature(
    "assignments to slices of variables",
    *("DistributedVariable.__getitem__", "DistributedVariable.batch_scatter_update"),
    *("DistributedVariable._update", "DistributedVariable.gather_nd"),
    "DistributedVariable.sparse_read",
    "scatter_error_msg.format",
    is_tested_only=True,
)

SUMS = LIBRARY.feature(
    "assignments to summed variables",
    "values_util.on_read_assign_cross_replica",
    is_tested_only=True,
)

SAVING = LIBRARY.feature(
    "checkpoints and saved models, written once for all ranks",
    "Checkpoint._maybe_create_save_counter",
    "CollectiveAllReduceExtended._get_variable_creator_initial_value",
    *("DistributedVariable._primary", "checkpoint_management.CheckpointManager._checkpoint_prefix"),
    "checkpoint_management.CheckpointManager._directory",
    "checkpoint_management.CheckpointManager._latest_checkpoint",
    "checkpoint_management.CheckpointManager._maybe_delete",
    "checkpoint_management.CheckpointManager._prefix",
    "checkpoint_management.CheckpointManager._record_state",
    *("checkpoint_management._delete_file_if_exists", "checkpoint_management.get_checkpoint_state"),
    *("distribute_lib.StrategyBase", "distribute_lib._DefaultDistributionExtended"),
    *("distribute_utils.is_distributed_variable", "load_lib._WrapperFunction._call_flat"),
    *("load_lib.load_partial", "save_lib.save_and_return_nodes"),
    is_tested_only=True,
)


def __getattr__(name: str) -> Any:
    return LIBRARY.find(name)
