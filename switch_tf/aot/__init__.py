"""The training step compiled ahead of time for a pod, on a machine without one."""
