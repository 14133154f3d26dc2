import dataclasses
import json
import shutil

import pytest

from switch_tf import conversion
from switch_tf.conversion import huggingface_config
from tests.conversion.shared import GOLDEN

MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


@pytest.mark.parametrize("name", ["t5_1_1", "switch_step_4", "switch_untied"])
def test_the_configuration_is_that_of_the_model(name):
    assert huggingface_config.read_config(GOLDEN / name) == conversion.from_hugging_face(GOLDEN / name).config


@pytest.mark.parametrize("name", MODELS)
def test_without_tensors_the_configuration_is_what_config_json_says(name, tmp_path):
    shutil.copy(GOLDEN / name / "config.json", tmp_path)
    expected = huggingface_config.read_config(GOLDEN / name)
    if name == "umt5":  # transformers 5 writes of every UMT5 that its logits share the embedding
        expected = dataclasses.replace(expected, logits_via_embedding=True)
    assert huggingface_config.read_config(tmp_path) == expected


def test_sizes_of_a_config_json_alone_are_checked(tmp_path):
    values = {"model_type": "t5", "num_layers": 2**31 - 1, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="layers"):
        huggingface_config.read_config(tmp_path)
