"""Facts about machines: their devices and memory, and the chips and networks of TPU pods."""
