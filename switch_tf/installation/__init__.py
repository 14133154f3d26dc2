"""Checks of the installation, and quiet imports."""
