import json
import shutil
import subprocess
import sys

import pytest

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.cli import main

# What a user has who loads it: TensorFlow and tensorflow-text, no package of ours or of T5's.
LOADS = """
import json, sys
for name in ("switch_tf", "seqio", "t5", "gin", "tensorflow_datasets"):
    sys.modules[name] = None
import tensorflow as tf
import tensorflow_text
answer = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
found = answer(inputs=tf.constant(sys.argv[2:]))
print(json.dumps([[text.decode() for text in found["outputs"].numpy()], found["scores"].numpy().tolist()]))
"""
LINES = ["the <extra_id_0> array", "of numbers"]


@pytest.mark.slow
def test_what_is_exported_answers_elsewhere_as_infer_does(run_folder, tmp_path, capsys):
    assert main.main(["export", f"--run={run_folder}", f"--output={tmp_path / 'saved'}", "--max_length=4",
                      "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["step"] == 7 and found["bytes"] > 1000 and "MODEL_CARD.md in it shows" in err
    (tmp_path / "lines.txt").write_text("\n".join(LINES))
    assert main.main(["infer", f"--run={run_folder}", f"--input={tmp_path / 'lines.txt'}", "--max_length=4"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    loaded = subprocess.run([sys.executable, "-c", LOADS, str(tmp_path / "saved"), *LINES], capture_output=True,
                            text=True, cwd=tmp_path, check=False)
    assert loaded.returncode == 0, loaded.stderr
    texts, scores = json.loads(loaded.stdout.splitlines()[-1])
    assert texts == [record["output"] for record in records]
    assert scores == pytest.approx([record["score"] for record in records], rel=1e-5)


@pytest.mark.slow
def test_a_run_of_pjrt_is_exported_as_one_of_tensorflow(run_folder, tmp_path, capsys):
    import tensorflow as tf
    import tensorflow_text  # noqa: F401  the program's operations

    pjrt = shutil.copytree(run_folder, tmp_path / "run")
    with open(pjrt / "operative_config.gin", "a") as file:
        file.write('include "gin/layouts/expert.gin"\nMESH_SHAPE = "data=4"\nLayout.backend = "pjrt"\n')
    found = []
    for run, name in ((run_folder, "plain"), (pjrt, "pjrt")):
        assert main.main(["export", f"--run={run}", f"--output={tmp_path / name}"]) == 0
        answer = tf.saved_model.load(tmp_path / name).signatures["serving_default"](inputs=tf.constant(LINES))
        found.append([answer[key].numpy().tolist() for key in ("outputs", "scores")])
    assert found[0] == found[1]


@pytest.mark.parametrize("arguments, message", [
    (["--output=."], "must be new or an empty folder"), (["--output="], "--output must be a path, not ''"),
    (["--output=new", "--step=all"], "one checkpoint answers"), (["--output=new", "--run=nowhere"], "must name a run"),
    (["--output=new", "--sampler=beam", "--num_results=2"], "gives the best result; leave out --num_results"),
    (["--output=new", "--max_length=0"], "--max_length must be an integer of at least 1"),
    (["--output=new", "--sampler=sample", "--top_k=0"], "top_k must be an integer of at least 1, not 0")])
def test_mistakes_are_told_and_nothing_is_written(run_folder, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").write_text("x")
    assert main.main(["export", f"--run={run_folder}", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


@pytest.fixture(scope="module")
def saved_by_keras(tmp_path_factory):
    """A model as `fit` leaves it in a file, of the bytes' vocabulary."""
    file = tmp_path_factory.mktemp("keras") / "model.keras"
    model = SwitchTransformer(SwitchConfig(vocab_size=384, d_model=16, d_ff=24, d_kv=4, num_heads=2,
                                           num_encoder_layers=1, num_decoder_layers=1, num_experts=2))
    model.build()
    model.save(file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("options, inputs", [([], [[70, 1]]), (["--vocabulary=bytes", "--inputs_length=9"], ["a <"])])
def test_a_model_that_keras_saved_is_exported(saved_by_keras, tmp_path, capsys, options, inputs):
    import tensorflow as tf
    import tensorflow_text  # noqa: F401  the program's operations

    assert main.main(["export", f"--model={saved_by_keras}", f"--output={tmp_path / 'saved'}", "--max_length=4",
                      "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] > 1000
    loaded = tf.saved_model.load(tmp_path / "saved")
    found = loaded.signatures["serving_default"](inputs=tf.constant(inputs))
    assert found["outputs"].shape == ((1,) if options else (1, 4))


@pytest.mark.parametrize("arguments, message", [
    ([], "Give either --run FOLDER"), (["--model=a", "--run=b"], "Give either --run FOLDER"),
    (["--run=b", "--vocabulary=bytes"], "--vocabulary goes with --model"),
    (["--model={file}", "--step=3"], "--step and gin arguments go with --run"),
    (["--model={file}", "--raw"], "--raw goes with --run"), (["--model={file}", "--trust"], "--trust goes with --run"),
    (["--model={file}", "--gin.SEED=3"], "--step and gin arguments go with --run"),
    (["--model=nowhere.keras"], "--model must name a file that Keras saved"),
    (["--model={file}", "--inputs_length=3"], "--inputs_length goes with --vocabulary"),
    (["--model={file}", "--vocabulary=nope"], "'nope' is no registered vocabulary")])
def test_mistakes_with_a_model_are_told(saved_by_keras, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main.main(["export", "--output=new", *(word.format(file=saved_by_keras) for word in arguments)]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())
