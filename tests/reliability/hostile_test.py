"""A file that is replaced by a FIFO, a link, a bomb or damage is refused in a sentence, whatever reads it.

`python -m tests.reliability.hostile` tries every file in every case.
"""

import json
import subprocess
import sys

import pytest

from tests.reliability import hostile

# The others are left to `make faults`: they take minutes, or differ from one of these only in the format's reader.
CASES = ("a FIFO", "a link to itself", "4 TB")


@pytest.mark.slow
@pytest.mark.parametrize("name", [store for store in hostile.STORES if store not in ("run", "resumed run")])
def test_every_file_of_a_store(name):
    program = ("import json, sys, tensorflow\nfrom tests.reliability import hostile\n"
               "found = hostile.answers(sys.argv[1], lambda file, case: case in sys.argv[2:])\n"
               "print(json.dumps([len(found), hostile.faults(sys.argv[1], found)]))")
    process = subprocess.run([sys.executable, "-c", program, name, *CASES], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    count, faults = json.loads(process.stdout.splitlines()[-1])
    assert faults == [] and count > len(CASES) + 1
