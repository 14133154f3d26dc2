"""Special ids. What transformers 5.23 does with each was found out by running it; see tests/golden/hugging_face.py."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from switch_tf import conversion, decoding
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import huggingface_config
from tests.conversion.shared import GOLDEN, refusal


@pytest.mark.parametrize("values, generation, ends", [
    ({}, None, 1), ({"eos_token_id": 2}, None, 2), ({"eos_token_id": [2, 3]}, None, (2, 3)),
    ({"eos_token_id": [2]}, None, (2,)), ({"eos_token_id": None}, None, ()),
    ({"eos_token_id": 2}, {"eos_token_id": [3, 4]}, (3, 4)), ({"eos_token_id": 2}, {"eos_token_id": None}, ()),
    ({"bos_token_id": 1, "decoder_start_token_id": 0}, None, 1),
    ({}, {"eos_token_id": 1, "pad_token_id": None, "decoder_start_token_id": None}, 1)])
def test_ends(values, generation, ends):
    values = {"pad_token_id": 0, **values}
    assert huggingface_config.end_id(values, generation) == ends
    if generation is None:
        written = huggingface_config.to_hugging_face(SwitchConfig(end_id=ends), None)
        assert written["eos_token_id"] == values.get("eos_token_id", 1)


def test_a_generation_config_without_an_end_warns():
    with pytest.warns(UserWarning, match="generation_config.json has no eos_token_id, so sequences never end"):
        assert huggingface_config.end_id({"eos_token_id": 2}, {"max_new_tokens": 8}) == ()


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("name, values", [
    ("pad_token_id", (1, -1, "0", False)), ("decoder_start_token_id", (2, [0])), ("bos_token_id", (3,)),
    ("forced_bos_token_id", (5,)), ("forced_eos_token_id", (1,)),
    ("eos_token_id", (0, [1, 0], [], -1, "1", True, [[1]]))])
def test_what_is_refused_is_named(file, name, values):
    for value in values:
        arguments = ({name: value}, None) if file == "config.json" else (
            {"pad_token_id": 0}, {"eos_token_id": 1, name: value})
        assert f"{name} in {file}" in refusal(huggingface_config.end_id, *arguments)


def test_padding_that_is_null_is_refused():
    # transformers then attends to every token 0 of inputs without an attention mask.
    assert "pad_token_id in config.json must be 0, not None" in refusal(
        huggingface_config.end_id, {"pad_token_id": None}, None)


def read(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return conversion.from_hugging_face(folder)


def test_sequences_end_as_the_configuration_says(tmp_path):
    folder = pathlib.Path(shutil.copytree(GOLDEN / "switch_untied", tmp_path / "in"))
    inputs = np.load(folder / "expected.npz")["inputs"][:1]

    def ids_of(model, *arguments, **options):
        return np.asarray(model.generate(inputs, 6, *arguments, **options))[0].tolist()

    endless = read(folder, eos_token_id=None)
    ids = ids_of(endless)
    assert 0 not in ids
    end = next(token for token in ids[1:] if token != ids[0])
    place = ids.index(end)
    cut = ids[:place + 1] + [0] * (5 - place)
    model = read(folder, eos_token_id=[63, end])
    assert type(model).from_config(model.get_config()).config == model.config
    beam = decoding.Beam(1, length_penalty=0.0)
    assert ids_of(model) == ids_of(endless, end_id=end) == ids_of(model, beam) == cut
    conversion.to_hugging_face(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [63, end]
