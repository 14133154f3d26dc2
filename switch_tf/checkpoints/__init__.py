"""Run folders and their checkpoints: saved, restored, continued, and the best one kept."""
