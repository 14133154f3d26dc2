"""Descriptions of models, runs and policies. Nothing here imports TensorFlow or Keras."""
