"""The training step, what surrounds it, and the loop."""
