"""Location of the arrays behind names, for objects of JAX, TensorFlow and Keras."""
