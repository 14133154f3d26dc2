"""The installation: checks of its packages and of the machine, and imports of packages that are noisy."""
