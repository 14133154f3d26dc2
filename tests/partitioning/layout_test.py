"""A layout reads its mesh and refuses what cannot be laid out."""

import pytest

from switch_tf.partitioning import Layout


def test_the_default_is_one_device_and_splits_nothing():
    layout = Layout()
    assert (layout.mesh, layout.num_devices, layout.rules) == ({"data": 1}, 1, ())


def test_a_mesh_is_read_in_order():
    layout = Layout("data=1, model=1", rules=(("batch", "data"), ("expert", "data"), ("mlp", "model")))
    assert list(layout.mesh.items()) == [("data", 1), ("model", 1)]


@pytest.mark.parametrize("mesh_shape", ["data", "data=", "=2", "data=0", "data=-1", "data=x", "data=1,data=1", ""])
def test_a_mesh_that_cannot_be_read_is_refused(mesh_shape):
    with pytest.raises(ValueError, match='MESH_SHAPE must read like "data=4,model=2", each axis once, not'):
        Layout(mesh_shape)


def test_more_devices_than_one_are_refused():
    with pytest.raises(ValueError, match=r"'data=4,model=2' asks for 8 devices; this version trains on one"):
        Layout("data=4,model=2")


def test_rules_name_known_axes():
    with pytest.raises(ValueError, match="splits the unknown logical axis 'experts'"):
        Layout(rules=(("experts", "data"),))
    with pytest.raises(ValueError, match="puts 'mlp' on mesh axis 'model', which MESH_SHAPE 'data=1' does not have"):
        Layout(rules=(("mlp", "model"),))
