"""The back ends by name. A new one is a module with `create(layout, members)` and a line here."""

# `Layout.backend` -> module. Its `create` receives a Layout and the cluster.Cluster of the run and returns a
# Partitioner. It raises Refusal if the layout does not fit the devices, before anything starts.
BACKENDS = {
    "auto": "switch_tf.partitioning.backends.auto",
    "dtensor": "switch_tf.partitioning.backends.dtensor",
    "one_device": "switch_tf.partitioning.backends.one_device",
    "mirrored": "switch_tf.partitioning.backends.mirrored",
    "pjrt": "switch_tf.partitioning.backends.pjrt",
    "tpu": "switch_tf.partitioning.backends.tpu",
}
