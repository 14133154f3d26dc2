import functools
import hashlib
import json
import math
import subprocess
import sys

import pytest

from switch_tf import SwitchConfig
from switch_tf.optim import factoring


@pytest.fixture
def inspect(call):
    """A function that inspects; returns the JSON object and the text."""
    return functools.partial(call, "inspect --json")


@pytest.mark.parametrize(("preset", "shown"), [("switch_base_128", "7.42B"), ("switch_xxl_128", "394.7B"),
                                               ("switch_c_2048", "1571.3B")])
def test_the_totals_of_the_paper_are_shown(inspect, preset, shown):
    result, text = inspect(preset)
    assert shown in text
    assert result["num_parameters"] == SwitchConfig.from_preset(preset).num_parameters
    assert result["flops_per_sequence"] == SwitchConfig.from_preset(preset).flops_per_sequence()
    assert result["bytes"]["weights"] == 4 * result["num_parameters"]


def num_slot_elements(shape, axes):
    slots = factoring.slot_dimensions(shape, factoring.factor_dimensions(shape, axes))
    return sum(math.prod(shape[dim] for dim in dims) for dims in slots.values())


def test_optimizer_bytes_are_adafactors_factored_slots(inspect):
    result, _ = inspect("switch_tiny")
    config = SwitchConfig.from_preset("switch_tiny")
    # embedding: 4096 + 128; each attention kernel: 128 + 4 * 32
    assert num_slot_elements((4096, 128), ("vocab", "embed")) == 4096 + 128
    assert num_slot_elements((128, 4, 32), ("embed", "heads", "kv")) == 128 + 128
    assert result["bytes"]["optimizer"] == 4 * sum(
        weight.count * num_slot_elements(weight.shape, weight.axes) for weight in config.weights())


def test_lengths_change_the_flops_alone(inspect):
    short, _ = inspect("t5_small", "--inputs_length=256", "--targets_length=57")
    full, _ = inspect("t5_small")
    assert 2 * short["flops_per_sequence"] == full["flops_per_sequence"]
    assert short["num_parameters"] == full["num_parameters"]


def test_a_gin_file_with_bindings_can_be_inspected(inspect, tmp_path):
    (tmp_path / "mine.gin").write_text("include 'gin/models/switch_tiny.gin'\nNUM_EXPERTS = 4\n")
    four, _ = inspect(str(tmp_path / "mine.gin"))
    sixteen, _ = inspect("switch_tiny", "--gin.NUM_EXPERTS=16")
    assert four["num_parameters"] < 3280640 < sixteen["num_parameters"]


def test_a_checkpoint_is_inspected_from_its_description(inspect, refused, tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "step_00000004"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text(json.dumps({
        "format_version": 3, "step": 4, "files": {"state.index": 10, "state.data": 90},
        "variables": {"model/a": {"shape": [2, 3], "dtype": "float32"},
                      "optimizer/b": {"shape": [5], "dtype": "float32"}}}))
    (folder / "state.index").write_bytes(bytes(10))
    (folder / "state.data").write_bytes(bytes(90))
    for what in (folder, folder.parents[1]):
        result, _ = inspect(str(what))
        assert (result["checkpoint"], result["step"], result["num_parameters"]) == (str(folder), 4, 6)
        assert result["bytes"] == {"weights": 24, "optimizer": 20, "on_disk": 100}
    (folder / "state.data").write_bytes(bytes(80))
    assert f"{folder / 'state.data'} should have 90 bytes but has 80" in refused(f"inspect {folder}")


# Parameters of switch_base_8. 62 norms of 768; 12 routers of 768 x 8; 2 position biases of 12 x 32.
EMBEDDING, ATTENTION, POSITION_BIAS = 32128 * 768, 144 * 768 * 768, 768
NORM, FEED_FORWARD, ROUTER, EXPERTS = 62 * 768, 24 * 768 * 3072, 12 * 768 * 8, 24 * 8 * 768 * 3072


@pytest.fixture
def per_device(inspect):
    """A function from a layout and a mesh to the bytes of the weights and of the slots of one device."""

    def look(layout, mesh, *arguments):
        result, text = inspect("switch_base_8", f"--gin_file=gin/layouts/{layout}.gin",
                               f"--gin.MESH_SHAPE={mesh!r}", *arguments)
        assert f"Bytes per device under {mesh}\n" in text
        found = result["bytes_per_device"]
        assert found["total"] == found["weights"] + found["optimizer_slots"]
        assert ",".join(f"{axis}={size}" for axis, size in found["mesh"].items()) == mesh
        return found["weights"], found["optimizer_slots"]

    return look


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_expert_parallelism_divides_the_experts_and_their_slots_alone(per_device, devices):
    # Rows and columns of a factored kernel: 32128 + 768; 768 + 768; 768 + 3072. Position biases, norms and routers
    # keep a whole slot.
    dense_slots = 32896 + 144 * 1536 + POSITION_BIAS + NORM + 24 * 3840 + ROUTER
    expert_slots = 24 * 8 * 3840
    dense = EMBEDDING + ATTENTION + POSITION_BIAS + NORM + FEED_FORWARD + ROUTER
    assert (dense, EXPERTS, dense_slots, expert_slots) == (166354176, 452984832, 468352, 737280)
    assert per_device("expert", f"data={devices}") == (
        4 * (dense + EXPERTS // devices), 4 * (dense_slots + expert_slots // devices))


def test_fully_sharded_divides_vocabulary_hidden_units_and_heads_widths_too(per_device):
    # Experts hold the data axis already, so they are divided by 8, not by 64; norms and routers have none of the three.
    weights = (EMBEDDING + ATTENTION + FEED_FORWARD + EXPERTS) // 8 + NORM + ROUTER + POSITION_BIAS
    # Of each dense kernel's slots one part of two: 32128 / 8 = 4016, 12 heads * (64 / 8) = 96, 3072 / 8 = 384.
    slots = ((4016 + 768) + 144 * (768 + 96) + POSITION_BIAS + NORM + 24 * (768 + 384) + ROUTER
             + 24 * (8 // 8) * (768 + 3072))
    assert per_device("fully_sharded", "data=8") == (4 * weights, 4 * slots)


def test_model_parallelism_divides_heads_hidden_units_and_the_vocabulary(per_device):
    weights = (EMBEDDING + ATTENTION + POSITION_BIAS + FEED_FORWARD + EXPERTS) // 4 + NORM + ROUTER
    # Columns are divided by 4: 32128 -> 8032, 768 -> 192, 3072 -> 768; rows are whole.
    slots = ((768 + 8032) + 144 * (768 + 192) + POSITION_BIAS // 4 + NORM + 24 * (768 + 768) + ROUTER
             + 24 * 8 * (768 + 768))
    assert per_device("data_model", "data=2,model=4") == (4 * weights, 4 * slots)


def test_back_ends_that_copy_the_model_keep_it_whole(per_device):
    assert per_device("data_model", "data=2,model=4", "--gin.layout.Layout.backend='tpu'") == (4 * 619339008, 4822528)


def test_a_layout_adds_one_key_and_changes_no_other(inspect):
    files = ["--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/layouts/expert.gin"]
    with_layout, _ = inspect(*files, "--gin.MESH_SHAPE='data=2'")
    without, text = inspect("switch_tiny")
    assert "per device" not in text
    assert with_layout.pop("bytes_per_device")["mesh"] == {"data": 2}
    assert with_layout == without


def test_tensorflow_is_not_imported_without_a_layout(tmp_path):
    (tmp_path / "checkpoint.json").write_text('{"format_version": 3, "step": 4, "files": {}, "variables": {}}')
    script = ("import sys\nfrom switch_tf.cli import main\n"
              f"for what in ('switch_tiny', '--gin_file=gin/models/switch_tiny.gin', {str(tmp_path)!r}):\n"
              "    assert main.main(['inspect', what]) == 0\n"
              "    assert not {'tensorflow', 'keras'} & set(sys.modules), f'{what} imports too much'")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("layout", "mesh", "hint"), [
    ("expert", "", "mesh axis 'data', for example --gin.MESH_SHAPE=\"'data=8'\"."),
    ("data_model", "model=2", "mesh axis 'data', for example --gin.MESH_SHAPE=\"'data=8,model=2'\".")])
def test_a_mesh_that_takes_the_devices_that_remain_has_no_bytes_per_device(inspect, layout, mesh, hint):
    result, text = inspect("switch_base_8", f"--gin_file=gin/layouts/{layout}.gin",
                            f"--gin.MESH_SHAPE={mesh!r}")
    assert "bytes_per_device" not in result
    assert hint in text


def test_the_list_is_a_table_of_sizes(call):
    out, _ = call("inspect --list")
    header, *rows = [" ".join(line.split()) for line in out.splitlines()]
    assert header == "preset parameters d_model layers heads experts"
    assert {"switch_base_8 619.3M 768 12 + 12 12 8", "t5_base 222.9M 768 12 + 12 12 dense"} <= set(rows)
    assert {"t5_11b", "mt5_xxl", "mswitch_base_128"} <= {row.split()[0] for row in rows}


def test_the_sizes_of_a_model_come_first(inspect):
    result, text = inspect("switch_tiny")
    assert text.startswith("Model\n  d_model ") and result["sizes"]["num_experts"] == 8
    chosen, text = inspect("--gin_file=gin/models/switch_tiny.gin", "--gin.SwitchConfig.expert_d_ff=64",
                            "--gin.SwitchConfig.encoder_sparse_indices=(0, 1)")
    assert chosen["sizes"]["encoder_sparse_indices"] == [0, 1] and "encoder_sparse_indices" in text
    assert text.count("0, 1\n") == 1 and chosen["sizes"]["expert_d_ff"] == 64
    dense, _ = inspect("t5_small")
    assert dense["sizes"]["num_experts"] == 0 and "encoder_sparse_step" not in dense["sizes"]


def test_a_folder_of_hugging_face_is_inspected(inspect, refused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({  # google/t5-v1_1-small's
        "model_type": "t5", "d_ff": 1024, "d_kv": 64, "d_model": 512, "feed_forward_proj": "gated-gelu",
        "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8, "pad_token_id": 0, "decoder_start_token_id": 0,
        "tie_word_embeddings": False, "vocab_size": 32128}))
    found, text = inspect(str(tmp_path))
    preset, _ = inspect("t5_1_1_small")
    assert found == preset
    assert "num_heads" in text
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "model_type" in refused("inspect .")


def _checkpoint(folder, step, content=b"weights", **description):
    path = folder / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "state.index").write_bytes(content)
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "checkpoint.json").write_text(json.dumps({
        "format_version": 4, "step": step, "variables": {}, "files": {"state.index": entry}, **description}))
    return path


def test_verify_reads_every_checkpoint_of_a_run_and_names_the_damaged_file(call, tmp_path):
    paths = [_checkpoint(tmp_path, step) for step in (1, 2)]
    paths.append(_checkpoint(tmp_path, 3, format_version=3, files={"state.index": 7}))
    assert call(f"inspect {tmp_path} --verify")[0].splitlines() == [
        f"{paths[0]} is whole.", f"{paths[1]} is whole.",
        f"{paths[2]} has files of the right sizes; its format has no sums to compare them with."]
    (paths[0] / "state.index").write_bytes(b"weighty")  # of the same size
    (paths[1] / "state.index").write_bytes(b"weight")
    result, err = call(f"inspect {tmp_path} --verify --json", status=1)
    assert [entry["is_whole"] for entry in result["checkpoints"]] == [False, False, True]
    assert f"{paths[0]} is damaged: state.index has the SHA-256 " in err
    assert f"{paths[1]} is damaged: {paths[1] / 'state.index'} should have 7 bytes but has 6;" in err
    call(f"inspect {paths[1]} --verify", status=1)
    (paths[1] / "checkpoint.json").unlink()
    assert "has no readable checkpoint.json" in call(f"inspect {paths[1]} --verify", status=1)[0]
