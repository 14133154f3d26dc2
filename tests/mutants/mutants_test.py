"""The mutants themselves: each still applies to the code as it is, as another program, and its tests are there."""

import ast
import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def _load(name):
    spec = importlib.util.spec_from_file_location(name, pathlib.Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MUTANTS = _load("mutants").MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.old[:40]}")
def test_it_applies_once_and_is_another_program(mutant):
    text = (ROOT / mutant.path).read_text()
    assert text.count(mutant.old) == 1
    assert ast.dump(ast.parse(text.replace(mutant.old, mutant.new))) != ast.dump(ast.parse(text))
    assert all((ROOT / test).is_file() for test in mutant.tests)


def test_no_mutant_is_there_twice():
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS) >= 60
