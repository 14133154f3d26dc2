"""The import contracts of pyproject.toml fail when a file reaches upwards or for a forbidden library."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]


def lint_imports(folder: pathlib.Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [pathlib.Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "file, line, contract",
    [
        ("losses.py", "from switch_tf import layers", "The floors of switch_tf"),
        ("training/trainer.py", "from switch_tf import conversion", "The floors of switch_tf"),
        ("training/train_step.py", "from switch_tf.training import trainer", "Only cli and experiments import"),
        ("training/trainer.py", "import seqio", "Only switch_tf.data imports seqio, and nothing t5"),
        ("layers/moe.py", "import tensorflow as tf", "Layers and models are plain Keras"),
        ("training/trainer.py", "import gin", "Only gin_syntax imports gin"),
    ],
)
def test_violation_breaks_its_contract(file, line, contract, tmp_path):
    shutil.copytree(REPOSITORY / "switch_tf", tmp_path / "switch_tf", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    path = tmp_path / "switch_tf" / file
    path.write_text(path.read_text() + f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    broken = [text for text in result.stdout.splitlines() if text.endswith("BROKEN") or " BROKEN " in text]
    assert [text for text in broken if text.startswith(contract)], result.stdout
