"""Several processes of a command start together, receive each other's addresses, and end together."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from switch_tf.hardware import host
from switch_tf.partitioning import cluster
from switch_tf.refusals import Refusal
from switch_tf.statuses import OUTAGE
from switch_tf.training import processes

# What every stand-in begins with. It ends by itself, should nobody end it.
_START = """
import json, os, pathlib, signal, sys, time
signal.alarm(60)
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def write_stand_in(folder, text):
    """Writes the program that `python -m switch_tf.cli` runs if `folder` comes first in its path."""
    package = folder / "switch_tf" / "cli"
    package.mkdir(parents=True)
    for parent in (package.parent, package):
        (parent / "__init__.py").write_text("")
    (package / "__main__.py").write_text(_START + text)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Replaces `switch-tf` by a program: `python -m` looks into the current folder first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return lambda text: write_stand_in(tmp_path, text)


@pytest.fixture
def start():
    """Starts programs of one text each; none of them outlives the test."""
    children = []

    def run(*texts):
        children.extend(subprocess.Popen([sys.executable, "-c", text]) for text in texts)
        return children

    yield run
    for child in children:
        child.kill()
        child.wait()


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


# Devices of a process.


def put(monkeypatch, count):
    variables = {}
    cluster.put(variables, [f"127.0.0.1:{port}" for port in range(1, count + 1)], 0)
    monkeypatch.setenv("TF_CONFIG", variables["TF_CONFIG"])


def test_processes_share_the_devices(monkeypatch):
    assert processes.devices_of_this_process(4) == 4
    put(monkeypatch, 2)
    assert processes.devices_of_this_process(4) == 2
    assert processes.devices_of_this_process(2) == 1


@pytest.mark.parametrize(("count", "num_devices", "message"), [
    (2, 3, "--devices must be a positive multiple of the 2 processes, not 3."),
    (4, 2, "--devices must be a positive multiple of the 4 processes, not 2."),
    (2, -2, "--devices must be a positive multiple of the 2 processes, not -2."),
    (1, 0, "--devices must be a positive multiple of the 1 process, not 0.")])
def test_devices_that_cannot_be_shared_are_refused(monkeypatch, count, num_devices, message):
    put(monkeypatch, count)
    with pytest.raises(Refusal) as raised:
        processes.devices_of_this_process(num_devices)
    assert str(raised.value) == message


def test_tf_config_that_cannot_be_read_is_a_mistake(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "host0:2222")
    with pytest.raises(Refusal, match="TF_CONFIG must read like "):
        processes.devices_of_this_process(4)


# Starting.


def test_each_process_has_its_own_index_and_all_the_same_addresses(stand_in, tmp_path):
    stand_in('pathlib.Path(f"{index}.json").write_text(json.dumps([os.environ["TF_CONFIG"], sys.argv[1:]]))')
    assert processes.run(["train", "--gin_file=x", "--processes=3"], 3) == 0
    told = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(3)]
    configs = [json.loads(config) for config, _ in told]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": index} for index in range(3)]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3 and all(address.startswith("127.0.0.1:") for address in addresses)
    assert [config["cluster"] for config in configs] == [{"worker": addresses}] * 3
    # The last --processes counts, so that a child does not start children.
    assert [words for _, words in told] == [["train", "--gin_file=x", "--processes=3", "--processes=1"]] * 3
    assert "TF_CONFIG" not in os.environ


def test_one_of_several_processes_does_not_start_more(monkeypatch):
    put(monkeypatch, 2)
    with pytest.raises(Refusal) as raised:
        processes.run(["train"], 2)
    assert str(raised.value) == ("TF_CONFIG names the processes already, so this is one of them; leave out "
                                 "--processes, or unset TF_CONFIG.")


@pytest.mark.parametrize("count", [0, -1, 65, 99999999999])
def test_a_machine_is_shared_by_one_to_64_processes(count):
    with pytest.raises(Refusal) as raised:
        processes.run(["train"], count)
    assert str(raised.value) == f"--processes must be from 1 to 64, as they share one machine, not {count}."


def test_ports_are_free_and_differ():
    ports = processes.free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


# GPUs.


@pytest.mark.parametrize("visible, shares", [("0,1,2,3", ["0,1", "2,3"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])])
def test_each_process_sees_its_share_of_the_gpus(stand_in, tmp_path, monkeypatch, visible, shares):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    stand_in('pathlib.Path(f"{index}.txt").write_text(os.environ["CUDA_VISIBLE_DEVICES"])')
    assert processes.run(["train"], 2) == 0
    assert [(tmp_path / f"{index}.txt").read_text() for index in range(2)] == shares


def test_processes_of_one_tpu_are_refused(monkeypatch):
    monkeypatch.setattr(host, "has_tpu", lambda: True)
    with pytest.raises(Refusal, match="The chips of a TPU belong to one process of their host; leave out --processes"):
        processes.run(["train"], 2)


def test_gpus_that_cannot_be_shared_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(Refusal, match="--processes must divide the 3 GPUs of this machine, not 2; set CUDA_VISIBLE_"):
        processes.run(["train"], 2)


def test_gpus_are_counted_where_no_variable_names_them(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(host.glob, "glob", lambda pattern: ["/dev/nvidia10", "/dev/nvidia2", "/dev/nvidia0"])
    assert host.gpus() == ["0", "2", "10"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert host.gpus() == []


# Ending with the parent.

_PARENT = """
import os
from switch_tf.training import processes
os.environ["PYTHONPATH"] = {folder!r}
processes.run(["train"], 2)
"""


@pytest.mark.parametrize("is_stopped_first, number", [(False, signal.SIGKILL), (True, signal.SIGKILL),
                                                      (False, signal.SIGHUP)])
def test_children_are_told_to_end_when_their_parent_is_gone(is_stopped_first, number, tmp_path):
    write_stand_in(tmp_path / "stand_in", """
def ended(*_):
    pathlib.Path(f"{index}.ended").touch()
    os._exit(0)

for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, ended)
pathlib.Path(f"{index}.started").touch()
signal.pause()
""")
    # The parent has the package, and its children, which look into PYTHONPATH, the stand-in.
    code = _PARENT.format(folder=str(tmp_path / "stand_in"))
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.started"))) == 2)
        if is_stopped_first:
            parent.send_signal(signal.SIGSTOP)
        parent.send_signal(number)
        wait_for(lambda: len(list(tmp_path.glob("*.ended"))) == 2)
        assert sorted(path.name for path in tmp_path.glob("*.ended")) == ["0.ended", "1.ended"]
    finally:
        parent.kill()
        parent.wait()


# What is seen of them.


def test_the_first_process_writes_here_and_of_the_others_only_errors_are_shown(stand_in, capfd):
    stand_in('print(f"output {index}", flush=True); print(f"error {index}", file=sys.stderr)')
    assert processes.run(["train"], 2) == 0
    seen = {"out": "", "err": ""}

    def is_relayed():
        for name, text in capfd.readouterr()._asdict().items():
            seen[name] += text
        return "error 1" in seen["err"]

    wait_for(is_relayed)
    assert seen["out"] == "output 0\n"
    assert sorted(seen["err"].splitlines()) == ["[process 1] error 1", "error 0"]


def test_every_line_of_an_error_has_the_number_of_its_process(capsys):
    processes._relay(io.BytesIO(b"first\nsecond \xff\n\n"), 3)
    assert capsys.readouterr().err == "[process 3] first\n[process 3] second \ufffd\n[process 3] \n"


# Ending.


def test_one_that_ends_because_another_one_was_killed_is_not_named_as_the_first(capsys):
    children = [subprocess.Popen([sys.executable, "-c", code]) for code in (
        f"raise SystemExit({OUTAGE})", "import os; os.kill(os.getpid(), 9)")]
    for child in children:
        child.wait()
    assert processes._wait(children) == OUTAGE
    assert "Process 1 of 2 ended by SIGKILL" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_a_signal_ends_before_it_can_stop_in_order_ends_those_that_wait_for_it(stand_in, capsys, number):
    stand_in(f"signal.signal({int(number)}, signal.SIG_DFL)\n"
             'pathlib.Path(f"{index}.ready").touch()\n'
             'while len(list(pathlib.Path().glob("*.ready"))) < 2: time.sleep(0.01)\n'
             f"if index == 1: os.kill(os.getpid(), {int(number)})\n"
             "time.sleep(60)")
    started = time.monotonic()
    assert processes.run(["train"], 2) == 130
    assert time.monotonic() - started < processes.GRACE_SECONDS
    assert f"Process 1 of 2 ended by {number.name}; the others end too" in capsys.readouterr().err


def test_a_signal_to_all_that_ends_them_is_an_interrupt_without_a_word(start, capsys):
    children = start(*["import os, signal; os.kill(os.getpid(), signal.SIGTERM)"] * 2)
    assert processes._wait(children, [signal.SIGTERM]) == 130
    assert capsys.readouterr().err == ""


def test_one_that_fails_ends_the_others(stand_in, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 1)
    stand_in('pathlib.Path(f"{index}.pid").write_text(str(os.getpid()))\n'
             'while len(list(pathlib.Path().glob("*.pid"))) < 3: time.sleep(0.01)\n'
             "if index == 1: sys.exit(3)\n"
             "time.sleep(60)")
    assert processes.run(["train"], 3) == 3
    assert capsys.readouterr().err == ("Process 1 of 3 ended with status 3; the others end too, within 1 s.\n")
    for index in range(3):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"{index}.pid").read_text()), 0)


def test_the_others_may_end_by_themselves_first(stand_in, tmp_path):
    stand_in('if index == 1: signal.raise_signal(signal.SIGKILL)\n'
             'time.sleep(0.3); pathlib.Path("ended").touch(); sys.exit(2)')
    assert processes.run(["train"], 2) == 2
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize(("statuses", "result"), [
    ((0, 0, 0), 0), ((2, 0, 0), 2), ((3, 3), 3), ((4, 2, 4), 2), ((4, 4, 1), 1), ((4, 130), 130), ((130, 130), 130)])
def test_the_status_is_that_of_the_process_that_ended_the_others(start, statuses, result):
    assert processes._wait(start(*(f"raise SystemExit({status})" for status in statuses))) == result


def test_one_that_a_signal_ended_has_failed(start, monkeypatch, capsys):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0)
    children = start("import os; os.abort()", "import time; time.sleep(60)")
    assert processes._wait(children) == 1
    assert "Process 0 of 2 ended by SIGABRT; the others end too" in capsys.readouterr().err
    assert [child.returncode for child in children] == [-signal.SIGABRT, -signal.SIGKILL]


def test_one_that_the_kernel_killed_is_an_outage(start, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0)
    assert processes._wait(start("import os; os.kill(os.getpid(), 9)", "import time; time.sleep(60)")) == 4


@pytest.mark.parametrize("status", [0, 130])
def test_one_that_ended_well_or_was_interrupted_leaves_the_others_alone(start, capsys, monkeypatch, status):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0)
    children = start(f"raise SystemExit({status})", f"import time; time.sleep(0.5); raise SystemExit({status})")
    assert processes._wait(children) == status
    assert capsys.readouterr().err == ""


def test_how_a_process_ended_is_said_in_words():
    assert processes._describe(3) == "with status 3"
    assert processes._describe(-signal.SIGKILL) == "by SIGKILL"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_the_own_handler_comes_back(stand_in, tmp_path, capsys, number):
    stand_in("def stop(number, frame):\n"
             '    pathlib.Path(f"{index}.stopped").write_text(signal.Signals(number).name)\n'
             "    sys.exit(130)\n"
             f"signal.signal({int(number)}, stop)\n"
             'pathlib.Path(f"{index}.ready").touch()\n'
             "time.sleep(60)")
    own = []  # if the signal is not passed on it ends up here, and not with pytest
    previous = signal.signal(number, lambda number, _: own.append(number))
    handler = signal.getsignal(number)

    def terminate():
        wait_for(lambda: len(list(tmp_path.glob("*.ready"))) == 2 and signal.getsignal(number) != handler)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=terminate)
    thread.start()
    try:
        assert processes.run(["train"], 2) == 130
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, previous)
        thread.join()
    assert own == []
    assert [path.read_text() for path in sorted(tmp_path.glob("*.stopped"))] == [number.name] * 2
    assert "ended" not in capsys.readouterr().err  # an interrupt is no failure
