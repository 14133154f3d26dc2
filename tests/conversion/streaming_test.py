"""Conversions in portions far smaller than a weight, and interrupted at each place, give what they would have given."""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from switch_tf import conversion
from switch_tf.checkpoints import bundles
from switch_tf.cli import main
from switch_tf.conversion import formats, weight_source
from switch_tf.reporting import progress
from tests.conversion import mesh_tensorflow_checkpoints, t5x_checkpoints, t5x_scan_test
from tests.conversion.shared import (
    GOLDEN,
    assert_same_values,
    copy,
    golden,
    golden_variables,
    refusal,
    tensors_of,
    values_of,
)

SMALL = 1500  # bytes: a kernel of the golden models has up to 6,144, and a row of one up to 96


@pytest.fixture
def small(monkeypatch):
    """Portions of a few rows, and scanned layers that are not kept."""
    monkeypatch.setattr(weight_source, "LARGEST", SMALL)
    monkeypatch.setattr("switch_tf.conversion.t5x.KEPT_SIZE", 10)


def hugging_face(folder, case="switch"):
    return GOLDEN / case, None, conversion.from_hugging_face(GOLDEN / case)


def pytorch(folder):
    return hugging_face(folder, "switch_untied")


def t5x(folder):
    config, arrays = golden("switch")
    place = t5x_checkpoints.write(folder, arrays)
    return place, config, conversion.from_t5x(place, config)


def scanned(folder):
    config, arrays, scan = t5x_scan_test.layered("switch")
    model = conversion.from_t5x(t5x_checkpoints.write(folder / "single", arrays), config)
    return t5x_checkpoints.write(folder / "scanned", scan(arrays), inline=0), config, model


def mesh_tensorflow(folder):
    config, variables = golden_variables("switch")
    place = mesh_tensorflow_checkpoints.write(folder, variables)
    return place, config, conversion.from_mesh_tensorflow(place, config)


def switch_tf(folder):
    """In pieces of other sizes than those that are read."""
    model = conversion.from_hugging_face(GOLDEN / "switch")
    with mock.patch.object(weight_source, "LARGEST", 1000):
        conversion.to_switch_tf(model, folder)
    return folder, None, model


SOURCES = [hugging_face, pytest.param(pytorch, marks=pytest.mark.slow), t5x, scanned, mesh_tensorflow, switch_tf]


def sums(folder):
    """Returns relative path of each file in a folder -> SHA-256."""
    result = {}
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                result[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return result


def assert_same_weights(first, second):
    assert_same_values(values_of(first), values_of(second))


def num_bytes(groups):
    return sum(size for group in groups for *_, size in group)


def test_portions_by_hand(monkeypatch):
    monkeypatch.setattr(weight_source, "LARGEST", 40)  # ten elements
    shapes = {"a": (3,), "b": (5, 2, 2), "c": (2, 11), "d": (7, 1), "e": (3, 6)}
    source = weight_source.WeightSource(None, {name: weight_source.Weight(shape, "float32", ())
                                               for name, shape in shapes.items()}, None)
    groups = weight_source.groups_of(source, {"e"})
    # 3 and two rows of 4 are 11 and too many; a row of 11 is a group of its own; "e" may not be cut.
    assert [[(name, rows.start, rows.stop) for name, rows, _ in group] for group in groups] == [
        [("a", 0, 3)], [("b", 0, 2)], [("b", 2, 4)], [("b", 4, 5)], [("c", 0, 1)], [("c", 1, 2)], [("d", 0, 7)],
        [("e", 0, 3)]]
    assert num_bytes(groups) == 4 * (3 + 20 + 22 + 7 + 18)


@pytest.mark.parametrize("source", SOURCES)
def test_every_format_is_read_in_portions_bit_for_bit(source, small, tmp_path):
    place, config, model = source(tmp_path / "in")
    formats.convert(place, tmp_path / "ours", formats.SWITCH_TF, config=config)
    assert len(list((tmp_path / "ours").glob("state.data-*"))) > 30
    ours = conversion.from_switch_tf(tmp_path / "ours")
    assert_same_weights(ours, model)
    assert ours.config == model.config
    if model.config.relative_attention_per_layer:  # as scanned layers have, which Hugging Face cannot represent
        return
    formats.convert(place, tmp_path / "theirs", formats.HUGGING_FACE, model.config.expert_capacity, config)
    assert_same_weights(conversion.from_hugging_face(tmp_path / "theirs"), model)


class Killed(BaseException):
    """Ends a conversion as Ctrl-C does, at a place that a test chooses."""


@contextlib.contextmanager
def killed_at(module, name, number):
    """Ends what is in it at a call of a function; without a number at the first one, when it is done."""
    function, calls = getattr(module, name), []

    def counted(*args, **kwargs):
        calls.append(None)
        if len(calls) == number:
            raise Killed
        result = function(*args, **kwargs)
        if number is None:
            raise Killed
        return result

    with mock.patch.object(module, name, counted), contextlib.suppress(Killed):
        yield


@pytest.fixture
def portions(monkeypatch):
    monkeypatch.setattr(weight_source, "LARGEST", 8_000)


def convert(folder, to=formats.SWITCH_TF, source=GOLDEN / "switch"):
    formats.convert(source, folder / "out", to)


def begin(folder, source=GOLDEN / "switch"):
    """Converts three portions."""
    with killed_at(bundles, "write", 4):
        convert(folder, source=source)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("places", [
    [(bundles, "join", 1), (bundles, "join", None), (bundles, "complete", None),
     *((os, "fsync", number) for number in (1, 2, 7, 8, 9, 31))],
    pytest.param([(os, "fsync", number) for number in range(1, 100)], marks=pytest.mark.exhaustive)],
    ids=["some", "all"])
@pytest.mark.parametrize("to", [formats.SWITCH_TF, formats.HUGGING_FACE], ids=lambda to: to.name)
def test_a_conversion_that_was_killed_goes_on_to_the_same_bytes(to, places, tmp_path, portions):
    convert(tmp_path, to)
    (tmp_path / "out").rename(tmp_path / "whole")
    wanted, killed = sums(tmp_path / "whole"), 0
    for place in places:
        with killed_at(*place):
            convert(tmp_path, to)
        if not (tmp_path / "out").exists():
            killed += 1
            convert(tmp_path, to)
        assert sums(tmp_path / "out") == wanted, place
        shutil.rmtree(tmp_path / "out")
        assert [entry.name for entry in tmp_path.iterdir()] == ["whole"]
    assert killed >= 5


def test_finished_parts_are_not_read_again(tmp_path, monkeypatch, portions):
    read, starts = [], []
    read_groups, bar = weight_source.read_groups, progress.bar

    def noting(source, groups, *arguments):
        for index, portions in read_groups(source, groups, *arguments):
            read.append(groups[index])
            yield index, portions

    monkeypatch.setattr(weight_source, "read_groups", noting)
    monkeypatch.setattr("switch_tf.reporting.progress.bar", lambda total, title, unit="B", initial=0: (
        starts.append((initial, total)), bar(total, title, unit, initial))[1])
    begin(tmp_path)
    first, read[:] = list(read), []
    convert(tmp_path)
    groups = first[:3] + read
    assert len(first) == 4 and len(groups) > 10 and read[0] == first[3]
    assert starts == [(0, num_bytes(groups)), (num_bytes(first[:3]), num_bytes(groups))]


def test_an_output_within_its_source_is_no_part_of_it(tmp_path, monkeypatch, portions):
    monkeypatch.chdir(shutil.copytree(GOLDEN / "switch", tmp_path / "in"))
    begin(pathlib.Path(), tmp_path / "in")
    convert(pathlib.Path(), source=tmp_path / "in")
    assert_same_weights(conversion.from_switch_tf("out"), conversion.from_hugging_face(GOLDEN / "switch"))


@pytest.mark.parametrize(("source", "to", "named"), [
    ("in", formats.HUGGING_FACE, "format"), ("other", formats.SWITCH_TF, "source"),
    ("in", formats.SWITCH_TF, "state of the source")])
def test_unfinished_work_of_another_conversion_is_refused_and_kept(source, to, named, tmp_path, portions):
    for name in ("in", "other"):
        shutil.copytree(GOLDEN / "switch", tmp_path / name)
    begin(tmp_path, tmp_path / "in")
    unfinished = tmp_path / ".out.unfinished"
    before = sums(unfinished)
    if named == "state of the source":
        os.utime(tmp_path / "in" / "model.safetensors", (1, 1))
    assert refusal(convert, tmp_path, to, tmp_path / source) == (
        f"{unfinished} is unfinished work on another {named}; give the command that began it to go on, or remove that "
        "folder to begin anew.")
    assert sums(unfinished) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", [formats.SWITCH_TF, formats.HUGGING_FACE], ids=lambda to: to.name)
def test_a_refused_weight_leaves_nothing_and_a_full_disk_keeps_what_is_done(to, tmp_path, monkeypatch, portions):
    tensors = tensors_of("switch")
    tensors["decoder.final_layer_norm.weight"] = np.full(16, np.float32("nan"))
    assert "is not finite" in refusal(convert, tmp_path, to, copy("switch", tmp_path / "in", tensors))
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]

    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(None)
        if len(calls) == 9:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert "could not be written (No space left on device); the disk is full: make room" in refusal(
        convert, tmp_path, to)
    assert (tmp_path / ".out.unfinished" / "record.jsonl").read_text().count("\n") > 1
    convert(tmp_path, to)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in", "out"]


def test_bfloat16_keeps_bits_and_rounds_float32_to_even(tmp_path):
    tensors = {name: tensor.copy() for name, tensor in tensors_of("t5_1_1").items()}
    # bfloat16 has 7 bits behind the point: half a unit is 2**-8, and ties go to the even neighbour.
    norm = "encoder.final_layer_norm.weight"
    tensors[norm][:4] = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(2.0**-130)]
    bits = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    found = {}
    for name, one in (("float32", tensors), ("bfloat16", bits)):
        output = tmp_path / f"{name}_16"
        assert main.main(["convert", f"--input={copy('t5_1_1', tmp_path / name, one)}", f"--output={output}",
                          "--to=hugging_face", "--dtype=bfloat16", "--verify"]) == 0
        assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
        found[name] = safetensors.numpy.load_file(output / "model.safetensors")
    assert_same_values(found["bfloat16"], bits)
    rounded = found["float32"][norm][:4]
    assert rounded.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(rounded.astype(np.float32), [1, 1 + 2**-6, 1 + 2**-7, -(2.0**-130)])
