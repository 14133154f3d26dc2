"""The training step and the loop."""
