"""Descriptions of models, runs and policies. Imports neither TensorFlow nor Keras."""
