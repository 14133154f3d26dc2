"""The requirement files agree with each other, with the code and with the environment that runs this test."""

import pathlib
import re
import subprocess
import sys
import tomllib
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from switch_tf import environment

REPOSITORY = pathlib.Path(__file__).parents[2]
FILES = ("requirements.txt", "requirements-dev.txt", "requirements-tpu.txt", "requirements-tensorflow-tpu.txt",
         "requirements-gpu-compiler.txt")


def lines(file: str) -> list[str]:
    text = (REPOSITORY / file).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pins(file: str) -> dict[str, str]:
    return dict(line.split("==") for line in lines(file))


def test_every_line_is_one_name_with_one_exact_version():
    for file in FILES:
        for line in lines(file):
            # No marker, address, hash or option: the same list for Python 3.11 and 3.12.
            assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*==[0-9][0-9a-z.]*", line), f"{file}: {line}"
        assert lines(file) == sorted(lines(file)), file
        assert len(pins(file)) == len(lines(file)), f"{file} names a distribution twice"


def test_dev_list_only_adds():
    assert not pins("requirements.txt").keys() & pins("requirements-dev.txt").keys()


def test_tpu_list_adds_the_compilers_libtpu():
    main, tpu = pins("requirements.txt"), pins("requirements-tpu.txt")
    assert tpu == main | {"libtpu": pins("requirements-dev.txt")["libtpu"]}


def test_tensorflow_tpu_list_differs_only_in_what_tensorflow_dictates():
    main, tpu = pins("requirements.txt"), pins("requirements-tensorflow-tpu.txt")
    assert main.keys() - tpu.keys() == {"tensorflow"}
    assert tpu.keys() - main.keys() == {"tensorflow-tpu", "libtpu"}
    assert {name for name in main.keys() & tpu.keys() if main[name] != tpu[name]} == {
        "tensorflow-text",
        "tensorboard",
        "setuptools",
    }


def test_no_list_names_a_nightly_or_two_tensorflows():
    for file in FILES:
        assert not [name for name in pins(file) if "nightly" in name]
    assert "tensorflow" not in pins("requirements-tensorflow-tpu.txt")


def test_versions_in_the_code_are_the_pinned_ones():
    everywhere = pins("requirements.txt") | pins("requirements-dev.txt")
    tpu = pins("requirements-tensorflow-tpu.txt")
    for name, version in environment.KNOWN_GOOD["tensorflow"].items():
        assert everywhere[name] == version, name
    for name, version in environment.KNOWN_GOOD["tensorflow-tpu"].items():
        assert tpu[name] == version, name
    for name, (version, _) in environment.NIGHTLIES.items():
        assert everywhere[name] == tpu[name] == version, name


def declared() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """Returns the requirements of a plain `pip install` of the wheel, and those that each extra adds."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = {name: list(map(Requirement, lines)) for name, lines in project["optional-dependencies"].items()}
    return list(map(Requirement, project["dependencies"])), extras


def test_pins_satisfy_the_ranges_of_the_package():
    main = pins("requirements.txt")
    everywhere = main | pins("requirements-dev.txt") | pins("requirements-gpu-compiler.txt")
    tpu = pins("requirements-tensorflow-tpu.txt")
    tpu["tensorflow"] = tpu["tensorflow-tpu"]
    required, extras = declared()
    for requirement in required:
        for pinned in (main, tpu):
            assert requirement.specifier.contains(pinned[requirement.name]), requirement
    for requirement in (one for added in extras.values() for one in added):
        assert requirement.specifier.contains(everywhere[requirement.name]), requirement


def test_jax_is_required_in_the_minor_version_that_lowering_was_tried_with():
    """`tests/partitioning/lowering_test.py` asks for names that no version promises."""
    required, extras = declared()
    (jax,), (tpu,), (cuda,) = [one for one in required if one.name == "jax"], extras["tpu"], extras["cuda"]
    assert jax.specifier == tpu.specifier == cuda.specifier and not jax.specifier.contains("0.12.0")
    assert tpu.extras | cuda.extras <= set(metadata.metadata("jax").get_all("Provides-Extra"))


def test_the_compiler_for_gpus_has_the_version_of_jax():
    gpu, main = pins("requirements-gpu-compiler.txt"), pins("requirements.txt")
    assert {gpu["jax-cuda12-plugin"], gpu["jax-cuda12-pjrt"], main["jax"]} == {main["jaxlib"]}
    _, extras = declared()
    assert next(one for one in extras["aot-gpu"] if "jax" in one.name).specifier == extras["cuda"][0].specifier


def test_the_extras_tpu_and_aot_take_one_libtpu():
    _, extras = declared()
    (aot,), (tpu,) = extras["aot"], extras["tpu"]
    (wanted,) = [one for one in map(Requirement, metadata.requires("jax")) if one.name == "libtpu" and
                 one.marker.evaluate({"extra": next(iter(tpu.extras))})]
    assert wanted.specifier == aot.specifier and wanted.specifier.contains(pins("requirements-tpu.txt")["libtpu"])


def _with_all_they_require(names):
    """Distributions, and those that they require in turn, by their installed metadata."""
    found, waiting = set(), list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        for requirement in map(Requirement, metadata.requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pinned = metadata.version(requirement.name)
                assert requirement.specifier.contains(pinned), f"{name} wants {requirement}, pinned is {pinned}"
                waiting.append(requirement.name)
    return found


def test_a_plain_install_resolves_to_the_pinned_list_without_t5():
    required, extras = declared()
    found = _with_all_they_require(requirement.name for requirement in required)
    pinned = pins("requirements.txt")
    assert found <= pinned.keys()
    assert not [name for name in found if name == "t5" or "nightly" in name]
    assert all(requirement.name != "t5" for added in extras.values() for requirement in added)
    assert f"t5=={pinned['t5']}" == environment.T5


def test_a_plain_install_brings_what_t5_imports():
    required, _ = declared()
    found = _with_all_they_require(requirement.name for requirement in required)
    wanted = {canonicalize_name(one.name) for one in map(Requirement, metadata.requires("t5")) if one.marker is None}
    # Its command-line tools alone use pandas.
    assert wanted - found == {"seqio-nightly", "tfds-nightly", "mesh-tensorflow", "transformers", "pandas"}


def test_environment_is_the_pinned_one():
    pinned = pins("requirements.txt") | pins("requirements-dev.txt")
    different = {
        name: (version, environment.installed_version(name))
        for name, version in pinned.items()
        if environment.installed_version(name) != version
    }
    assert not different, "pinned and installed versions (touch pyproject.toml and run make to install again)"


def test_pip_check_finds_only_what_t5_lacks_and_what_beam_wants_older():
    result = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    found = set(result.stdout.splitlines())
    left_out = {
        f"t5 0.9.4 requires {name}, which is not installed."
        for name in ("mesh-tensorflow", "seqio-nightly", "tfds-nightly", "transformers")
    }
    assert left_out <= found
    assert {line.partition(",")[0].partition("<")[0].partition("!")[0] for line in found - left_out} == {
        f"apache-beam 2.77.0 has requirement {name}" for name in ("pillow", "protobuf", "pyarrow", "python-dateutil")}
