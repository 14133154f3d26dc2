import json
import os
import subprocess
import sys

import pytest

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
    "infer": "the following arguments are required: --run",
    "inspect --lst": "unrecognized arguments: --lst. Did you mean '--list'?",
    "train gin/runs/demo.gin": "A gin file is given as --gin_file=gin/runs/demo.gin",
    "train --gin_file=gin/runs/demo.gin --model_dir=x": "MODEL_DIR is a macro of the gin files: --gin.MODEL_DIR=VALUE",
    "train --nothing_like_it=x": "unrecognized arguments: --nothing_like_it=x.\n"}.items())
def test_what_argparse_does_not_know_is_answered_with_what_is_meant(line, told, capsys):
    with pytest.raises(SystemExit) as exit_:
        main.main(line.split())
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and told in error and error.count("\n") == 1
    assert error.startswith(f"switch-tf {line.split()[0]}: " if line != "trian" else "switch-tf: ")


@pytest.mark.parametrize("variables", [{"KERAS_BACKEND": "jax"}, {"KERAS_HOME": "keras"}])
def test_commands_compute_with_tensorflow_whatever_the_users_back_end(tmp_path, variables):
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "keras.json").write_text('{"backend": "torch"}')
    code = ("from switch_tf.cli import main\nmain.main(['inspect', 'switch_tiny'])\nimport keras\n"
            "print(keras.backend.backend())")
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "KERAS_BACKEND": "", **variables},
                          capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1:] == ["tensorflow"], done.stderr
