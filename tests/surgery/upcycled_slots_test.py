"""Copies of a dense layer with copies of its slots take the dense layer's next step."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from switch_tf import SwitchTransformer, conversion
from switch_tf.checkpoints import folders
from switch_tf.cli import main
from switch_tf.conversion import model_gin
from switch_tf.conversion.weight_source import variables_of
from switch_tf.optim.adafactor import Adafactor
from switch_tf.surgery import upcycling
from switch_tf.surgery.kernels import Changes
from tests.conversion.shared import built

EXPERTS = 4


@pytest.fixture
def dense(shallow_config):
    return built(dataclasses.replace(shallow_config, num_experts=0, activation="geglu"))


def trained(model, random, steps=3):
    """An Adafactor after some steps with random gradients."""
    optimizer = Adafactor(0.1)
    for _ in range(steps):
        optimizer.apply_gradients([(random.standard_normal(variable.shape).astype("float32"), variable)
                                   for variable in model.trainable_variables])
    return optimizer


def expanded(name, values):
    """The dense values of a weight of the sparse model, for each expert where it has experts."""
    return np.stack([values] * EXPERTS) if "/experts/" in name else values


def test_the_next_step_of_every_expert_is_that_of_the_dense_layer(dense):
    random = np.random.default_rng(0)
    optimizer = trained(dense, random)
    config = dataclasses.replace(dense.config, num_experts=EXPERTS)
    sparse = upcycling.upcycle(dense, config, Changes())
    copied = upcycling.upcycled_adafactor(dense, optimizer, sparse)
    assert int(copied.iterations) == 3
    old, new = variables_of(dense), variables_of(sparse)
    gradients = {name: random.standard_normal(variable.shape).astype("float32") for name, variable in old.items()}
    dense_name = {name: name.replace("/experts/", "/") for name in new if "/router/" not in name}

    copied.learning_rate = 0.1
    optimizer.apply_gradients([(gradients[name], old[name]) for name in old])
    copied.apply_gradients([(expanded(name, gradients[dense_name[name]]) if name in dense_name
                            else np.zeros(new[name].shape, "float32"), new[name]) for name in new])
    assert sum("/experts/" in name for name in dense_name) == 2 * 3
    for name, origin in dense_name.items():
        np.testing.assert_allclose(new[name].numpy(), expanded(name, old[origin].numpy()), rtol=1e-6, atol=1e-7,
                                   err_msg=name)


def test_narrow_experts_have_their_part_of_the_slots(dense):
    optimizer = trained(dense, np.random.default_rng(1))
    config = dataclasses.replace(dense.config, num_experts=EXPERTS, expert_d_ff=dense.config.d_ff // 2,
                                 routing_policy="top_n", num_selected_experts=2, allow_non_causal_decoder=True)
    copied = upcycling.upcycled_adafactor(dense, optimizer, upcycling.upcycle(dense, config, Changes()))
    slots = {variable.path: variable.numpy() for variable in copied.variables}
    for name, axis in (("wo", 0), ("wi_0", 1)):
        kernel = variables_of(dense)[f"encoder/layers_0/mlp/{name}"]
        before = {slot: values.numpy() for slot, values in optimizer.slots_of(kernel).items()}
        after = {slot: next(values for path, values in slots.items()
                            if path.endswith(f"encoder_layers_0_mlp_experts_{name}_{slot}")) for slot in before}
        by_unit = "v_col"  # over the hidden units, whichever dimension they are
        first, second = np.split(before[by_unit], 2)
        np.testing.assert_array_equal(after[by_unit], [first, second, first, second])
        np.testing.assert_array_equal(after["v_row"], [before["v_row"]] * EXPERTS)
        assert before["v_row"].shape == (kernel.shape[1 - axis],)


@pytest.fixture
def command(shallow_config, tmp_path, monkeypatch, capfd):
    """A function that upcycles in a folder with model files; returns the status and the text."""
    monkeypatch.chdir(tmp_path)
    for name, num_experts in (("sparse", EXPERTS), ("dense", 0)):
        config = dataclasses.replace(shallow_config, expert_dropout_rate=0.0, num_experts=num_experts)
        (tmp_path / f"{name}.gin").write_text(model_gin.gin_text(config))

    def command(*words):
        status = main.main(["upcycle", "--gin_file=sparse.gin", "--output=out", "--with_optimizer", *words])
        return status, "".join(capfd.readouterr())

    return command


def test_weights_without_slots_are_refused(dense, command, tmp_path):
    model = SwitchTransformer(dataclasses.replace(dense.config, activation="relu"))
    for write, message in ((conversion.to_switch_tf, "weights holds weights alone; leave out --with_optimizer."),
                           (conversion.to_hugging_face, "from checkpoints of t5x, mesh_tensorflow, switch_tf, and")):
        write(model, tmp_path / "weights")
        status, text = command("--from=weights")
        assert status == 2 and message in text and not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / "weights")


@pytest.mark.slow
def test_a_run_goes_on_with_the_optimizer_of_the_dense_run(command, train, tmp_path, capfd):
    words = ("gin/runs/pretrain.gin", "BATCH_SIZE=8", "EVAL_PERIOD=0")
    assert train("dense.gin", *words, "MODEL_DIR='dense'", "TRAIN_STEPS=2")[0] == 0
    status, text = command("--from=dense")
    assert status == 0 and "With the slots of Adafactor at step 2." in text, text
    description = folders.describe(tmp_path / "out")
    assert description["step"] == 2
    assert {"shape": [4, 16], "dtype": "float32"}.items() <= description["variables"][
        "optimizer/adafactor/switch_transformer_encoder_layers_0_mlp_experts_wo_v_row"].items()
    status, text = train("out/model.gin", *words, "MODEL_DIR='sparse'", "TRAIN_STEPS=4", "INITIAL_CHECKPOINT='out'",
                         "Run.initial_variables='with_optimizer'")
    assert status == 0 and "Starting from the weights and the optimizer of out, step 2" in text
    lines = [json.loads(line) for line in (tmp_path / "sparse" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [3, 4]
