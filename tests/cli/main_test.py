import json
import os
import pathlib
import shlex
import subprocess
import sys

import pytest

import switch_tf
from switch_tf.cli import main


def test_help_names_every_command_without_importing_tensorflow():
    script = ("import sys\nfrom switch_tf.cli import main\n"
              "try:\n    main.main(['--help'])\nexcept SystemExit:\n    pass\n"
              "assert not {'tensorflow', 'keras', 'gin', 'numpy'} & set(sys.modules), 'too much imported'")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in main.COMMANDS)


def test_json_is_the_last_line_of_standard_output_and_the_text_goes_to_standard_error(capsys):
    assert main.main(["inspect", "switch_tiny", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["num_parameters"] == 3280640
    assert captured.out.count("\n") == 1
    assert "Parameters" in captured.err


def test_a_fault_that_a_command_found_is_the_exit_status(monkeypatch, capsys):
    from switch_tf.cli import doctor
    monkeypatch.setattr(doctor, "run_doctor", lambda arguments: {"exit_status": 1})
    assert main.main(["doctor"]) == 1


@pytest.mark.parametrize("line, told", {
    "trian": "there is no command 'trian'. Did you mean 'train'?",
    "doctor --gin.X=1": "doctor takes no gin bindings, but was given --gin.X=1",
    "eval --run=x --stepp=3": "unrecognized arguments: --stepp=3. Did you mean '--step'?",
    "serve --runn x": "unrecognized arguments: --runn. Did you mean '--run'?",  # before --run is asked for
    "infer --run=x --inptu y": "unrecognized arguments: --inptu. Did you mean '--input'?",
    "infer --model_dir x": "arguments: --model_dir. The folder of a finished run is given as --run",
    "infer": "name the run folder, as in: switch-tf infer runs/first",
    "inspect --lst": "unrecognized arguments: --lst. Did you mean '--list'?",
    "train demo --eval_period=3": "EVAL_PERIOD is a macro of the gin files: --gin.EVAL_PERIOD=VALUE",
    "train demo --stepps=3": "Did you mean '--steps'?",
    "train c4 --tfds_data_dir=x": "This name is T5X's; here the environment variable TFDS_DATA_DIR names the folder.",
    "train c4 --gin_bindings=x": "This name is T5X's; here each binding is an argument, --gin.NAME=VALUE.",
    "train --nothing_like_it=x": "unrecognized arguments: --nothing_like_it=x.\n"}.items())
def test_what_argparse_does_not_know_is_answered_with_what_is_meant(line, told, capsys):
    with pytest.raises(SystemExit) as exit_:
        main.main(line.split())
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and told in error and error.count("\n") == 1
    assert error.startswith(f"switch-tf {line.split()[0]}: " if line != "trian" else "switch-tf: ")


SHORT = {
    "train docs_corpus --steps 300 switch_tiny --model_dir runs/x --gin.SEED=3": (
        "models/switch_tiny tasks/docs_corpus runs/pretrain", "MODEL_DIR=runs/x TRAIN_STEPS=300 SEED=3"),
    "train expert finetune switch_base_8 --task glue --backend=pjrt": (
        "models/switch_base_8 tasks/glue runs/finetune layouts/expert", "Layout.backend='pjrt'"),
    "verify-layout demo layouts/data --steps 1 --mesh_shape data=2": ("runs/demo layouts/data", "MESH_SHAPE=data=2"),
    "compile gin/models/t5_tiny.gin c4 --topology=v5e:2x4": ("models/t5_tiny tasks/c4 runs/pretrain", ""),
    "convert t5_small --input a --output b": ("models/t5_small", ""),
    "inspect switch_base_8 expert": ("layouts/expert", ""),
    "cache t5_base c4 distill --teacher a --output b": ("models/t5_base tasks/c4 runs/distill", ""),
    "cache glue": ("", ""),  # a mixture of this name, as before
    "eval runs/x super_glue": ("tasks/super_glue", ""),
    "eval --run runs/x expert": ("layouts/expert", ""),
    "compare demo --model_dir runs/c": ("comparisons/demo", "MODEL_DIR=runs/c"),
    "compare switch_tiny t5_tiny --task c4 expert --batch_size=8": (
        "comparisons/models", 'VARIANTS={"switch_tiny":["gin/models/switch_tiny.gin"],"t5_tiny":'
        '["gin/models/t5_tiny.gin"]} TASK=gin/tasks/c4.gin LAYOUT=gin/layouts/expert.gin BATCH_SIZE=8'),
}


@pytest.mark.parametrize("line", SHORT)
def test_names_and_options_stand_for_gin_files_and_bindings_which_are_printed(line, capsys):
    arguments = main._parse(line.split())
    files, bindings = SHORT[line]
    assert arguments.gin_file == [f"gin/{file}.gin" for file in files.split()]
    assert [binding.replace(" ", "") for binding in arguments.gin_bindings] == bindings.split()
    if "runs/x" in line and line.startswith("eval"):
        assert arguments.run == "runs/x"
    printed = [shlex.split(line)[0] for line in capsys.readouterr().err.splitlines()[1:]]
    assert printed == [*map("--gin_file={}".format, arguments.gin_file if files else ()),
                       *map("--gin.{}".format, arguments.gin_bindings)]


def test_files_of_ones_own_come_last_unless_they_are_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("model.gin").write_text("include 'gin/models/t5_tiny.gin'\n")
    pathlib.Path("run.gin").write_text("include 'gin/runs/demo.gin'\n")
    for words, files in (("model.gin c4 finetune", "model.gin gin/tasks/c4.gin gin/runs/finetune.gin"),
                         ("model.gin t5_tiny", "gin/models/t5_tiny.gin gin/runs/pretrain.gin model.gin"),
                         ("run.gin expert", "gin/layouts/expert.gin run.gin")):
        assert main._parse(["train", *words.split()]).gin_file == files.split()


def test_a_name_that_is_no_shipped_file_is_refused_without_tensorflow():
    script = ("import sys\nfrom switch_tf.cli import main\n"
              "assert main.main(['train', 'swich_tiny', 'docs_corpus']) == 2 and 'tensorflow' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == (
        "switch-tf train: 'swich_tiny' names no shipped gin file of models, tasks, runs, layouts. Did you mean "
        "'switch_tiny'? Files of your own are named whole, as mine.gin.\n")


def test_the_package_is_a_program_and_has_a_version():
    done = subprocess.run([sys.executable, "-m", "switch_tf", "--version"], capture_output=True, text=True)
    assert done.stdout == f"switch-tf {switch_tf.__version__}\n"


@pytest.mark.parametrize("variables", [{"KERAS_BACKEND": "jax"}, {"KERAS_HOME": "keras"}])
def test_commands_compute_with_tensorflow_whatever_the_users_back_end(tmp_path, variables):
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "keras.json").write_text('{"backend": "torch"}')
    code = ("from switch_tf.cli import main\nmain.main(['inspect', 'switch_tiny'])\nimport keras\n"
            "print(keras.backend.backend())")
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "KERAS_BACKEND": "", **variables},
                          capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1:] == ["tensorflow"], done.stderr
