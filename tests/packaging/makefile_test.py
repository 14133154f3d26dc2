"""The installation by make refuses other Pythons and does not take a half-finished one for finished."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path) -> pathlib.Path:
    clone = tmp_path / "path with spaces"
    clone.mkdir()
    for file in ("Makefile", "requirements.txt", "requirements-dev.txt", "pyproject.toml"):
        shutil.copy(REPOSITORY / file, clone)
    return clone


def make(clone: pathlib.Path, python: str) -> subprocess.CompletedProcess:
    """Runs make with a stand-in for Python: the text of a shell script."""
    script = clone / "python"
    script.write_text(f"#!/bin/sh\n{python}\n")
    script.chmod(0o755)
    return subprocess.run(["make", "-C", clone, "lint", "PYTHON=./python"], capture_output=True, text=True)


def test_python_3_10_is_refused_in_one_sentence(clone):
    # The stand-in runs make's own check, but claims to be 3.10.
    result = make(clone, f'''exec "{sys.executable}" -c "import sys; sys.version_info = (3, 10, 13); $2"''')
    assert result.returncode != 0
    sentence = result.stderr.splitlines()[0]
    assert sentence.startswith("switch_tf needs Python 3.11 or 3.12, but ./python is 3.10; ")
    assert sentence.endswith("PYTHON=python3.12 make ...")


def test_interrupted_installation_is_not_taken_for_finished(clone):
    # The stand-in passes the version check and makes a .venv with a failing pip, as after an interrupted download.
    environment = 'mkdir -p .venv/bin && printf "#!/bin/sh\\nexit 1\\n" > .venv/bin/python && chmod +x .venv/bin/python'
    for _ in range(2):
        result = make(clone, f'[ "$1" = -c ] || {{ {environment}; }}')
        assert result.returncode != 0
        assert ".venv/bin/python -m pip install --no-deps -r requirements.txt" in result.stdout
        assert not (clone / ".venv" / "installed").exists()


def test_no_file_that_a_run_writes_is_committed():
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True).stdout
    assert not re.findall(r"^.*(?:events\.out\.tfevents|/step_\d{8}/).*$", tracked, re.MULTILINE)
