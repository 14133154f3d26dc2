"""`import switch_tf` is light, complete, and refuses an environment with two seqios."""

import os
import subprocess
import sys

import pytest

import switch_tf


def python(code: str, **environ) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True
    )


HEAVY = {"gin", "jax", "keras", "matplotlib", "numpy", "seqio", "t5", "tensorflow", "tensorflow_datasets"}


@pytest.mark.parametrize(
    "code", ["import switch_tf", "import switch_tf; switch_tf.SwitchConfig", "import switch_tf.cli.main"]
)
def test_importing_loads_no_heavy_library(code):
    result = python(f"{code}\nimport sys; print(sorted({HEAVY} & set(sys.modules)))")
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.parametrize("name", switch_tf.__all__)
def test_every_public_name_is_there(name):
    assert getattr(switch_tf, name) is not None
    assert name in dir(switch_tf)


def test_unknown_attribute_is_answered_with_the_known_ones():
    with pytest.raises(AttributeError, match="no attribute 'SwitchConfigg'; it has Experiment, SwitchConfig"):
        switch_tf.SwitchConfigg  # noqa: B018


@pytest.mark.parametrize(
    "nightlies, cure",
    [
        (["seqio-nightly"], "uninstall -y seqio-nightly && "),
        (["tfds-nightly"], "install --no-deps --force-reinstall tensorflow-datasets==4.9.10"),
        (
            ["seqio-nightly", "tfds-nightly"],
            "install --no-deps --force-reinstall seqio==0.0.20 tensorflow-datasets==4.9.10",
        ),
    ],
)
def test_nightlies_are_refused_with_the_cure(nightlies, cure, tmp_path):
    for name in nightlies:
        folder = tmp_path / f"{name.replace('-', '_')}-0.0.1.dev1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1.dev1\n")
    result = python("import switch_tf", PYTHONPATH=str(tmp_path))
    sentence = result.stderr.splitlines()[-1]
    assert result.returncode == 1
    rule = "ImportError: switch_tf needs one seqio and one tensorflow-datasets, but "
    assert sentence.startswith(rule + " and ".join(nightlies))
    assert cure in sentence


def test_our_own_command_says_it_in_one_sentence_without_a_traceback(tmp_path):
    folder = tmp_path / "seqio_nightly-0.0.1.dev1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: seqio-nightly\nVersion: 0.0.1.dev1\n")
    command = os.path.join(os.path.dirname(sys.executable), "switch-tf")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run([command, "--help"], env=environ, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("switch-tf: switch_tf needs one seqio and one tensorflow-datasets, but")
    assert result.stderr.count("\n") == 1
