"""Checks of Python and the installed packages."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata

from switch_tf import environment
from switch_tf.hardware import host
from switch_tf.installation.findings import OK, PROBLEM, WARNING, Finding
from switch_tf.refusals import Refusal

# Distributions that write the same files. `import switch_tf` has already refused the nightlies of seqio and tfds.
SAME_FILES = (
    ("tensorflow", "tensorflow-tpu", "tensorflow-cpu", "tf-nightly"),
    ("keras", "keras-nightly"),
    ("tensorboard", "tb-nightly"),
)
# Distributions with CUDA's assembler, of CUDA 12 and 13.
_ASSEMBLERS = ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc")
# t5 requires them, but no module that switch_tf uses imports them.
NEVER_INSTALLED = {"seqio-nightly", "tfds-nightly", "mesh-tensorflow", "transformers"}


def check_python() -> Iterator[Finding]:
    """Checks for Python 3.11 or 3.12, which the wheels of editdistance and the pins need."""
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        yield Finding("Python", OK, f"{version} at {sys.executable}")
    else:
        yield Finding("Python", PROBLEM, version, "install again under Python 3.11 or 3.12")


def check_variables() -> Iterator[Finding]:
    """Lists the environment variables that change what a run computes."""
    found = environment.changed_by_variables()
    if not found:
        yield Finding("variables", OK, "none of KERAS_*, TF_*, XLA_* and JAX_* changes a run")
        return
    names = [name for name in found if name.isupper()]
    files = [name for name in found if name not in names]
    cures = ([f"unset {' '.join(names)}"] if names else []) + [f"correct {file}" for file in files]
    keras_backend = "; commands compute with TensorFlow, whatever Keras' back end" if "KERAS_BACKEND" in found or any(
        "backend" in found[file] for file in files) else ""
    yield Finding("variables", WARNING, ", ".join(f"{name}={value}" for name, value in found.items()) + keras_backend,
                  f"{' and '.join(cures)}, unless you mean it")


def check_versions() -> Iterator[Finding]:
    """Compares packages that only work in certain pairs with the pairs that the tests run with."""
    flavour = tensorflow_distribution()
    for name, wanted in environment.KNOWN_GOOD[flavour].items():
        version = environment.installed_version(name)
        cure = f"{environment.pip()} install --no-deps {name}=={wanted}"
        if name == "libtpu" and version is not None:
            yield _libtpu(flavour, version, wanted, cure)
        elif version == wanted:
            yield Finding(name, OK, version)
        elif version is None and name == "libtpu" and flavour != "tensorflow-tpu" and not host.has_tpu():
            yield Finding(name, OK, "absent; only the extra `aot` needs it")
        elif version is None:
            yield Finding(name, PROBLEM, "not installed", f"{cure}; for all of them: -r {requirements_file()}")
        elif name == "tensorflow-text" and _minor(version) != _minor(environment.installed_version(flavour)):
            beside = f"{flavour} {environment.installed_version(flavour)}"
            yield Finding(name, PROBLEM, f"{version} beside {beside}: the first two numbers must agree", cure)
        else:
            yield Finding(name, WARNING, f"{version}; the tests run with {wanted}", cure)
    yield _t5()


def _t5():
    name, _, wanted = environment.T5.partition("==")
    version = environment.installed_version(name)
    if version in (None, wanted):
        absent = f"absent; only downstream tasks such as GLUE need it: {environment.install_t5()}"
        return Finding(name, OK, version or absent)
    return Finding(name, WARNING, f"{version}; the tests run with {wanted}", environment.install_t5())


def _libtpu(flavour, version, wanted, cure):
    """Checks libtpu, which belongs to TensorFlow beside tensorflow-tpu, and to jaxlib everywhere else."""
    partner = "tensorflow-tpu" if flavour == "tensorflow-tpu" else "jaxlib"
    pair = f"{version} beside {partner} {environment.installed_version(partner)}"
    if environment.goes_with(version, wanted):
        return Finding("libtpu", OK, pair + (": `switch-tf compile` works here" if partner == "jaxlib" else ""))
    fault = ("TensorFlow aborts at import" if partner == "tensorflow-tpu" else
             "JAX may not start the TPU" if host.has_tpu() else "`switch-tf compile` refuses it")
    return Finding("libtpu", PROBLEM, f"{pair}: {fault}, {wanted} is the one that goes with it", cure)


def check_double_distributions() -> Iterator[Finding]:
    """Finds distributions that overwrite each other's files."""
    clean = True
    for group in SAME_FILES:
        present = [name for name in group if environment.installed_version(name)]
        if len(present) > 1:
            clean = False
            keep = "tensorflow-tpu" if "tensorflow-tpu" in present else present[0]
            drop = " ".join(name for name in present if name != keep)
            cure = (
                f"{environment.pip()} uninstall -y {drop} && "
                f"{environment.pip()} install --no-deps --force-reinstall {keep}=={environment.installed_version(keep)}"
            )
            yield Finding("double packages", PROBLEM, f"{' and '.join(present)} write the same files", cure)
    if clean:
        names = ("seqio", "tensorflow-datasets", "keras", "tensorboard")
        yield Finding("double packages", OK, "one each of tensorflow, " + ", ".join(names))


def check_requirements() -> Iterator[Finding]:
    """Checks that each requirement of switch-tf, direct or indirect, is installed in an accepted version."""
    try:
        from packaging.requirements import Requirement  # here, because the doctor finds it missing
    except ImportError:
        yield Finding("requirements", PROBLEM, "packaging is not installed", f"{environment.pip()} install packaging")
        return
    seen, waiting, unmet = set(), [("switch-tf", "")], {}
    while waiting:
        owner, extra = waiting.pop()
        if (owner, extra) in seen:
            continue
        seen.add((owner, extra))
        for line in metadata.requires(owner) or ():
            requirement = Requirement(line)
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            if name == "tensorflow":
                name = tensorflow_distribution()
            if name in NEVER_INSTALLED:
                continue
            version = environment.installed_version(name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                unmet[name] = (owner, f"{name}{requirement.specifier}", version)
            else:
                waiting += [(name, ""), *((name, extra) for extra in requirement.extras)]
    for name, (owner, wanted, version) in unmet.items():
        found = f"{owner} wants {wanted}, installed is {version or 'none'}"
        yield Finding(name, PROBLEM, found, f"{environment.pip()} install --no-deps {shlex.quote(wanted)}")
    if not unmet:
        yield Finding("requirements", OK, f"all of {len({name for name, _ in seen}) - 1} distributions agree")


def tensorflow_distribution() -> str:
    """Returns the name of the distribution that brings TensorFlow here."""
    return next(filter(environment.installed_version, ("tensorflow-tpu", "tensorflow", "tensorflow-cpu")), "tensorflow")


def requirements_file() -> str:
    """Returns the name of the pinned list for this machine."""
    if tensorflow_distribution() == "tensorflow-tpu":
        return "requirements-tensorflow-tpu.txt"
    return "requirements-tpu.txt" if host.has_tpu() else "requirements.txt"


def _minor(version: str | None) -> list[str] | None:
    return version.split(".")[:2] if version else None


def check_gpu_compiler() -> None:
    """Refuses a machine without JAX's plugin for CUDA of jaxlib's version, or without the assembler of CUDA.

    Raises:
        Refusal: One of them is missing or of another version.
    """
    wanted, plugin = environment.installed_version("jaxlib"), environment.cuda_plugin()
    version = plugin and environment.installed_version(plugin)
    if version != wanted:
        fault = f"is {plugin} {version}, which jaxlib {wanted} does not go with" if plugin else "is not installed"
        raise Refusal(f"The compiler for NVIDIA's GPUs {fault}; run: {environment.pip()} install "
                      f"jax-cuda12-plugin=={wanted} nvidia-cuda-nvcc-cu12")
    if not shutil.which("ptxas") and not any(map(environment.installed_version, _ASSEMBLERS)):
        raise Refusal("The compiler for NVIDIA's GPUs needs ptxas of CUDA, which is not installed; run: "
                      f"{environment.pip()} install {_ASSEMBLERS['13' in plugin]}")


def check_tpu_compiler() -> None:
    """Refuses a machine without a TPU compiler that fits jaxlib.

    Raises:
        Refusal: libtpu is missing or of another version, or tensorflow-tpu is installed.
    """
    wanted, version = environment.KNOWN_GOOD["tensorflow"]["libtpu"], environment.installed_version("libtpu")
    if environment.installed_version("tensorflow-tpu"):
        raise Refusal("The TPU compiler for machines without a TPU does not go with tensorflow-tpu; run this where "
                      "tensorflow is installed (docs/install.md).")
    if version is None or not environment.goes_with(version, wanted):
        fault = "is not installed" if version is None else f"is libtpu {version}, which jaxlib does not go with"
        raise Refusal(f"The TPU compiler {fault}; run: {environment.pip()} install --no-deps libtpu=={wanted}")
