"""`switch-tf convert --verify` accepts what is right, and names what is not."""

import json
import re

import numpy as np
import pytest

from switch_tf import conversion
from switch_tf.cli import main
from switch_tf.conversion import checkpoint_files, formats, weight_source
from tests.conversion.shared import GOLDEN, copy, refusal


def convert(output, *words, case="switch"):
    return main.main(["convert", "--json", f"--input={GOLDEN / case}", f"--output={output}", "--verify", *words])


@pytest.mark.parametrize("case", ["t5_1_0", "switch", "encoder_gelu"])
@pytest.mark.parametrize("to", ["switch_tf", "hugging_face"])
def test_weights_and_logits_are_compared(case, to, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(weight_source, "LARGEST", 700)
    assert convert(tmp_path / "out", f"--to={to}", case=case) == 0
    told = capsys.readouterr()
    verified = json.loads(told.out.splitlines()[-1])["verified"]
    assert verified["weights"] == len(conversion.from_hugging_face(GOLDEN / case).weights)
    assert verified["largest_logit_difference"] < 1e-5
    assert (f"All {verified['weights']} weights in {tmp_path / 'out'} have the values and norms of the source, and "
            "its logits differ by at most") in told.err


def test_logits_are_left_out_without_memory_or_with_another_capacity(tmp_path, capsys, monkeypatch):
    assert convert(tmp_path / "a", "--to=hugging_face", "--expert_capacity=3") == 0
    assert "logits were not compared, because its experts have another capacity." in capsys.readouterr().err
    monkeypatch.setattr("switch_tf.hardware.host.memory", lambda entry: 1000)
    assert convert(tmp_path / "b") == 0
    told = capsys.readouterr()
    assert "logits were not compared, because a model needs 0.0 GB of memory, and 0.0 GB are free." in told.err
    assert json.loads(told.out.splitlines()[-1])["verified"]["largest_logit_difference"] is None


def test_a_weight_that_was_written_wrongly_is_named(tmp_path, capsys, monkeypatch):
    append = checkpoint_files.Shards.append

    def wrong(self, values):
        append(self, np.where(values == values.max(), 2 * values, values) if values.shape == (64, 16) else values)

    monkeypatch.setattr(checkpoint_files.Shards, "append", wrong)
    assert convert(tmp_path / "out", "--to=hugging_face") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "is not what its source is: rows 0 to 63 of 'token_embedder/embedding' have the norm" in told


def test_another_configuration_with_the_same_weights_shows_in_the_logits(tmp_path):
    source = formats.HUGGING_FACE.module.open_weights(GOLDEN / "t5_1_1", None)
    arguments = source, copy("t5_1_1", tmp_path), formats.HUGGING_FACE, "float32"
    assert formats.verify(*arguments)[0]["weights"] > 20
    copy("t5_1_1", tmp_path, dense_act_fn="gelu", feed_forward_proj="gated-gelu")  # for its approximation by tanh
    assert re.search("logits of a fixed batch differ by .*, with equal weights", refusal(formats.verify, *arguments))
