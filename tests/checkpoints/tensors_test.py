import dataclasses
import functools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer, data
from switch_tf.checkpoints import bundles, tensors
from switch_tf.checkpoints.checkpointer import Checkpointer
from switch_tf.checkpoints.folders import BrokenCheckpoint, describe, path_of, steps
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal


@functools.cache
def _made(config, seed):
    """Variables of a model and its optimizer, and their values."""
    keras.utils.set_random_seed(seed)
    model = SwitchTransformer(config)
    model.build()
    optimizer = Adafactor()
    optimizer.build(model.trainable_variables)
    variables = tensors.state_variables(model, optimizer)
    return variables, _values(variables)


def _state(config, seed=1):
    """The variables of a configuration and a seed, which tests share, with their first values."""
    variables, values = _made(config, seed)
    for name, variable in variables.items():
        variable.assign(values[name])
    return dict(variables)


def _batches(position=0):
    numbers = iter(tf.data.Dataset.range(100))
    for _ in range(position):
        next(numbers)
    return data.Batches({None: numbers}, batch_size=1)


def _save(folder, step, variables, batches=None, pending_metrics=None, **options):
    """Saves a step and waits for it; returns the checkpoint folder."""
    checkpointer = Checkpointer(folder, variables, batches or _batches(), **options)
    checkpointer.save(step, pending_metrics or {})
    checkpointer.wait()
    return path_of(folder, step)


def _values(variables):
    return {path: variable.numpy() for path, variable in variables.items()}


def test_weights_slots_and_data_position_come_back_exactly(tiny_config, tmp_path):
    saved = _state(tiny_config)
    path = _save(tmp_path, 7, saved, _batches(5), {"loss": [1.25, 3.0]})
    restored, batches = _state(tiny_config, seed=2), _batches()
    description = tensors.restore(path, restored, batches)
    for name, value in _values(saved).items():
        np.testing.assert_array_equal(value, restored[name].numpy())
    assert int(next(batches)) == 5
    assert description["step"] == 7
    assert description["pending_metrics"] == {"loss": [1.25, 3.0]}


def test_weights_of_another_dtype_are_converted(tiny_config, tmp_path):
    """As `verify-layout` does in float64 with a teacher, and `eval` with another ACTIVATION_DTYPE."""
    saved = _state(tiny_config)
    path = _save(tmp_path, 7, saved)
    wide = SwitchTransformer(tiny_config, dtype="float64")
    wide.build()
    tensors.restore(path, tensors.state_variables(wide))
    for name, variable in tensors.state_variables(wide).items():
        assert variable.dtype == "float64"
        np.testing.assert_array_equal(variable.numpy(), saved[name].numpy())


def test_an_unknown_dtype_in_a_description_changes_nothing(tiny_config, tmp_path):
    saved = _state(tiny_config)
    path = _save(tmp_path, 7, saved)
    description = json.loads((path / "checkpoint.json").read_text())
    del description["sha256"]
    for variable in description["variables"].values():
        variable["dtype"] = "banana"
    (path / "checkpoint.json").write_text(json.dumps(description))
    restored = _state(tiny_config, seed=2)
    tensors.restore(path, restored)
    for name, value in _values(saved).items():
        np.testing.assert_array_equal(value, restored[name].numpy())


def test_a_dense_model_takes_the_weights_that_a_sparse_one_has_too(tiny_config, tmp_path):
    """A decoder layer more, a narrower d_ff and no experts: whatever differs in name or shape keeps its value."""
    saved = _state(tiny_config)
    path = _save(tmp_path, 7, saved)
    dense = _state(dataclasses.replace(tiny_config, num_experts=0, d_ff=24, num_decoder_layers=3), seed=2)
    dense = {name: variable for name, variable in dense.items() if name.startswith("model/")}
    before = _values(dense)
    initial = tensors.InitialWeights(path)
    others = tensors.start(initial, dense, is_matching=True)
    assert initial.description["step"] == 7
    for name, value in _values(dense).items():
        np.testing.assert_array_equal(value, before[name] if name in others else saved[name].numpy())
    kernels = {f"model/{stack}/layers_{index}/mlp/{kernel}" for stack, depth in (("encoder", 2), ("decoder", 2))
               for index in range(depth) for kernel in ("wi", "wo")}
    assert set(others) == kernels | {name for name in dense if name.startswith("model/decoder/layers_2/")}


def test_a_checkpoint_without_a_matching_weight_is_refused_as_is_a_damaged_one(tiny_config, tmp_path):
    path = _save(tmp_path, 7, _state(tiny_config))
    narrow = _state(dataclasses.replace(tiny_config, d_model=24, d_kv=4, num_heads=3, vocab_size=400))
    narrow = {name: variable for name, variable in narrow.items() if name.startswith("model/")}
    with pytest.raises(Refusal, match="has no variable with the name and the shape of one of this model; use another"):
        tensors.start(tensors.InitialWeights(path), narrow, is_matching=True)
    data = path / "state.data-00000-of-00001"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(BrokenCheckpoint, match="is damaged"):
        tensors.start(tensors.InitialWeights(path), _state(tiny_config), is_matching=True)


def test_the_description_names_every_variable_with_shape_dtype_and_axes(tiny_config, tmp_path):
    variables = _state(tiny_config)
    description = describe(_save(tmp_path, 1, variables, keep=3))
    assert set(description["variables"]) == set(variables)
    assert description["variables"]["model/encoder/layers_1/mlp/experts/wi"] == {
        "shape": [4, 16, 32], "dtype": "float32", "logical_axes": ["expert", "embed", "expert_mlp"]}
    assert any(
        path.startswith("optimizer/") and "iteration" in path for path in description["variables"])


def test_only_the_newest_are_kept(tiny_config, tmp_path):
    variables = _state(tiny_config)
    for step in (1, 2, 3):
        _save(tmp_path, step, variables, keep=2)
    assert steps(tmp_path) == [2, 3]


def _flipped(content, other):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:]


@pytest.mark.parametrize("damage", [lambda content, other: content[:len(content) // 2], _flipped,
                                    lambda content, other: other, lambda content, other: None],
                         ids=["truncated", "flipped", "swapped", "missing"])
def test_damage_of_any_file_is_recognised(tiny_config, tmp_path, damage):
    """Also a bit in the middle of a file, and the same file of another step."""
    variables, batches = _state(tiny_config), _batches()
    path = _save(tmp_path, 1, variables, batches, keep=2)
    variables["model/encoder/encoder_norm/scale"].assign_add(np.ones(16))
    next(batches)
    other = _save(tmp_path, 2, variables, batches, keep=2)
    files = sorted(path.iterdir())
    assert [file.name for file in files] == ["checkpoint.json", "data_position.data-00000-of-00001",
                                             "data_position.index", "state.data-00000-of-00001", "state.index"]
    for file in files:
        content = file.read_bytes()
        changed = damage(content, (other / file.name).read_bytes())
        assert changed != content
        file.unlink() if changed is None else file.write_bytes(changed)
        with pytest.raises(BrokenCheckpoint, match="should have|no readable checkpoint.json|is damaged"):
            tensors.restore(path, variables, batches)
        file.write_bytes(content)
    assert tensors.restore(path, variables, batches)["step"] == 1


def test_a_changed_letter_of_the_description_is_recognised(tiny_config, tmp_path):
    path = _save(tmp_path, 1, _state(tiny_config))
    file = path / "checkpoint.json"
    file.write_text(file.read_text().replace('"embed"', '"embde"', 1))
    with pytest.raises(BrokenCheckpoint, match="its SHA-256 is not the recorded one"):
        describe(path)


def test_another_models_checkpoint_is_refused_by_its_first_different_variable(tiny_config, tmp_path):
    path = _save(tmp_path, 1, _state(tiny_config))
    with pytest.raises(ValueError, match=r"model/encoder/layers_0/mlp/wi has shape \[16, 32\] in .* but \[16, 64\]"):
        tensors.restore(path, _state(dataclasses.replace(tiny_config, d_ff=64)))
    with pytest.raises(ValueError, match="has no model/encoder/layers_2"):
        tensors.restore(path, _state(dataclasses.replace(tiny_config, num_encoder_layers=4)))


def test_a_deeper_models_checkpoint_is_refused_by_a_shallower_one_also_for_its_weights_alone(tiny_config, tmp_path):
    path = _save(tmp_path, 1, _state(tiny_config))
    shallower = _state(dataclasses.replace(tiny_config, num_decoder_layers=1, decoder_sparse_step=0))
    weights = {name: variable for name, variable in shallower.items() if name.startswith("model/")}
    for variables in (shallower, weights):
        before = _values(variables)
        with pytest.raises(ValueError, match="has model/decoder/layers_1/.*, which this model or optimizer lacks"):
            tensors.restore(path, variables)
        assert all((before[name] == value).all() for name, value in _values(variables).items())


def test_a_constant_learning_rate_is_the_configurations_and_not_the_checkpoints(tiny_config, tmp_path):
    variables = _state(tiny_config)
    assert not [name for name in variables if "learning_rate" in name]
    path = _save(tmp_path, 1, variables)
    description = describe(path)  # earlier versions saved it
    description["variables"]["optimizer/adafactor/learning_rate"] = {"shape": [], "dtype": "float32"}
    (path / "checkpoint.json").write_text(json.dumps(description))
    tensors.restore(path, variables)


def test_a_write_that_fails_leaves_the_older_checkpoints_and_no_rubbish(tiny_config, tmp_path, monkeypatch):
    variables = _state(tiny_config)
    _save(tmp_path, 1, variables, keep=3)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundles.json_lines, "dumps", full)
    with pytest.raises(Refusal, match="The checkpoint of step 2 could not be written .*No space left"):
        _save(tmp_path, 2, variables, keep=3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000001"]


@pytest.mark.parametrize("call", range(3))
def test_a_write_that_fails_in_another_process_fails_here(tiny_config, tmp_path, monkeypatch, call):
    variables, partitioner = _state(tiny_config), Partitioner()
    _save(tmp_path, 1, variables, keep=3)
    flags = iter([False] * call + [True])
    monkeypatch.setattr(partitioner, "any_process", lambda flag: flag or next(flags))
    with pytest.raises(Refusal, match=r"step 2 could not be written .*\(another process could not write its part"):
        _save(tmp_path, 2, variables, keep=3, partitioner=partitioner)
    assert "tmp.step_00000002" not in [entry.name for entry in tmp_path.iterdir()]
    assert not list(flags) and 1 in steps(tmp_path)


def test_a_state_that_is_not_finite_is_not_saved(tiny_config, tmp_path):
    variables = _state(tiny_config)
    variables["model/encoder/encoder_norm/scale"].assign([1.0] * 15 + [np.inf])
    with pytest.raises(BrokenCheckpoint, match="model/encoder/encoder_norm/scale is not finite at step 4"):
        _save(tmp_path, 4, variables, keep=3)
    assert not list(tmp_path.iterdir())
