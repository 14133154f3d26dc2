"""Every `switch-tf` command in README, docs and `--help` is one that can be typed, with gin files that can be read."""

import importlib
import pathlib
import re
import shlex

import gin
import pytest

from switch_tf import SwitchConfig
from switch_tf.cli import compare, gin_files, main

ROOT = pathlib.Path(__file__).parents[2]


def _commands():
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"```sh\n(.*?)```", file.read_text(), re.DOTALL):
            yield from _commands_of(block, file.name)


def _examples():
    for command in main.COMMANDS:
        yield from _commands_of(importlib.import_module(main._module(command)).EXAMPLES, f"{command} --help")


def _commands_of(block, place):
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True) if line.startswith("switch-tf ") else []
        if words and "..." not in words:
            yield pytest.param(words[1:], id=f"{place}: {' '.join(line.split())}")


@pytest.fixture(autouse=True)
def _clean_gin():
    yield
    gin.clear_config()


@pytest.mark.parametrize("words", [*_commands(), *_examples()])
def test_a_documented_command_can_be_typed(words):
    arguments = main._parse(words)
    assert arguments.command == words[0]
    # `switch-tf convert` writes a model file of this name.
    files = ["gin/models/t5_1_1_small.gin" if file.endswith("/model.gin") else file
             for file in getattr(arguments, "gin_file", [])]
    if arguments.command == "compare" and files:
        compare.described(arguments)
    elif any("/runs/" in file for file in files):
        bindings = ["MODEL_DIR='unused'"] if arguments.command in ("compile", "verify-layout") else []
        gin_files.parse(files, [*bindings, *arguments.gin_bindings], arguments.gin_search_paths)
        assert gin.get_configurable(SwitchConfig)().num_parameters > 0


def test_the_documents_name_every_command():
    assert {parameter.values[0][0] for parameter in _commands()} == set(main.COMMANDS)


def test_the_help_of_every_command_ends_with_two_examples_of_it(capsys):
    for command in main.COMMANDS:
        with pytest.raises(SystemExit):
            main.main([command, "--help"])
        shown = capsys.readouterr().out.replace("\\\n", " ").rpartition("examples:\n")[2].strip().splitlines()
        assert len(shown) == 2 and all(line.strip().startswith(f"switch-tf {command} ") or line.strip() ==
                                       f"switch-tf {command}" for line in shown)
