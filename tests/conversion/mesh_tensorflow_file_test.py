"""Files of TensorFlow's checkpoints: which folders are recognised, and what is refused."""

import contextlib
import functools
import os

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, conversion
from switch_tf.conversion import formats, mesh_tensorflow_file
from switch_tf.conversion.formats import MESH_TENSORFLOW, T5X
from switch_tf.refusals import Refusal
from switch_tf.storage import places
from tests.conversion.mesh_tensorflow_checkpoints import write
from tests.conversion.shared import assert_same_values, refusal

VALUES = {"a/b": np.arange(6, dtype="float32").reshape(2, 3) / 3, "a/c": np.arange(3, dtype="float32")}


def opened(path):
    tensors = mesh_tensorflow_file.open_variables(mesh_tensorflow_file.prefix_of(path), lambda name: (
        name != "global_step"))
    return {name: tensor.read() for name, tensor in tensors.items()}


refused = functools.partial(refusal, opened)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_of_every_dtype_and_of_shards(num_shards, dtype, tmp_path):
    read = opened(write(tmp_path, VALUES, dtype=dtype, num_shards=num_shards))
    assert len(list(tmp_path.glob("*.data-*"))) == num_shards
    assert_same_values(read, {name: values.astype(dtype).astype("float32") for name, values in VALUES.items()})


def test_the_newest_checkpoint_is_the_one_that_the_file_names(tmp_path):
    write(tmp_path, VALUES)
    write(tmp_path, {"a/b": np.zeros((1,), "float32")}, step=10)
    assert opened(tmp_path).keys() == {"a/b"} and opened(tmp_path / "model.ckpt-7").keys() == VALUES.keys()
    # As of a folder that was downloaded, with the paths of the machine that wrote it.
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "gs://t5-data/pretrained_models/small/model.ckpt-7"\n'
                                         'all_model_checkpoint_paths: "gs://t5-data/x/model.ckpt-7"\n')
    assert opened(tmp_path).keys() == VALUES.keys()


def test_a_folder_without_the_file_that_names_a_checkpoint(tmp_path):
    write(tmp_path, VALUES)
    (tmp_path / "checkpoint").unlink()
    assert formats.find(tmp_path) is MESH_TENSORFLOW and opened(tmp_path).keys() == VALUES.keys()
    write(tmp_path, VALUES, step=10)
    (tmp_path / "checkpoint").unlink()
    assert refused(tmp_path) == (
        f"{tmp_path} holds 2 checkpoints, model.ckpt-7, model.ckpt-10, and no file 'checkpoint' that names one of "
        f"them; give the path of one, such as {tmp_path}/model.ckpt-10.")


def test_what_is_recognised(tmp_path, bucket):
    write(tmp_path, VALUES)
    for path in (tmp_path, str(tmp_path), tmp_path / "model.ckpt-7"):
        assert formats.find(path) is MESH_TENSORFLOW
    for path in (tmp_path / "model.ckpt-8", tmp_path / "model.ckpt", tmp_path / "model.ckpt-7.index"):
        assert formats.find(path) is None
    (tmp_path / "checkpoint").write_bytes(b"\x81\xa6target\x80")  # T5X's, in msgpack
    assert formats.find(tmp_path) is T5X
    place = places.at(bucket.new_folder())
    assert formats.find(place) is None
    for name in ("model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001"):
        places.copy(tmp_path / name, place / name)
    assert formats.find(place) is formats.find(place / "model.ckpt-7") is MESH_TENSORFLOW
    assert_same_values(opened(place), VALUES)


def test_missing_files(tmp_path):
    write(tmp_path, VALUES, num_shards=2)
    first, second = sorted(tmp_path.glob("*.data-*"))
    moved = second.rename(tmp_path / "elsewhere")
    assert refused(tmp_path) == (f"{tmp_path} lacks model.ckpt-7.data-00001-of-00002, which has values of the "
                                 "checkpoint model.ckpt-7; download it too.")
    os.mkfifo(second)  # which would be waited for
    assert "lacks model.ckpt-7.data-00001-of-00002" in refused(tmp_path)
    moved.rename(second)
    (tmp_path / "model.ckpt-7.data-00000-of-00003").touch()
    assert "holds shards of model.ckpt-7 of 2 and of 3 files" in refused(tmp_path)
    for file in tmp_path.glob("*.data-*"):
        file.unlink()
    assert f"{tmp_path} lacks model.ckpt-7.data-00000-of-..., which" in refused(tmp_path)
    (tmp_path / "model.ckpt-7.index").unlink()
    assert refused(tmp_path) == (
        f"{tmp_path}/checkpoint names the checkpoint 'model.ckpt-7', and model.ckpt-7.index is missing; download it "
        "too, or give the path of another checkpoint.")


def test_truncated_and_damaged_values(tmp_path):
    write(tmp_path, VALUES)
    (path,) = tmp_path.glob("*.data-*")
    content = path.read_bytes()
    for damaged in (content[:8], b"", bytes([content[0] ^ 1]) + content[1:]):
        path.write_bytes(damaged)
        message = refused(tmp_path)
        assert message.startswith("'a/b' cannot be read (")
        assert message.endswith("; download the files model.ckpt-7.data-* again.")


def test_truncated_and_damaged_index(tmp_path):
    write(tmp_path, VALUES)
    path = tmp_path / "model.ckpt-7.index"
    content = path.read_bytes()
    for end in (0, 10, len(content) - 1):
        path.write_bytes(content[:end])
        message = refused(tmp_path)
        assert message.startswith(f"{tmp_path}/model.ckpt-7.index cannot be read (")
        assert message.endswith("; download it again.")
    for place in range(len(content)):  # a flipped bit is never a traceback, nor other values
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1:])
        with contextlib.suppress(Refusal):
            assert_same_values(opened(tmp_path), VALUES)


def test_a_checkpoint_of_tensorflow_2(tmp_path):
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(x=tf.Variable([1.0])), str(tmp_path), 1)
    manager.save()
    assert formats.find(tmp_path) is MESH_TENSORFLOW
    assert refused(tmp_path) == (
        f"{tmp_path}/ckpt-1 is a checkpoint of TensorFlow 2, as Keras and tf.train.Checkpoint write them; of "
        "TensorFlow's only those of Mesh TensorFlow are read.")


def test_weights_of_other_dtypes(tmp_path):
    write(tmp_path, {"a": np.zeros((2,), "float64")}, dtype="float64")
    assert refused(tmp_path) == (
        f"A weight must be float32, bfloat16 or float16, but 'a' in {tmp_path}/model.ckpt-7 is float64; give a "
        "checkpoint of Mesh TensorFlow.")


def test_what_is_no_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "model.ckpt-7"):
        assert "must be a folder with a checkpoint of Mesh TensorFlow, such as" in refusal(
            conversion.from_mesh_tensorflow, path, SwitchConfig())
    assert "Mesh TensorFlow's, which holds model.ckpt-N.index, a run folder with" in refusal(
        formats.locate, tmp_path, "--input")
