"""Checks of the installed packages and the machine, and quiet imports of packages."""
