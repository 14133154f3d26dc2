"""Checks of an installation: the packages, and the machine they run on."""
