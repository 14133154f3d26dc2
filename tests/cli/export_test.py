import json
import shutil
import subprocess
import sys

import pytest

from switch_tf import SwitchConfig, SwitchTransformer

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
def test_what_is_exported_answers_elsewhere_as_infer_does(run_folder, tmp_path, call):
    found, err = call(f"export --run={run_folder} --output={tmp_path / 'saved'} --max_length=4 --json")
    assert found["step"] == 7 and found["bytes"] > 1000 and "MODEL_CARD.md in it shows" in err
    (tmp_path / "lines.txt").write_text("\n".join(LINES))
    out, _ = call(f"infer --run={run_folder} --input={tmp_path / 'lines.txt'} --max_length=4")
    records = [json.loads(line) for line in out.splitlines()]
    loaded = subprocess.run([sys.executable, "-c", LOADS, str(tmp_path / "saved"), *LINES], capture_output=True,
                            text=True, cwd=tmp_path, check=False)
    assert loaded.returncode == 0, loaded.stderr
    texts, scores = json.loads(loaded.stdout.splitlines()[-1])
    assert texts == [record["output"] for record in records]
    assert scores == pytest.approx([record["score"] for record in records], rel=1e-5)


@pytest.mark.slow
def test_a_run_of_pjrt_is_exported_as_one_of_tensorflow(run_folder, tmp_path, call):
    import tensorflow as tf
    import tensorflow_text  # noqa: F401  the program's operations

    pjrt = shutil.copytree(run_folder, tmp_path / "run")
    with open(pjrt / "operative_config.gin", "a") as file:
        file.write('include "gin/layouts/expert.gin"\nMESH_SHAPE = "data=4"\nLayout.backend = "pjrt"\n')
    found = []
    for run, name in ((run_folder, "plain"), (pjrt, "pjrt")):
        call(f"export --run={run} --output={tmp_path / name}")
        answer = tf.saved_model.load(tmp_path / name).signatures["serving_default"](inputs=tf.constant(LINES))
        found.append([answer[key].numpy().tolist() for key in ("outputs", "scores")])
    assert found[0] == found[1]


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
@pytest.mark.parametrize("options, inputs", [("", [[70, 1]]), ("--vocabulary=bytes --inputs_length=9", ["a <"])])
def test_a_model_that_keras_saved_is_exported(saved_by_keras, tmp_path, call, options, inputs):
    import tensorflow as tf
    import tensorflow_text  # noqa: F401  the program's operations

    result, _ = call(f"export --model={saved_by_keras} --output={tmp_path / 'saved'} --max_length=4 --json {options}")
    assert result["bytes"] > 1000
    loaded = tf.saved_model.load(tmp_path / "saved")
    found = loaded.signatures["serving_default"](inputs=tf.constant(inputs))
    assert found["outputs"].shape == ((1,) if options else (1, 4))


@pytest.mark.parametrize("words, message", {
    "": "Give either --run FOLDER", "--model=a --run=b": "Give either --run FOLDER",
    "--run=b --vocabulary=bytes": "--vocabulary goes with --model",
    "--model={file} --step=3": "--step and gin arguments go with --run",
    "--model={file} --raw": "--raw goes with --run", "--model={file} --trust": "--trust goes with --run",
    "--model={file} --gin.SEED=3": "--step and gin arguments go with --run",
    "--model=nowhere.keras": "--model must name a file that Keras saved",
    "--model={file} --inputs_length=3": "--inputs_length goes with --vocabulary",
    "--model={file} --vocabulary=nope": "'nope' is no registered vocabulary"}.items())
def test_mistakes_with_a_model_are_told(saved_by_keras, refused, words, message):
    assert message in refused(f"export --output=new {words.format(file=saved_by_keras)}")
