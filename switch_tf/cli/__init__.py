"""The command line: one file a command, and the only place besides `SwitchConfig.from_preset` that imports gin."""
