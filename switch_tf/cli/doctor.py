"""`switch-tf doctor`: is this machine set up right? Each line is what was found; each fault comes with its cure."""

import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata

from switch_tf import environment

OK, WARNING, PROBLEM = "ok", "warning", "problem"

# Distributions that write the same files. (`import switch_tf` has refused the nightlies of seqio and tfds by now.)
SAME_FILES = (
    ("tensorflow", "tensorflow-tpu", "tensorflow-cpu", "tf-nightly"),
    ("keras", "keras-nightly"),
    ("tensorboard", "tb-nightly"),
)
# t5 requires them, and nothing that switch_tf uses of it imports them.
NEVER_INSTALLED = {"seqio-nightly", "tfds-nightly", "mesh-tensorflow", "transformers"}

_REQUIREMENTS = {"tensorflow": "requirements.txt", "tensorflow-tpu": "requirements-tpu.txt"}

IMPORT_TIMEOUT = 300  # seconds

_DEVICES = """
import json, tensorflow, tensorflow_text
print(json.dumps([device.device_type for device in tensorflow.config.list_physical_devices()]))
"""

EXAMPLES = r"""
switch-tf doctor
switch-tf doctor --json
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report; `cure` is what to type or change, empty where nothing is wrong."""

    check: str
    status: str
    found: str
    cure: str = ""


def add_arguments(parser) -> None:
    """Declares the arguments of the command: none of its own."""
    parser.description = "Checks versions, accelerators, folders and resources of this machine."


def run(arguments) -> dict:
    """Runs every check, printing each finding as soon as it is known.

    Returns: the JSON object; its `exit_status` is 1 if anything is a problem.
    """
    stream = sys.stderr if arguments.json else sys.stdout
    findings = []
    for check in (
        check_python,
        check_versions,
        check_double_distributions,
        check_requirements,
        check_tensorboard,
        check_accelerators,
        check_folders,
        check_machine,
    ):
        for finding in check():
            findings.append(finding)
            print(f"{finding.status:8} {finding.check:20} {finding.found}", file=stream)
            if finding.cure:
                print(f"{'':8} {'':20} cure: {finding.cure}", file=stream)
            stream.flush()
    count = {status: sum(finding.status == status for finding in findings) for status in (PROBLEM, WARNING)}
    print(f"checks: {len(findings)}, problems: {count[PROBLEM]}, warnings: {count[WARNING]}", file=stream)
    return {
        "problems": count[PROBLEM],
        "warnings": count[WARNING],
        "checks": [dataclasses.asdict(finding) for finding in findings],
        "exit_status": int(count[PROBLEM] > 0),
    }


def check_python() -> Iterator[Finding]:
    """Python 3.11 or 3.12, as the wheels of editdistance and the pins demand."""
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        yield Finding("Python", OK, f"{version} at {sys.executable}")
    else:
        yield Finding("Python", PROBLEM, version, "install again under Python 3.11 or 3.12")


def check_versions() -> Iterator[Finding]:
    """The packages that only work in certain pairs, against the pairs that the tests run with."""
    flavour = _flavour()
    if flavour == "tensorflow" and environment.has_tpu():
        yield Finding(
            "TPU",
            WARNING,
            "a TPU chip seems to be attached, but tensorflow-tpu is not installed",
            "in a fresh environment: pip install --no-deps -r requirements-tpu.txt",
        )
    for name, wanted in environment.KNOWN_GOOD[flavour].items():
        version = environment.installed_version(name)
        cure = f"{environment.pip()} install --no-deps {name}=={wanted}"
        if name == "libtpu" and version is not None:
            yield _libtpu(flavour, version, wanted, cure)
        elif version == wanted:
            yield Finding(name, OK, version)
        elif version is None and name == "libtpu" and flavour == "tensorflow":
            yield Finding(name, OK, "absent; only the extra `aot` needs it")
        elif version is None:
            yield Finding(name, PROBLEM, "not installed", f"{cure}; for all of them: -r {_REQUIREMENTS[flavour]}")
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
    """libtpu goes with TensorFlow on a TPU VM, and with jaxlib where `switch-tf compile` asks it."""
    partner = "tensorflow-tpu" if flavour == "tensorflow-tpu" else "jaxlib"
    pair = f"{version} beside {partner} {environment.installed_version(partner)}"
    if environment.goes_with(version, wanted):
        return Finding("libtpu", OK, pair + (": `switch-tf compile` works here" if partner == "jaxlib" else ""))
    fault = "TensorFlow aborts at import" if partner == "tensorflow-tpu" else "`switch-tf compile` refuses it"
    return Finding("libtpu", PROBLEM, f"{pair}: {fault}, {wanted} is the one that goes with it", cure)


def check_double_distributions() -> Iterator[Finding]:
    """No two distributions that overwrite each other's files."""
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
    """Every requirement of switch-tf, and of what it requires in turn, is installed in a version it accepts."""
    try:
        from packaging.requirements import Requirement
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
                name = _flavour()
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


def check_tensorboard() -> Iterator[Finding]:
    """TensorBoard starts; version 2.20 needs a setuptools that still brings pkg_resources."""
    output, error = _python("import tensorboard.main")
    if output is not None:
        yield Finding("tensorboard starts", OK, "look at a run with: tensorboard --logdir RUN/events")
    else:
        wanted = "'setuptools<81'" if "pkg_resources" in error else "tensorboard"
        yield Finding("tensorboard starts", PROBLEM, error, f"{environment.pip()} install --no-deps {wanted}")


def check_accelerators() -> Iterator[Finding]:
    """TensorFlow imports, and the devices it sees. In a process of its own: a wrong libtpu aborts at import."""
    environment.skip_tpu_metadata_query()
    output, error = _python(_DEVICES)
    if output is None:
        reinstall = f"{environment.pip()} install --no-deps --force-reinstall -r {_REQUIREMENTS[_flavour()]}"
        cure = f"what is said above first; if nothing is, {reinstall}"
        yield Finding("accelerators", PROBLEM, f"TensorFlow does not import: {error}", cure)
        return
    devices = json.loads(output)
    counts = {kind: devices.count(kind) for kind in ("TPU", "GPU") if kind in devices}
    if counts:
        yield Finding("accelerators", OK, ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    elif environment.has_tpu() and _flavour() == "tensorflow-tpu":
        cure = "end the process that holds the TPU (only one can), or check that libtpu is the version above"
        yield Finding("accelerators", PROBLEM, "a TPU chip is attached and TensorFlow does not see it", cure)
    elif shutil.which("nvidia-smi"):
        version = environment.installed_version("tensorflow")
        cure = f"{environment.pip()} install 'tensorflow[and-cuda]=={version}', or run without the GPU"
        yield Finding("accelerators", WARNING, "an NVIDIA driver is installed and TensorFlow sees no GPU", cure)
    else:
        yield Finding("accelerators", OK, "none; TensorFlow imports and runs on the CPU")


def check_folders() -> Iterator[Finding]:
    """The current folder (runs are written there) and the cache folder are writable and have room."""
    for check, folder in (("current folder", pathlib.Path.cwd()), ("cache folder", environment.cache_folder())):
        existing = next(path for path in (folder, *folder.parents) if path.is_dir())
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            yield Finding(check, PROBLEM, f"{existing} is not writable: {error.strerror}", "choose one that you own")
            continue
        free = shutil.disk_usage(existing).free / 1e9
        status = PROBLEM if free < 0.5 else WARNING if free < 5 else OK
        cure = "" if status == OK else "make room: a run keeps several checkpoints"
        yield Finding(check, status, f"{folder} is writable, {free:.1f} GB free", cure)


def check_machine() -> Iterator[Finding]:
    """Cores that this process may use, and memory."""
    yield Finding("cores", OK, str(len(os.sched_getaffinity(0))))
    memory = environment.memory("MemTotal") / 1e9
    if memory < 4:
        cure = "start with gin/models/switch_tiny.gin and a small BATCH_SIZE"
        yield Finding("memory", WARNING, f"{memory:.1f} GB", cure)
    else:
        yield Finding("memory", OK, f"{memory:.1f} GB")


def _flavour() -> str:
    """The distribution that brings TensorFlow here."""
    return "tensorflow-tpu" if environment.installed_version("tensorflow-tpu") else "tensorflow"


def _minor(version: str | None) -> list[str] | None:
    return version and version.split(".")[:2]


def _python(code: str) -> tuple[str | None, str]:
    """Runs code in a process of its own; returns (standard output or None, the line that says what went wrong)."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {IMPORT_TIMEOUT} seconds"
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"ended with status {result.returncode}"]
        return None, lines[-1]
    return result.stdout, ""
