"""Facts about this machine, and about chips and networks of pods."""
