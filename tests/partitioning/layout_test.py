"""A layout reads its mesh, fits it to the devices, splits dimensions by its rules, and refuses what does not fit."""

import dataclasses
import re

import pytest

from switch_tf import SwitchConfig
from switch_tf.configs import gin_syntax, parts, shipped_gin
from switch_tf.configs.accounting import Weight
from switch_tf.partitioning import Layout
from switch_tf.partitioning.layout import choose
from switch_tf.refusals import Refusal

DATA = (("batch", "data"), ("group", "data"))
DATA_MODEL = (*DATA, ("mlp", "model"))
EXPERT = (*DATA, ("expert", "data"))
MODEL = (("heads", "model"), ("mlp", "model"), ("expert_mlp", "model"), ("vocab", "model"))
OVER_BOTH = (("batch", ("data", "expert")), ("group", ("data", "expert")), ("expert", "expert"))
OVER_ALL = ("data", "expert", "fsdp")
EXCHANGE = ("expert_embed", "model")

# File of gin/layouts -> mesh on 8 devices, rules, rules at rest.
SHIPPED = {
    "single": ({"data": 1}, (), ()),
    "auto": ({"data": 1}, (), ()),
    "data": ({"data": 8}, DATA, ()),
    "expert": ({"data": 8}, EXPERT, ()),
    "fully_sharded": ({"data": 8}, EXPERT, (("vocab", "data"), ("mlp", "data"), ("kv", "data"))),
    "data_expert": ({"expert": 4, "data": 2}, OVER_BOTH, ()),
    "fully_sharded_experts": (
        {"expert": 2, "fsdp": 2, "data": 2},
        (("batch", OVER_ALL), ("group", OVER_ALL), ("expert", ("expert", "fsdp"))),
        (("vocab", "fsdp"), ("mlp", "fsdp"), ("kv", "fsdp"), ("expert_mlp", "data"))),
    "data_model": ({"data": 4, "model": 2}, (*DATA, *MODEL), ()),
    "expert_model": ({"data": 4, "model": 2}, (*EXPERT, *MODEL, EXCHANGE), ()),
    "fully_sharded_model": ({"data": 4, "model": 2}, (*EXPERT, *MODEL, EXCHANGE), (("embed", "data"),)),
}


# Devices, and the presets that each is meant for.
PODS = {"pod_256": (256, ("switch_base_128", "switch_large_128")), "pod_512": (512, ("switch_xxl_128",)),
        "pod_256_experts": (256, ("switch_base_128",)), "pod_512_experts": (512, ("switch_c_2048",)),
        "pod_512_fully_sharded": (512, ("switch_xxl_128",))}


@pytest.fixture
def shipped_layout():
    """Reads a file of gin/layouts."""
    def read(name, *bindings):
        return gin_syntax.read([f"gin/layouts/{name}.gin"], bindings).check().part(parts.LAYOUT).make()

    return read


# Meshes.


def test_the_default_is_one_device_and_splits_nothing():
    layout = Layout()
    assert (layout.mesh, layout.num_devices, layout.rules, layout.backend) == ({}, 1, (), "auto")
    assert layout.is_auto and not Layout("data=1").is_auto and not Layout("", DATA).is_auto


def test_a_mesh_is_read_in_order():
    layout = Layout(" model = 2,data=4 ", rules=(("batch", "data"), ("expert", "data"), ("mlp", "model")))
    assert list(layout.mesh.items()) == [("model", 2), ("data", 4)]
    assert layout.num_devices == 8


def test_a_mesh_may_be_empty():
    layout = Layout("")
    assert (layout.mesh, layout.num_devices) == ({}, 1)


@pytest.mark.parametrize("mesh_shape", ["data", "data=", "=2", "data=0", "data=-1", "data=x", "data=1.5",
                                        "data=\u00b2", "data=1,data=1", "data=2;model=2"])
def test_a_mesh_that_cannot_be_read_is_refused(mesh_shape):
    with pytest.raises(ValueError, match=re.escape('MESH_SHAPE must read like "data=4,model=2", each axis once, not '
                                                   f"{mesh_shape!r}.")):
        Layout(mesh_shape)


@pytest.mark.parametrize("mesh_shape", [None, 4, {"data": 4}, ("data=4",)])
def test_a_mesh_that_is_no_text_is_refused(mesh_shape):
    message = f'MESH_SHAPE must be text like "data=4,model=2", not {mesh_shape!r}.'
    with pytest.raises(ValueError, match=re.escape(message)):
        Layout(mesh_shape)


@pytest.mark.parametrize("name", ["rules", "at_rest_rules"])
@pytest.mark.parametrize("rule", ["batch", ("batch",), ("batch", "data", "model"), ("batch", None), None])
def test_a_rule_that_is_no_pair_of_axes_is_refused(name, rule):
    message = ("is a pair of a logical axis and a mesh axis, such as ('batch', 'data'), or several, such as ('batch', "
               f"('data', 'expert')), not {rule!r}.")
    with pytest.raises(ValueError, match=re.escape(message)):
        Layout("data=1", **{name: (("expert", "data"), rule)})


# Fitting a mesh to the devices.


@pytest.mark.parametrize(("mesh_shape", "num_devices", "mesh"), [
    ("", 8, {"data": 8}),
    ("", 1, {"data": 1}),
    ("model=2", 8, {"data": 4, "model": 2}),
    ("model=2", 2, {"data": 1, "model": 2}),
    ("model=1", 8, {"data": 8, "model": 1}),
    ("data=2", 8, {"data": 2, "model": 4}),
    ("data=4,model=2", 8, {"data": 4, "model": 2})])
def test_the_axis_that_is_left_out_takes_the_devices_that_remain(mesh_shape, num_devices, mesh):
    rules = DATA if not mesh_shape else (*DATA, *MODEL)
    layout = Layout(mesh_shape, rules, (("embed", "data"),), "dtensor").resolve(num_devices, "GPU")
    assert (layout.mesh, layout.num_devices) == (mesh, num_devices)
    assert (layout.rules, layout.at_rest_rules, layout.backend) == (rules, (("embed", "data"),), "dtensor")
    assert layout.resolve(num_devices, "GPU") == layout


def test_an_axis_of_rules_at_rest_may_be_left_out():
    assert Layout("", at_rest_rules=(("embed", "data"),)).resolve(4, "GPU").mesh == {"data": 4}


@pytest.mark.parametrize("layout", [Layout("data=1"), Layout("data=1,model=1")])
def test_a_mesh_of_one_uses_the_first_of_many_devices(layout):
    assert layout.resolve(8, "GPU") is layout
    assert Layout(backend="pjrt").resolve(8, "GPU") == Layout("data=1", backend="pjrt")


@pytest.mark.parametrize(("mesh_shape", "rules", "num_devices", "device_type", "message"), [
    ("data=3", DATA, 8, "CPU",
     "MESH_SHAPE 'data=3' is for 3 devices, but there are 8 (CPU); make the product of its sizes 8, or have 3 virtual "
     "devices on this machine's CPU with --devices=3."),
    ("data=4,model=2", DATA_MODEL, 1, "CPU",
     "MESH_SHAPE 'data=4,model=2' is for 8 devices, but there is 1 (CPU); make the product of its sizes 1, or have 8 "
     "virtual devices on this machine's CPU with --devices=8."),
    ("data=2", DATA, 8, "GPU",
     "MESH_SHAPE 'data=2' is for 2 devices, but there are 8 (GPU); make the product of its sizes 8."),
    ("model=3", DATA_MODEL, 8, "GPU",
     "MESH_SHAPE 'model=3' is for a multiple of 3 devices, but there are 8 (GPU); make the product of its sizes 8."),
    ("model=2", DATA_MODEL, 1, "CPU",
     "MESH_SHAPE 'model=2' is for a multiple of 2 devices, but there is 1 (CPU); make the product of its sizes 1, or "
     "have 2 virtual devices on this machine's CPU with --devices=2.")])
def test_a_mesh_that_does_not_fit_the_devices_is_refused(mesh_shape, rules, num_devices, device_type, message):
    layout = Layout(mesh_shape, rules)
    with pytest.raises(ValueError) as raised:
        layout.resolve(num_devices, device_type)
    assert str(raised.value) == message


@pytest.mark.parametrize("mesh_shape, rules, message", [
    ("dta=8", DATA, "must be one of 'data', not 'dta'. Did you mean 'data'?"),
    ("modle=2", DATA_MODEL, "must be one of 'data', 'model', not 'modle'. Did you mean 'model'?"),
    ("data=4,other=2", DATA, "must be one of 'data', not 'other'.")])
def test_devices_along_a_mesh_axis_without_a_rule_are_refused(mesh_shape, rules, message):
    with pytest.raises(Refusal) as refused:
        Layout(mesh_shape, rules)
    assert str(refused.value) == f"A mesh axis of MESH_SHAPE with several devices {message}"


def test_a_mesh_axis_of_one_device_needs_no_rule():
    assert Layout("data=8,model=1", DATA).num_devices == 8


def test_two_axes_cannot_both_take_the_devices_that_remain():
    with pytest.raises(ValueError) as raised:
        Layout("", DATA_MODEL)
    assert str(raised.value) == (
        "MESH_SHAPE '' leaves out the mesh axes data and model of the layout's rules, and only one may take the "
        'devices that remain; add "model=1" or more.')
    with pytest.raises(ValueError, match="'data=2' leaves out the mesh axes model and stage of"):
        Layout("data=2", DATA_MODEL, (("embed", "stage"),))
    assert Layout("model=1", DATA_MODEL).resolve(4, "CPU").mesh == {"data": 4, "model": 1}


# Rules.


def _spec(layout, axes, at_rest=False):
    """Its spec in short: None where a dimension is not split, and the name where one mesh axis splits it."""
    return tuple(entry[0] if len(entry) == 1 else entry or None for entry in layout.spec(axes, at_rest))


def test_dimensions_are_split_by_the_rules_of_their_axes():
    layout = Layout("data=4,model=2", (*EXPERT, *MODEL))
    assert _spec(layout, ("batch", "length", "embed")) == ("data", None, None)
    assert _spec(layout, ("embed", "heads", "kv")) == (None, "model", None)
    assert _spec(layout, ("expert", "embed", "expert_mlp")) == ("data", None, "model")
    assert _spec(layout, (None, None)) == (None, None)
    assert _spec(layout, ()) == ()


def test_a_mesh_axis_splits_the_first_dimension_that_has_a_rule_for_it():
    layout = Layout("data=4", EXPERT)
    assert _spec(layout, ("expert", "group", "capacity", "embed")) == ("data", None, None, None)
    assert _spec(layout, ("group", "expert", "capacity", "embed")) == ("data", None, None, None)
    # The group dimension of dispatched tokens is annotated None, so that it has no claim.
    assert _spec(layout, (None, "expert")) == (None, "data")


def test_a_rule_of_several_mesh_axes_gives_those_that_no_dimension_before_it_has():
    layout = Layout("data=2,expert=4", OVER_BOTH)
    assert _spec(layout, ("batch", "length", "embed")) == (("data", "expert"), None, None)
    assert _spec(layout, (None, "group", "capacity", "embed")) == (None, ("data", "expert"), None, None)
    assert _spec(layout, ("expert", "group", "capacity", "embed")) == ("expert", "data", None, None)
    assert _spec(layout, ("group", "expert", None, None)) == (("data", "expert"), None, None, None)
    assert [layout.num_pieces(axis) for axis in ("batch", "group", "expert")] == [8, 8, 4]
    assert layout.piece((16, 8, 3), layout.spec(("batch", "expert", None))) == (2, 8, 3)
    assert layout.piece((4, 16, 3), layout.spec(("expert", "group", None))) == (1, 8, 3)
    stored = Layout("data=2,expert=4", OVER_BOTH, (("embed", "data"), ("mlp", "expert")))
    assert _spec(stored, ("expert", "embed", "mlp"), at_rest=True) == ("expert", "data", None)
    assert _spec(stored, ("embed", "mlp"), at_rest=True) == ("data", "expert")


def test_axes_over_several_are_those_that_really_are():
    assert Layout("data=2,expert=4", OVER_BOTH).axes_over_several == ["batch", "group"]
    assert Layout("data=1,expert=8", OVER_BOTH).axes_over_several == []
    assert Layout("data=8", EXPERT).axes_over_several == []


def test_rules_of_several_axes_leave_one_open():
    assert Layout("expert=4", OVER_BOTH).resolve(8, "TPU").mesh == {"data": 2, "expert": 4}
    with pytest.raises(ValueError, match="leaves out the mesh axes data and expert"):
        Layout("", OVER_BOTH)


@pytest.mark.parametrize("wrong", [(), ("data", "data"), ("data", 2), {"data", "expert"}])
def test_the_mesh_axes_of_a_rule_are_names_each_once(wrong):
    with pytest.raises(ValueError, match=r"or several, such as \('batch', \('data', 'expert'\)\), not "):
        Layout("data=2,expert=4", (("batch", wrong),))


def test_weights_are_stored_over_those_axes_of_their_rule_that_nothing_else_has():
    layout = Layout("data=2,expert=4", OVER_BOTH, (("mlp", ("data", "expert")), ("expert_mlp", ("expert", "data"))))
    assert _spec(layout, ("embed", "mlp"), at_rest=True) == (None, ("data", "expert"))
    assert _spec(layout, ("embed", "mlp")) == (None, None)
    assert _spec(layout, ("expert", "embed", "expert_mlp"), at_rest=True) == ("expert", None, "data")
    assert layout.piece((16, 24), layout.spec(("embed", "mlp"), at_rest=True)) == (16, 3)
    assert layout.axes_over_several == ["batch", "group"]
    with pytest.raises(ValueError, match=r"The layout cuts d_ff \('mlp', 20\) over the 8 devices of mesh axis 'data' "
                       "times 'expert', which must divide it"):
        layout.check_sizes({"mlp": 20})


def test_rules_at_rest_split_what_is_stored_and_not_what_is_used():
    layout = Layout("data=4,model=2", (*EXPERT, *MODEL), (("embed", "data"),))
    assert _spec(layout, ("embed", "mlp")) == (None, "model")
    assert _spec(layout, ("embed", "mlp"), at_rest=True) == ("data", "model")
    assert _spec(layout, ("vocab", "embed"), at_rest=True) == ("model", "data")
    # The data axis is taken by the experts, and once more by nothing.
    assert _spec(layout, ("expert", "embed", "expert_mlp"), at_rest=True) == ("data", None, "model")
    assert _spec(layout, ("embed", "embed"), at_rest=True) == ("data", None)
    assert _spec(layout, ("embed", "router_expert"), at_rest=True) == ("data", None)
    assert _spec(layout, ("relpos_buckets",), at_rest=True) == (None,)


def test_a_rule_at_rest_does_not_move_a_dimension_that_is_split_already():
    layout = Layout("data=2,model=2", (("embed", "model"),), (("embed", "data"),))
    assert _spec(layout, ("embed", "mlp"), at_rest=True) == ("model", None)


def test_pieces_of_an_axis_are_the_devices_of_its_mesh_axis():
    layout = Layout("data=4,model=2", (*EXPERT, *MODEL), (("embed", "data"),))
    assert [layout.num_pieces(axis) for axis in ("batch", "group", "heads")] == [4, 4, 2]
    assert layout.num_pieces("length") == 1
    assert layout.num_pieces("embed") == 1  # stored in pieces, but used whole


def test_rules_name_known_axes():
    with pytest.raises(ValueError, match=r"splits the unknown logical axis 'experts'; the axes are \['batch', "):
        Layout(rules=(("experts", "data"),))
    with pytest.raises(ValueError, match="splits the unknown logical axis 'd_model'"):
        Layout(at_rest_rules=(("d_model", "data"),))


def test_an_unknown_backend_names_the_nearest():
    with pytest.raises(ValueError, match=r"backend must be one of 'auto', .*, not 'mirorred'\. "
                                         r"Did you mean 'mirrored'\?"):
        Layout(backend="mirorred")


# Sizes.


@pytest.mark.parametrize(("sizes", "message"), [
    ({"heads": 6},  # of 1 to 4 devices 3 divide 6
     "The layout cuts num_heads ('heads', 6) over the 4 devices of mesh axis 'model', which must divide it; make it a "
     "multiple of 4, or set MESH_SHAPE to model=3."),
    ({"vocab": 32101},
     "The layout cuts vocab_size ('vocab', 32101) over the 4 devices of mesh axis 'model', which must divide it; make "
     "it a multiple of 4, or set MESH_SHAPE to model=1."),
    ({"heads": 8, "expert": 12},  # 6 of 1 to 8
     "The layout cuts num_experts ('expert', 12) over the 8 devices of mesh axis 'data', which must divide it; make it "
     "a multiple of 8, or set MESH_SHAPE to data=6."),
    ({"embed": 20},  # 5 of 1 to 8
     "The layout cuts d_model ('embed', 20) over the 8 devices of mesh axis 'data', which must divide it; make it a "
     "multiple of 8, or set MESH_SHAPE to data=5."),
    ({"mlp": 2}, "The layout cuts d_ff ('mlp', 2) over the 4 devices")])
def test_a_size_that_the_mesh_does_not_divide_is_refused(sizes, message):
    layout = Layout("data=8,model=4", (*EXPERT, *MODEL), (("embed", "data"),))
    with pytest.raises(ValueError) as raised:
        layout.check_sizes(sizes)
    assert str(raised.value).startswith(message)


def test_sizes_divide_over_all_of_the_axes():
    layout = Layout("data=2,model=4", (*DATA, ("mlp", ("data", "model"))))
    layout.check_sizes({"mlp": 24})
    with pytest.raises(ValueError, match=r"The layout cuts d_ff \('mlp', 12\) over the 8 devices of mesh axis 'data' "
                       "times 'model', which must divide it; make it a multiple of 8, or set MESH_SHAPE to sizes whose "
                       "product is 6."):
        layout.check_sizes({"mlp": 12})


def test_sizes_that_divide_or_are_not_split_are_fine():
    layout = Layout("data=8,model=4", (*EXPERT, *MODEL), (("embed", "data"),))
    layout.check_sizes({"expert": 8, "heads": 12, "vocab": 32, "embed": 24, "kv": 7})
    layout.check_sizes({})
    Layout("", EXPERT).check_sizes({"expert": 7})  # the open axis has no size yet


def test_bytes_stored_are_those_of_the_pieces():
    layout = Layout("one=1,a=4,b=2", (("expert", ("one", "a")), ("batch", ("a", "b"))), (("embed", ("b", "a")),))
    weights = [Weight("experts", 3, (8, 16, 32), ("expert", "embed", "expert_mlp")),  # over a and b
               Weight("embedding", 1, (100, 16), ("vocab", "embed")),  # over b and a
               Weight("norm", 1, (7,), ("vocab",))]
    assert layout.stored_bytes(weights) == 8 * (3 * 2 * 8 * 32 + 100 * 2 + 7)


# Shipped files.


def test_every_shipped_layout_is_listed_here():
    assert {path.stem for path in shipped_gin.folder().glob("gin/layouts/*.gin")} == {*SHIPPED, *PODS}


@pytest.mark.parametrize(("pod", "preset"), [(pod, preset) for pod, (_, presets) in PODS.items() for preset in presets])
def test_a_pod_fits_the_presets_it_is_meant_for(shipped_layout, pod, preset):
    num_devices, _ = PODS[pod]
    layout, config = shipped_layout(pod).resolve(num_devices, "TPU"), SwitchConfig.from_preset(preset)
    layout.check_sizes(config.axis_sizes)
    if pod in ("pod_256_experts", "pod_512_fully_sharded"):  # whose first lines say so
        config = dataclasses.replace(config, num_groups_multiple=num_devices)
    assert config.num_groups_multiple % layout.num_pieces("group") == 0


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_layout_has_the_rules_of_its_name_and_takes_all_devices(shipped_layout, name):
    mesh, rules, at_rest_rules = SHIPPED[name]
    layout = shipped_layout(name)
    assert set(layout.rules) == set(rules) and len(layout.rules) == len(rules)
    assert layout.at_rest_rules == at_rest_rules
    assert layout.backend == "auto"
    assert layout.resolve(8, "CPU").mesh == mesh


IN_PIECES = "fully_sharded_experts"


@pytest.mark.parametrize(("preset", "num_devices", "name", "mesh"), [
    ("switch_base_8", 4, "fully_sharded", "data=4"), ("switch_base_8", 8, "fully_sharded", "data=8"),
    ("switch_base_8", 16, IN_PIECES, "expert=1,fsdp=8,data=2"), ("switch_base_128", 16, IN_PIECES, "expert=2,fsdp=8,"
                                                                                               "data=1"),
    ("switch_base_8", 512, IN_PIECES, "expert=1,fsdp=8,data=64"), ("switch_c_2048", 256, IN_PIECES, "expert=32,fsdp=8,"
                                                                                                "data=1"),
    ("switch_large_128", 256, "pod_256_experts", None), ("switch_base_128", 512, "pod_512_fully_sharded", None),
    ("switch_c_2048", 512, "pod_512_experts", "data=512"), ("t5_base", 8, "fully_sharded", "data=8"),
    ("t5_base", 64, IN_PIECES, "expert=8,fsdp=8,data=1"), (None, 8, "data", "data=8")])
def test_a_run_without_a_layout_gets_a_shipped_one(shipped_layout, preset, num_devices, name, mesh):
    file, layout = choose(num_devices, preset and SwitchConfig.from_preset(preset))
    assert file == f"gin/layouts/{name}.gin"
    assert (layout.rules, layout.at_rest_rules) == (shipped_layout(name).rules, shipped_layout(name).at_rest_rules)
    layout = layout.resolve(num_devices, "TPU")
    assert layout.num_devices == num_devices and (mesh is None or layout.mesh_shape == mesh)


def test_every_slice_has_a_layout_for_every_kind_of_model():
    for preset in ("switch_tiny", "switch_base_8", "switch_base_256", "switch_xxl_128", "t5_1_1_xxl"):
        config = SwitchConfig.from_preset(preset)
        for power in range(1, 10):
            file, layout = choose(2**power, config)
            layout.resolve(2**power, "TPU").check_sizes(config.axis_sizes)
            assert layout.num_pieces("batch") in (1, 2**power) and file != "gin/layouts/data.gin"


@pytest.mark.parametrize(("changes", "mesh"), [
    ({"num_experts": 12}, "expert=1,fsdp=4,data=2"), ({"num_experts": 7}, "expert=1,fsdp=1,data=8"),
    ({"num_experts": 8, "d_kv": 3}, "data=8")])
def test_sizes_that_devices_do_not_divide_are_copied(changes, mesh):
    file, layout = choose(8, dataclasses.replace(SwitchConfig.from_preset("switch_tiny"), **changes))
    assert layout.resolve(8, "GPU").mesh_shape == mesh
    assert file == f"gin/layouts/{'data' if mesh == 'data=8' else IN_PIECES}.gin"


def test_a_shipped_layout_takes_another_mesh(shipped_layout):
    assert shipped_layout("expert_model", "MESH_SHAPE='model=4'").resolve(8, "CPU").mesh == {"data": 2, "model": 4}
    assert shipped_layout("data", "MESH_SHAPE='data=4'").num_devices == 4
    assert shipped_layout("data", "Layout.backend='mirrored'").backend == "mirrored"


def test_a_layout_of_one_device_is_refused_to_several_processes():
    Layout("data=1").check_processes(1)
    Layout("data=2").check_processes(2)
    Layout("model=1", rules=(("batch", "data"), ("mlp", "model"))).check_processes(2)  # "data" takes them
    with pytest.raises(Refusal, match="A layout of one device leaves some of the 2 processes without any; use"):
        Layout("data=1").check_processes(2)
