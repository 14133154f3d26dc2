"""Run folders and their checkpoints."""
