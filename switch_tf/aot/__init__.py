"""The training step compiled for a TPU pod ahead of time, on a machine without one."""
