"""Conversions in portions far smaller than a weight, and interrupted at each place, give what they would have given."""

import hashlib
import json
import os
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from switch_tf import conversion
from switch_tf.checkpoints import bundles
from switch_tf.cli import main
from switch_tf.conversion import formats, weight_source
from switch_tf.reporting import progress
from tests.conversion import mesh_tensorflow_test, t5x_scan_test, t5x_test

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"
SMALL = 1500  # bytes: a kernel of the golden models has up to 6,144, and a row of one up to 96


@pytest.fixture
def small(monkeypatch):
    """Portions of a few rows, and scanned layers that are not kept."""
    monkeypatch.setattr(weight_source, "LARGEST", SMALL)
    monkeypatch.setattr("switch_tf.conversion.t5x.KEPT_SIZE", 10)


def hugging_face(folder):
    return GOLDEN / "switch", None, conversion.from_hugging_face(GOLDEN / "switch")


def pytorch(folder):
    return GOLDEN / "switch_untied", None, conversion.from_hugging_face(GOLDEN / "switch_untied")


def t5x(folder):
    config, arrays = t5x_test.golden("switch")
    place = t5x_test.write(folder, arrays)
    return place, config, conversion.from_t5x(place, config)


def scanned(folder):
    config, arrays, num_layers = t5x_scan_test.layered("switch")
    model = conversion.from_t5x(t5x_test.write(folder / "single", arrays), config)
    arrays = t5x_scan_test.scanned(arrays, num_layers, t5x_scan_test.SUBBLOCKS["switch"])
    return t5x_test.write(folder / "scanned", arrays, inline=0), config, model


def mesh_tensorflow(folder):
    config, variables = mesh_tensorflow_test.golden("switch")
    place = mesh_tensorflow_test.write(folder, variables)
    return place, config, conversion.from_mesh_tensorflow(place, config)


def switch_tf(folder):
    model = conversion.from_hugging_face(GOLDEN / "switch")
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


def weights(model):
    return {name: variable.numpy() for name, variable in weight_source.variables_of(model).items()}


def assert_same_weights(first, second):
    first, second = weights(first), weights(second)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name].view(np.uint32), second[name].view(np.uint32), err_msg=name)


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
    assert_same_weights(conversion.from_switch_tf(tmp_path / "ours"), model)
    assert conversion.from_switch_tf(tmp_path / "ours").config == model.config
    if model.config.relative_attention_per_layer:  # as scanned layers have, which Hugging Face cannot represent
        return
    formats.convert(place, tmp_path / "theirs", formats.HUGGING_FACE, model.config.expert_capacity, config)
    assert_same_weights(conversion.from_hugging_face(tmp_path / "theirs"), model)


def test_a_weight_that_is_written_in_pieces_is_read_as_one_and_in_other_pieces(small, tmp_path, monkeypatch):
    place, _, model = hugging_face(tmp_path)
    formats.convert(place, tmp_path / "ours", formats.SWITCH_TF)
    monkeypatch.setattr(weight_source, "LARGEST", 1000)
    formats.convert(tmp_path / "ours", tmp_path / "again", formats.SWITCH_TF)
    assert_same_weights(conversion.from_switch_tf(tmp_path / "again"), model)


class Killed(BaseException):
    """Ends a conversion as Ctrl-C does, at a place that a test chooses."""


@pytest.fixture
def kill_at(monkeypatch):
    """A function that has a call of another function raise Killed; without a number the first one, when it is done."""
    def kill(module, name, number):
        function, calls = getattr(module, name), []

        def counted(*args, **kwargs):
            calls.append(None)
            if len(calls) == number:
                raise Killed
            result = function(*args, **kwargs)
            if number is None:
                raise Killed
            return result

        monkeypatch.setattr(module, name, counted)
        return lambda: monkeypatch.setattr(module, name, function)

    return kill


@pytest.mark.parametrize("places", [
    [(bundles, "join", 1), (bundles, "join", None), (bundles, "complete", None),
     *((os, "fsync", number) for number in (1, 2, 7, 8, 9, 31))],
    pytest.param([(os, "fsync", number) for number in range(1, 100)], marks=pytest.mark.exhaustive)],
    ids=["some", "all"])
@pytest.mark.parametrize("to", [formats.SWITCH_TF, formats.HUGGING_FACE], ids=lambda to: to.name)
def test_a_conversion_that_was_killed_goes_on_to_the_same_bytes(to, places, tmp_path, monkeypatch, kill_at):
    monkeypatch.setattr(weight_source, "LARGEST", 8_000)
    formats.convert(GOLDEN / "switch", tmp_path / "whole", to)
    wanted, killed = sums(tmp_path / "whole"), 0
    for module, name, number in places:
        revive = kill_at(module, name, number)
        try:
            formats.convert(GOLDEN / "switch", tmp_path / "out", to)
        except Killed:
            killed += 1
            assert not (tmp_path / "out").exists()
            revive()
            formats.convert(GOLDEN / "switch", tmp_path / "out", to)
        revive()
        assert sums(tmp_path / "out") == wanted, (name, number)
        shutil.rmtree(tmp_path / "out")
        assert [entry.name for entry in tmp_path.iterdir()] == ["whole"]
    assert killed >= 5


def test_finished_parts_are_not_read_again(tmp_path, monkeypatch, kill_at):
    monkeypatch.setattr(weight_source, "LARGEST", 8_000)
    read, starts = [], []
    read_groups, bar = weight_source.read_groups, progress.bar

    def noting(source, groups, *arguments):
        for index, portions in read_groups(source, groups, *arguments):
            read.append(groups[index])
            yield index, portions

    monkeypatch.setattr(weight_source, "read_groups", noting)
    monkeypatch.setattr("switch_tf.reporting.progress.bar", lambda total, title, unit="B", initial=0: (
        starts.append((initial, total)), bar(total, title, unit, initial))[1])
    revive = kill_at(bundles, "write", 4)
    with pytest.raises(Killed):
        formats.convert(GOLDEN / "switch", tmp_path / "out", formats.SWITCH_TF)
    revive()
    first, read[:] = list(read), []
    formats.convert(GOLDEN / "switch", tmp_path / "out", formats.SWITCH_TF)
    groups = first[:3] + read
    assert len(first) == 4 and len(groups) > 10 and read[0] == first[3]
    assert starts == [(0, num_bytes(groups)), (num_bytes(first[:3]), num_bytes(groups))]


def test_an_output_within_its_source_is_no_part_of_it(tmp_path, monkeypatch, kill_at):
    monkeypatch.setattr(weight_source, "LARGEST", 8_000)
    shutil.copytree(GOLDEN / "switch", tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    revive = kill_at(bundles, "write", 3)
    with pytest.raises(Killed):
        formats.convert(tmp_path / "in", pathlib.Path("in/out"), formats.SWITCH_TF)
    revive()
    formats.convert(tmp_path / "in", pathlib.Path("in/out"), formats.SWITCH_TF)
    assert_same_weights(conversion.from_switch_tf("in/out"), conversion.from_hugging_face("in"))


@pytest.mark.parametrize(("changes", "named"), [
    ({"to": formats.HUGGING_FACE}, "format"), ({"source": "other"}, "source"), ({}, "state of the source")])
def test_unfinished_work_of_another_conversion_is_refused_and_kept(changes, named, tmp_path, kill_at, monkeypatch):
    monkeypatch.setattr(weight_source, "LARGEST", 8_000)
    for name in ("in", "other"):
        shutil.copytree(GOLDEN / "switch", tmp_path / name)
    arguments = {"source": "in", "to": formats.SWITCH_TF}
    revive = kill_at(bundles, "write", 3)
    with pytest.raises(Killed):
        formats.convert(tmp_path / "in", tmp_path / "out", formats.SWITCH_TF)
    revive()
    before = sums(tmp_path / ".out.unfinished")
    if not changes:
        os.utime(tmp_path / "in" / "model.safetensors", (1, 1))
    arguments |= changes
    with pytest.raises(ValueError) as error:
        formats.convert(tmp_path / arguments["source"], tmp_path / "out", arguments["to"])
    assert str(error.value) == (
        f"{tmp_path / '.out.unfinished'} is unfinished work on another {named}; give the command that began it to go "
        "on, or remove that folder to begin anew.")
    assert sums(tmp_path / ".out.unfinished") == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", [formats.SWITCH_TF, formats.HUGGING_FACE], ids=lambda to: to.name)
def test_a_refused_weight_leaves_nothing_and_a_full_disk_keeps_what_is_done(to, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_source, "LARGEST", 8_000)
    tensors = safetensors.numpy.load_file(GOLDEN / "switch" / "model.safetensors")
    tensors["decoder.final_layer_norm.weight"][3] = np.nan
    (tmp_path / "in").mkdir()
    shutil.copy(GOLDEN / "switch" / "config.json", tmp_path / "in")
    safetensors.numpy.save_file(tensors, tmp_path / "in" / "model.safetensors")
    with pytest.raises(ValueError, match="is not finite"):
        formats.convert(tmp_path / "in", tmp_path / "out", to)
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]

    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(None)
        if len(calls) == 9:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="could not be written .No space left on device.; the disk is full: make room"):
        formats.convert(GOLDEN / "switch", tmp_path / "out", to)
    assert (tmp_path / ".out.unfinished" / "record.jsonl").read_text().count("\n") > 1
    formats.convert(GOLDEN / "switch", tmp_path / "out", to)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in", "out"]


def test_bfloat16_keeps_bits_and_rounds_float32_to_even(tmp_path):
    tensors = safetensors.numpy.load_file(GOLDEN / "t5_1_1" / "model.safetensors")
    # bfloat16 has 7 bits behind the point: half a unit is 2**-8, and ties go to the even neighbour.
    tensors["encoder.final_layer_norm.weight"][:4] = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(2.0**-130)]
    for name, dtype in (("in", np.float32), ("bits", ml_dtypes.bfloat16)):
        (tmp_path / name).mkdir()
        shutil.copy(GOLDEN / "t5_1_1" / "config.json", tmp_path / name)
        safetensors.numpy.save_file({name: tensor.astype(dtype) for name, tensor in tensors.items()},
                                    tmp_path / name / "model.safetensors")
    for name in ("in", "bits"):
        assert main.main(["convert", f"--input={tmp_path / name}", f"--output={tmp_path / name}_16",
                          "--to=hugging_face", "--dtype=bfloat16", "--verify"]) == 0
        assert json.loads((tmp_path / f"{name}_16" / "config.json").read_text())["dtype"] == "bfloat16"
    source, kept, rounded = (safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
                             for name in ("bits", "bits_16", "in_16"))
    assert source.keys() == kept.keys()
    for name, tensor in source.items():
        assert kept[name].dtype == rounded[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(kept[name].view(np.uint16), tensor.view(np.uint16), err_msg=name)
    np.testing.assert_array_equal(rounded["encoder.final_layer_norm.weight"][:4].astype(np.float32),
                                  [1, 1 + 2**-6, 1 + 2**-7, -(2.0**-130)])


@pytest.mark.parametrize(("words", "message"), [
    (["--dtype=bfloat16"], "--dtype=bfloat16 is for --to=hugging_face alone; weights are float32 in switch_tf."),
    (["--dtype=float16"], "--dtype must be one of 'float32', 'bfloat16'")])
def test_other_dtypes_are_refused_in_one_sentence(words, message, tmp_path, capsys):
    assert main.main(["convert", f"--input={GOLDEN / 't5_1_1'}", f"--output={tmp_path / 'x'}", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
