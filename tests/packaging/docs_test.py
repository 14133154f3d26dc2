"""The documents: commands that can be typed, links that lead somewhere, and pages of one form."""

import importlib.util
import pathlib
import re
import shlex

import pytest

from switch_tf.cli import main, runs
from switch_tf.configs import gin_syntax, parts

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
# Pages of the user guide start with a command and end with what can go wrong; these have another form.
NO_GUIDE = {"README", "CHANGELOG", "CONTRIBUTING", "features", "decisions", "results", "benchmarks", "scale"}
GUIDE = [file for file in DOCUMENTS if file.stem not in NO_GUIDE and file.parent.name != "notebook"]


def _commands():
    for file in DOCUMENTS:
        for block in re.findall(r"```sh\n(.*?)```", file.read_text(), re.DOTALL):
            yield from _commands_of(block, file.name)


def _examples():
    for command in main.COMMANDS:
        yield from _commands_of(main.parts_of(command)[2], f"{command} --help")


def _commands_of(block, place):
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True) if line.startswith("switch-tf ") else []
        if words and "..." not in words:
            yield pytest.param(words[1:], id=f"{place}: {' '.join(line.split())}")


@pytest.mark.parametrize("words", [*_commands(), *_examples()])
def test_a_documented_command_can_be_typed(words):
    # `switch-tf convert` writes a model file of this name.
    arguments = main._parse(["gin/models/t5_1_1_small.gin" if word.endswith("/model.gin") else word for word in words])
    assert arguments.command == words[0]
    files = getattr(arguments, "gin_file", [])
    if arguments.command == "compare" and files:
        runs.read_comparison(arguments)
    elif any("/runs/" in file for file in files):
        bindings = ["MODEL_DIR='unused'"] if arguments.command in ("compile", "verify-layout", "cache") else []
        bindings += ["TEACHER='unused'"] if arguments.command == "cache" else []
        said = gin_syntax.read(files, [*bindings, *arguments.gin_bindings], arguments.gin_search_paths).check()
        assert said.part(parts.CONFIG).make().num_parameters > 0


def test_the_documents_name_every_command():
    assert {parameter.values[0][0] for parameter in _commands()} == set(main.COMMANDS)


def test_the_help_of_every_command_ends_with_two_examples_of_it(capsys):
    for command in main.COMMANDS:
        with pytest.raises(SystemExit):
            main.main([command, "--help"])
        shown = capsys.readouterr().out.replace("\\\n", " ").rpartition("examples:\n")[2].strip().splitlines()
        assert len(shown) == 2 and all(line.strip().startswith(f"switch-tf {command} ") or line.strip() ==
                                       f"switch-tf {command}" for line in shown)


def _anchors(text):
    """Returns the anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _links():
    for file in DOCUMENTS:
        text = re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" not in target:
                yield file, target


def test_links_between_documents_lead_to_a_file_and_a_heading():
    broken = []
    for file, target in _links():
        name, _, anchor = target.partition("#")
        page = (file.parent / name).resolve() if name else file
        if not page.exists() or anchor and anchor not in _anchors(page.read_text()):
            broken.append(f"{file.relative_to(ROOT)}: {target}")
    assert broken == []


def test_files_that_documents_name_exist():
    folders = "switch_tf|tests|benchmarks|tasks|gin|docs"
    missing = []
    for file in DOCUMENTS:
        for name in re.findall(rf"`((?:{folders})/[\w/]+\.(?:py|gin|md))`", file.read_text()):
            # `switch_tf/cli/NAME.py` is a pattern.
            if "NAME" not in name and not (ROOT / name).exists():
                missing.append(f"{file.relative_to(ROOT)}: {name}")
    assert missing == []


def test_names_that_documents_import_exist():
    missing = []
    for file in DOCUMENTS:
        for block in re.findall(r"```python\n(.*?)```", file.read_text(), re.DOTALL):
            for module, names in re.findall(r"^from (switch_tf[\w.]*) import ([\w, ]+)$", block, re.MULTILINE):
                missing += [f"{file.relative_to(ROOT)}: {module}.{name}" for name in names.split(", ")
                            if not hasattr(importlib.import_module(module), name)
                            and importlib.util.find_spec(f"{module}.{name}") is None]
    assert missing == []


@pytest.mark.parametrize("file", GUIDE, ids=lambda file: file.stem)
def test_a_page_of_the_guide_starts_with_a_command_and_ends_with_what_can_go_wrong(file):
    _, first, *_ = re.split(r"\n\n+", file.read_text(), maxsplit=2)
    assert first.startswith(("```sh", "```python"))
    assert re.findall(r"^## (.*)$", file.read_text(), re.MULTILINE)[-1] == "If it goes wrong"


def test_the_benchmark_of_data_has_the_predicted_rates_of_the_page():
    rates = re.findall(r"\(\d+, ([\d_]+)\)", (ROOT / "benchmarks" / "data.py").read_text())
    page = (ROOT / "docs" / "scale.md").read_text()
    assert len(rates) == 3 and all(f"| {int(rate):,} |" in page for rate in rates)


def test_lines_have_at_most_120_columns():
    # Ruff holds Python to it. Rows of tables, and lines with a URL, may be longer.
    files = (*DOCUMENTS, ROOT / "Makefile", ROOT / "pyproject.toml", *(ROOT / "gin").rglob("*.gin"))
    long = [f"{file.relative_to(ROOT)}:{number}" for file in files
            for number, line in enumerate(file.read_text().splitlines(), start=1)
            if len(line) > 120 and not line.lstrip().startswith("|") and "://" not in line]
    assert long == []
