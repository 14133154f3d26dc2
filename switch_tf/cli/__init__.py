"""The command line: one file a command, and the only place besides `presets.py` that imports gin."""
