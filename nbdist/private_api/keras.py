"""Private names of Keras."""

from __future__ import annotations

from typing import Any

from nbdist.private_api.features import Library

LIBRARY = Library(
    "Keras",
    "keras",
    {
        "ArrayDataAdapter": (
            "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter"
        ),
        "BackupAndRestore": "keras.src.callbacks.backup_and_restore:BackupAndRestore",
        "BaseOptimizer": "keras.src.optimizers.base_optimizer:BaseOptimizer",
        "CSVLogger": "keras.src.callbacks.csv_logger:CSVLogger",
        "DataAdapter": "keras.src.trainers.data_adapters.data_adapter:DataAdapter",
        "Distribution": "keras.src.distribution.distribution_lib:Distribution",
        "EpochIterator": "keras.src.trainers.epoch_iterator:EpochIterator",
        "GLOBAL_RANDOM_SEED": "keras.src.utils.rng_utils:GLOBAL_RANDOM_SEED",
        "GLOBAL_SEED_GENERATOR": "keras.src.random.seed_generator:GLOBAL_SEED_GENERATOR",
        "JAXTrainer": "keras.src.backend.jax.trainer:JAXTrainer",
        "JaxVariable": "keras.src.backend.jax.core:JaxVariable",
        "KerasSaveable": "keras.src.saving.keras_saveable:KerasSaveable",
        "Layer": "keras.src.layers.layer:Layer",
        "LossScaleOptimizer": "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer",
        "MeanMetricWrapper": "keras.src.metrics.reduction_metrics:MeanMetricWrapper",
        "Metric": "keras.src.metrics.metric:Metric",
        "RandomInitializer": "keras.src.initializers.random_initializers:RandomInitializer",
        "TFDatasetAdapter": (
            "keras.src.trainers.data_adapters.tf_dataset_adapter:TFDatasetAdapter"
        ),
        "TFOptimizer": "keras.src.backend.tensorflow.optimizer:TFOptimizer",
        "TensorBoard": "keras.src.callbacks.tensorboard:TensorBoard",
        "Trainer": "keras.src.trainers.trainer:Trainer",
        "backend": "keras.src.backend",
        "data_adapters": "keras.src.trainers.data_adapters",
        "distribution_lib": "keras.src.backend.jax.distribution_lib",
        "export": "keras.src.export",
        "get_input_signature": "keras.src.export.export_utils:get_input_signature",
        "global_state": "keras.src.backend.common.global_state",
        "in_stateless_scope": "keras.src.backend.common.stateless_scope:in_stateless_scope",
        "is_default": "keras.src.utils.python_utils:is_default",
        "is_nnx_enabled": "keras.src.backend.config:is_nnx_enabled",
        "jax_trainer": "keras.src.backend.jax.trainer",
        "layers": "keras.src.layers",
        "legacy_h5_format": "keras.src.legacy.saving.legacy_h5_format",
        "loss": "keras.src.losses.loss",
        "ops": "keras.src.ops",
        "optimizers": "keras.src.optimizers",
        "random": "keras.src.random",
        "saving_api": "keras.src.saving.saving_api",
        "saving_lib": "keras.src.saving.saving_lib",
        "saving_utils": "keras.src.legacy.saving.saving_utils",
        "source": "keras.src",
        "tensorflow_core": "keras.src.backend.tensorflow.core",
        "tensorflow_trainer": "keras.src.backend.tensorflow.trainer",
        "tree": "keras.src.tree",
        "unpack_x_y_sample_weight": (
            "keras.src.trainers.data_adapters.data_adapter_utils:unpack_x_y_sample_weight"
        ),
    },
)

SEEDS = LIBRARY.feature(
    "the cluster's random numbers in Keras",
    *("GLOBAL_RANDOM_SEED", "GLOBAL_SEED_GENERATOR"),
    "global_state.set_global_attribute",
    is_tested_only=True,
)

FIT = LIBRARY.feature(
    "`fit`, `evaluate` and `predict` on workers",
    *("ArrayDataAdapter._shuffle", "BaseOptimizer._learning_rate", "BaseOptimizer.apply"),
    *("EpochIterator.__init__", "EpochIterator._enumerate_iterator", "Layer._flatten_layers"),
    *("Trainer._compile_config", "Trainer._initial_epoch", "loss.apply_mask"),
    *("loss.reduce_values", "loss.scale_loss_for_distribution"),
    *("loss.unscale_loss_for_distribution", "optimizers", "source"),
    is_tested_only=True,
)

STEPS = LIBRARY.feature(
    "models of Keras in step cells and training loops under the mirrored strategy",
    *("BaseOptimizer._backend_apply_gradients", "BaseOptimizer._iterations"),
    *("BaseOptimizer._learning_rate", "BaseOptimizer._tracker"),
    *("BaseOptimizer._trainable_variables", "BaseOptimizer._trainable_variables_indices"),
    *("BaseOptimizer._variables", "BaseOptimizer.apply", "MeanMetricWrapper._fn"),
    *("Layer._maybe_build", "Metric._variables", "TFOptimizer._distribution_strategy"),
    *("backend", "in_stateless_scope", "is_default", "layers.BatchNormalization._moments"),
    *("layers.BatchNormalization._reduction_axes", "loss.apply_mask"),
    *("loss.reduce_values", "ops.cond", "random", "tree.flatten", "tree.map_structure"),
    is_tested_only=True,
)

MIRRORED_FIT = LIBRARY.feature(
    "`fit` under the mirrored strategy",
    *("Trainer._compile_metrics", "tensorflow_core.Variable._initialize"),
    *("tensorflow_core.Variable._value", "tensorflow_trainer.TFEpochIterator.__init__"),
    "tensorflow_trainer.TensorFlowTrainer._autoconvert_optionals",
    "tensorflow_trainer.TensorFlowTrainer._distribute_strategy",
    "tensorflow_trainer.TensorFlowTrainer._eval_epoch_iterator",
    *("tensorflow_trainer.TensorFlowTrainer._maybe_symbolic_build", "tensorflow_trainer.concat"),
    *("tensorflow_trainer.TensorFlowTrainer.predict", "tree.flatten", "tree.map_structure"),
    "tree.pack_sequence_as",
    is_tested_only=True,
)

PJRT_FIT = LIBRARY.feature(
    "`fit` under the pjrt strategy",
    *("ArrayDataAdapter", "DataAdapter", "Distribution"),
    *("JAXTrainer._eval_epoch_iterator", "JAXTrainer._jax_state"),
    *("JAXTrainer._jax_state_synced", "JAXTrainer._make_function", "JAXTrainer._symbolic_build"),
    *("JAXTrainer.fit", "JAXTrainer.make_predict_function", "JAXTrainer.make_train_function"),
    *("JaxVariable.__array__", "JaxVariable._initialize_layout"),
    *("JaxVariable._initialize_with_initializer", "JaxVariable._initializer"),
    *("JaxVariable._layout", "JaxVariable._value", "RandomInitializer"),
    *("TFDatasetAdapter", "data_adapters.get_data_adapter", "distribution_lib.distribute_tensor"),
    *("global_state.get_global_attribute", "global_state.set_global_attribute", "is_nnx_enabled"),
    *("jax_trainer.JAXEpochIterator._get_distributed_iterator", "jax_trainer._distribute_data"),
    "unpack_x_y_sample_weight",
    is_tested_only=True,
)

SAVING = LIBRARY.feature(
    "files of models, written once for all ranks",
    *("BackupAndRestore._save_model", "BackupAndRestore.on_train_begin"),
    *("BackupAndRestore.on_train_end", "CSVLogger.on_train_begin", "CSVLogger.on_train_end"),
    *("TensorBoard.on_train_end", "TensorBoard.set_model", "export", "legacy_h5_format"),
    *("saving_api.load_model", "saving_api.load_weights", "saving_lib"),
    "saving_utils.model_metadata",
    is_tested_only=True,
)

LOSS_SCALES = LIBRARY.feature(
    "`LossScaleOptimizer` outside of replicas",
    *("LossScaleOptimizer._common_apply", "LossScaleOptimizer._tf_apply"),
    is_tested_only=True,
)

EXPORT = LIBRARY.feature("`nbdist.export` of models of Keras", "get_input_signature")

TRANSFER = LIBRARY.feature(
    "`%dist_push` and `%dist_pull` of models of Keras",
    *("KerasSaveable", "saving_lib._load_model_from_fileobj"),
)


def __getattr__(name: str) -> Any:
    return LIBRARY.find(name)
