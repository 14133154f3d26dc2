"""The memory of a conversion is that of a portion, whatever the size of the model. A kill costs one portion."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.conversion.large_checkpoints import WRITERS, config_of
from tests.conversion.streaming_test import sums

# Prints the peak in KiB after all imports, and after the conversion. `ru_maxrss` would be the parent's where that is
# larger: a child starts with it.
PROGRAM = """
import sys
from switch_tf.conversion import formats, huggingface, own, t5x, weight_source
from tests.conversion.large_checkpoints import config_of
import pathlib, json
kind, source, output, to, d_model, largest = sys.argv[1:]
weight_source.LARGEST = int(largest)

def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))

peaks = [peak()]
config = None if kind == "hugging_face" else config_of(int(d_model), 128)
dtype = "bfloat16" if to == "hugging_face" else "float32"
formats.convert(pathlib.Path(source), pathlib.Path(output), formats.WRITABLE[to], None, config, dtype)
print(json.dumps([*peaks, peak()]))
"""


def start(*words):
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *map(str, words)], stdout=subprocess.PIPE, text=True)


def peaks(process):
    """Returns the bytes at the peak after all imports, and at the end."""
    told, _ = process.communicate()
    assert process.returncode == 0
    return [1024 * kib for kib in json.loads(told.splitlines()[-1])]


@pytest.mark.parametrize(("d_model", "largest", "limit"), [
    pytest.param(256, 2**25, 3 * 10**8, marks=pytest.mark.slow),  # 1.1 GB in float32, in portions of 32 MiB
    pytest.param(1024, 2**28, None, marks=pytest.mark.exhaustive)])  # 8.8 GB in bfloat16
@pytest.mark.parametrize(("kind", "to"), [
    ("hugging_face", "switch_tf"), ("t5x", "hugging_face"),
    pytest.param("hugging_face", "hugging_face", marks=pytest.mark.exhaustive),
    pytest.param("t5x", "switch_tf", marks=pytest.mark.exhaustive)])
def test_the_peak_is_that_of_a_portion_and_a_killed_conversion_goes_on(kind, to, d_model, largest, limit, tmp_path):
    config = config_of(d_model, 128)
    WRITERS[kind](tmp_path / "in", config)
    words = [kind, tmp_path / "in", tmp_path / "out", to, d_model, largest]
    before, peak = peaks(start(*words))
    assert peak < 2**32
    if limit is not None:
        assert peak - before < limit < 2 * config.num_parameters
    wanted = sums(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "whole")
    process, record = start(*words), tmp_path / ".out.unfinished" / "record.jsonl"
    while not record.exists() or record.read_text().count("\n") < 16:  # of about 36 or 72 portions
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    peaks(start(*words))
    assert sums(tmp_path / "out") == wanted
    shutil.rmtree(tmp_path)  # up to 44 GB
