"""Every test process has eight virtual CPU devices, which nothing but the tests of layouts uses."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import tensorflow as tf

NUM_DEVICES = 8

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES)
