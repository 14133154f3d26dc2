"""Output of C and of Python is filtered and withheld, and none of it is lost when a process ends at once."""

import contextlib
import os
import subprocess
import sys

import pytest

from switch_tf.refusals import Refusal
from switch_tf.storage import outputs

# Lines of Python and of C, and one without its end.
PRINTS = """
import ctypes, os, sys
from switch_tf.storage import outputs

def prints(text="x"):
    for _ in range(2000):
        print("[Gloo] from Python", text)
        print("from Python", text)
    sys.stdout.flush()
    ctypes.CDLL(None).puts(b"[Gloo] from C")
    ctypes.CDLL(None).puts(b"from C")
    ctypes.CDLL(None).printf(b"end")
"""
PRINTED = "from Python x\n" * 2000 + "from C\nend"


def _run(code):
    return subprocess.run([sys.executable, "-c", PRINTS + code], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONUNBUFFERED": ""})


def test_a_process_that_ends_at_once_loses_no_line():
    done = _run("""
with outputs.drop_lines(b"[Gloo] "), outputs.held_back():
    prints()
    outputs.end(7, "The last line.")
""")
    assert (done.returncode, done.stderr) == (7, "The last line.\n")
    assert done.stdout == PRINTED


def test_lines_are_removed_within_the_scope_alone_also_if_a_child_keeps_the_output_open():
    done = _run("""
import subprocess, time
with outputs.drop_lines(b"[Gloo] "):
    prints()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1); print('[Gloo] late'); print('late')"])
print("\\n[Gloo] after it", flush=True)
time.sleep(2)
""")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{PRINTED}\n[Gloo] after it\nlate\n"


@pytest.mark.parametrize("ending, status", [("os._exit(0)", 0), ("outputs.end(3)", 3)])
def test_a_reader_that_has_read_enough_is_noticed_by_the_writers(ending, status):
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = PRINTS + f"""
try:
    with outputs.drop_lines(b"[Gloo] "):
        while True:
            prints()
except BrokenPipeError:
    os.write(2, b"closed")
    {ending}
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (status, "closed")


def test_a_reader_that_does_not_read_cannot_keep_a_process_that_ends_at_once():
    process = subprocess.Popen([sys.executable, "-c", PRINTS + """
import threading, time
with outputs.drop_lines(b"[Gloo] "):
    threading.Thread(target=prints, args=["x" * 1000], daemon=True).start()
    time.sleep(1)
    outputs.end(5)
"""], stdout=subprocess.PIPE)
    with process.stdout:
        assert process.wait(timeout=30) == 5


@pytest.mark.parametrize("error, is_shown", [(None, False), (Refusal("no"), False), (KeyboardInterrupt(), False),
                                             (OSError("no"), True)])
def test_what_is_withheld_is_shown_for_a_bug_alone(capfd, error, is_shown):
    with contextlib.suppress(Refusal, KeyboardInterrupt, OSError), outputs.held_back():
        os.write(2, b"noise")
        if error is not None:
            raise error
    assert (capfd.readouterr().err == "noise") == is_shown


@pytest.mark.parametrize("kind", ["terminal", "pipe", "full disk"])
def test_output_that_cannot_be_written_ends_nothing_within_the_scope(kind):
    read_end, write_end = {"terminal": os.openpty, "pipe": os.pipe,
                           "full disk": lambda: (os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY))
                           }[kind]()
    process = subprocess.Popen([sys.executable, "-c", """
import sys
from switch_tf.storage import outputs

sys.stdin.readline()
with outputs.outlived():
    for number in range(10_000):
        print(number, file=sys.stderr)
        print(number, flush=True)
sys.exit(4)
"""], stdin=subprocess.PIPE, stdout=write_end, stderr=write_end, start_new_session=True)
    os.close(write_end)
    os.close(read_end)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 4


def test_output_that_is_open_is_written_as_before(capsys):
    with outputs.outlived():
        print("a line")
        print("an error", file=sys.stderr)
        assert not sys.stderr.isatty()
    assert capsys.readouterr() == ("a line\n", "an error\n")
