"""The command line: one file a command, and the only place besides `configs` that imports gin."""
