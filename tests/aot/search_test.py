"""Choices of a search, and their ranking."""

import dataclasses

import pytest

from switch_tf import SwitchConfig
from switch_tf.aot import search
from switch_tf.partitioning.layout import Layout
from tests.aot.made_up import experiment

OWN = search.Choice("data=128,model=2", 4096, 128, 1.25)
EXPERT_MODEL = Layout("data=128,model=2", (("batch", "data"), ("expert", "data"), ("mlp", "model")))


def test_meshes_split_the_devices_between_data_and_model():
    found = search.meshes(OWN, EXPERT_MODEL, 128, 1)
    assert [(choice.mesh_shape, choice.num_groups_multiple) for choice in found] == [
        ("data=256,model=1", 256), ("data=128,model=2", 128), ("data=64,model=4", 128), ("data=32,model=8", 128),
        ("data=16,model=16", 128)]
    assert [choice.num_groups_multiple for choice in search.meshes(OWN, EXPERT_MODEL, 128, 3)][:2] == [768, 384]


def test_meshes_split_the_devices_between_data_and_experts():
    both = Layout("data=2,expert=128", (("batch", ("data", "expert")), ("expert", "expert")))
    found = search.meshes(OWN, both, 128, 1)
    assert [(choice.mesh_shape, choice.num_groups_multiple) for choice in found] == [
        ("data=2,expert=128", 256), ("data=4,expert=64", 256), ("data=8,expert=32", 256), ("data=16,expert=16", 256)]
    assert search.meshes(OWN, both, 96, 1) == []  # 96, 48, 24 or 12 of 256


def test_a_layout_without_a_model_axis_has_one_mesh():
    layout = Layout("data=8", (("batch", "data"), ("expert", "data")))
    (only,) = search.meshes(OWN._replace(mesh_shape="data=8"), layout, 8, 1)
    assert only.mesh_shape == "data=8"


def test_axes_that_split_something_are_put_in_each_other_order():
    assert [choice.mesh_shape for choice in search.orders(OWN)] == ["model=2,data=128"]
    assert [choice.mesh_shape for choice in search.orders(OWN._replace(mesh_shape="data=1,model=8"))] == []
    assert len(search.orders(OWN._replace(mesh_shape="data=2,expert=4,model=8"))) == 5
    assert [choice.mesh_shape for choice in search.orders(OWN._replace(mesh_shape="a=2,b=4,one=1,c=2,d=3"))] == [
        "b=4,a=2,c=2,d=3,one=1", "a=2,c=2,b=4,d=3,one=1", "a=2,b=4,d=3,c=2,one=1"]


def _tried(config, batch_size):
    """Returns the group sizes and the capacity factors that a search asks for, of a layout with a single mesh."""
    lengths, layout = {"inputs": 512, "targets": 114}, Layout("data=8", (("batch", "data"), ("expert", "data")))
    asked = []

    def ask(questions):
        asked.extend(questions.values())
        return {name: {"fits": True, "predicted": {"step_seconds": place}} for place, name in enumerate(questions)}

    search.search(experiment(config, layout, batch_size, lengths), ask)
    first, *others = asked
    sizes = [choice.group_size for choice in others if choice.group_size != first.group_size
             and choice.capacity_factor == first.capacity_factor]
    return sizes, [choice.capacity_factor for choice in others if choice.capacity_factor != first.capacity_factor]


def test_groups_are_halved_and_capacities_are_the_papers():
    config = dataclasses.replace(SwitchConfig.from_preset("switch_base_8"), group_size=4096, num_groups_multiple=8)
    assert _tried(config, 8 * 2**20 // 512) == ([2048, 1024, 512, 256], [1.0])
    other = dataclasses.replace(config, train_capacity_factor=2.0)
    assert _tried(other, 8 * 2**20 // 512)[1] == [1.0, 1.25]


def test_a_group_size_that_no_group_fills_is_not_tried():
    config = dataclasses.replace(SwitchConfig.from_preset("switch_base_8"), group_size=4096, num_groups_multiple=8)
    assert _tried(config, 8 * 1024 // 512)[0] == [512, 256]


@pytest.mark.parametrize("slow, expected", [(0.2, "fast"), (0.05, "slow")])
def test_what_fits_comes_first_then_what_is_fast(slow, expected):
    results = {"refused": {"mistake": "no"}, "too large": {"fits": False, "predicted": {"step_seconds": 0.01}},
               "fast": {"fits": True, "predicted": {"step_seconds": 0.1}},
               "slow": {"fits": True, "predicted": {"step_seconds": slow}}}
    order = search.ranked(results)
    assert order[0] == expected
    assert order[2:] == ["too large", "refused"]
