"""The wheel holds every file of switch_tf/, tasks/ and gin/, under switch_tf, and nothing else."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]
# Folder of the repository -> where the wheel has it.
FOLDERS = {"switch_tf": "switch_tf", "tasks": "switch_tf/tasks", "gin": "switch_tf/gin"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    # A copy, because setuptools leaves build/ in the source folder and would take stale files from there next time.
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(REPOSITORY / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(REPOSITORY / file, source)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    result = subprocess.run([*command, "--wheel-dir", target, source], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = target.glob("*.whl")
    return wheel


def test_wheel_holds_exactly_the_files_of_the_repository(wheel):
    expected = {
        str(inside / file.relative_to(REPOSITORY / folder))
        for folder, inside in ((folder, pathlib.PurePosixPath(inside)) for folder, inside in FOLDERS.items())
        for file in (REPOSITORY / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    # A package that is missing here is missing from `packages` in pyproject.toml, a data file from `package-data`.
    assert sorted(expected - held) == []
    assert sorted(held - expected) == []


def test_wheel_has_the_command_and_the_licence(wheel):
    archive = zipfile.ZipFile(wheel)
    information = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA")).rsplit("/", 1)[0]
    assert "switch-tf = switch_tf.cli.main:main" in archive.read(f"{information}/entry_points.txt").decode()
    assert "Apache License" in archive.read(f"{information}/licenses/LICENSE").decode()


def test_a_plain_install_of_the_wheel_asks_for_no_nightly_build(wheel):
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    required = re.findall(r"^Requires-Dist: ([\w-]+)", archive.read(name).decode(), re.MULTILINE)
    assert "seqio" in required
    assert not [one for one in required if one == "t5" or "nightly" in one]


def test_unpacked_wheel_finds_its_own_gin_files_from_an_empty_folder(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    code = "import gin; from switch_tf.configs import shipped_gin; print(gin.__file__, shipped_gin.folder(), sep='\\n')"
    output = subprocess.run(
        [sys.executable, "-c", code],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    library, folder = output.splitlines()
    assert folder == str(site / "switch_tf")
    assert not library.startswith(str(site))


def test_gin_is_no_package():
    # With an __init__.py, gin/ would hide the gin library in the repository's folder.
    assert not list((REPOSITORY / "gin").rglob("__init__.py"))
