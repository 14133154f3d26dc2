"""Facts about this machine's devices and memory, and about chips and networks of pods."""
