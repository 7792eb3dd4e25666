"""Choice of a layout for a training step, without JAX or TensorFlow."""
