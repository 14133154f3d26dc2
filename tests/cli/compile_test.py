"""The command on a real run: its numbers, its cache, what does not fit, what it refuses."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("libtpu")

from switch_tf import environment
from switch_tf.aot import answers, compiler, estimate
from switch_tf.cli.main import main
from switch_tf.hardware import host

RUN = ["--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/tasks/c4.gin", "--gin_file=gin/runs/pretrain.gin",
       "--gin.BATCH_SIZE=32", "--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 32}"]


SMALL = ["--gin.SwitchConfig.num_encoder_layers=1", "--gin.SwitchConfig.num_decoder_layers=1",
         "--gin.SwitchConfig.encoder_sparse_step=1", "--gin.SwitchConfig.decoder_sparse_step=1"]


@pytest.fixture
def compile_(capsys, monkeypatch, tmp_path):
    """A function that runs the command in this process, with a cache of its own: status, JSON object, error output."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments):
        status = main(["compile", *RUN, *arguments, "--json"])
        shown = capsys.readouterr()
        return status, json.loads(shown.out.splitlines()[-1]), shown.err

    return run


@pytest.mark.slow
def test_a_run_is_compiled_once_and_answered_from_then_on(compile_, tmp_path):
    arguments = [*SMALL, "--gin_file=gin/layouts/expert.gin", "--topology=v5e:2x2"]
    status, result, _ = compile_(*arguments, f"--save={tmp_path / 'kept'}", f"--plot={tmp_path / 'step.png'}")
    assert status == 0
    assert result["fits"] and result["mesh"] == {"data": 4}
    assert result["layers"] == [1, 1] and result["compiled_layers"] == [[1, 1]]
    assert result["collectives"]["all-to-all"]["count"] == 8  # two sparse layers
    assert "all-gather" not in result["collectives"] and result["warnings"] == []
    memory = result["bytes_per_device"]
    assert 0 < memory["arguments"] < 4 * result["num_parameters"]  # experts in pieces
    assert memory["needed"] < result["chip_bytes"] == 15.75 * 2**30
    predicted = result["predicted"]
    assert 0 < predicted["floor_seconds"] < predicted["step_seconds"] == pytest.approx(sum(predicted["parts"].values()))
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "step_1_1.optimized.hlo", "step_1_1.stablehlo.mlir", "step_1_1.trace.json"]
    lanes = json.loads((tmp_path / "kept" / "step_1_1.trace.json").read_text())["traceEvents"]
    core = sum(event["dur"] for event in lanes if event["ph"] == "X" and event["tid"] == 0)
    assert core == pytest.approx(1e6 * predicted["step_seconds"])
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    step = (tmp_path / "kept" / "step_1_1.optimized.hlo").read_text()
    assert f"\n{step}".count("\nHloModule ") == 1
    status, same, errors = compile_(*arguments)
    assert (status, same) == (0, result)
    assert "The compiler was asked before" in errors and "Lowering" not in errors


@pytest.mark.slow
def test_a_run_that_does_not_fit_ends_with_advice(compile_):
    # Logits of 2^20 tokens, 2^20 words: far beyond a chip.
    status, result, errors = compile_(
        *SMALL, "--gin_file=gin/layouts/data.gin", "--topology=v5e:2x2", "--gin.BATCH_SIZE=8192",
        "--gin.SwitchConfig.vocab_size=262144", "--gin.TASK_FEATURE_LENGTHS={'inputs': 128, 'targets': 128}")
    assert status == 1
    assert not result["fits"]
    # 256 GiB of float32 logits a chip, and some more, in 14 GiB: 32 parts.
    assert any("num_microbatches=32 --gin.SwitchConfig.num_groups_multiple=128." in line for line in result["advice"])
    assert "It does not fit." in errors


@pytest.mark.parametrize("arguments, message", [
    (["--topology=v5e"], "A topology reads like v5e:4x4"), (["--topology=h100:16"], "one of GPUs like h100:8 or"),
    (["--topology=v5e:2x4", "--gin_file=gin/layouts/expert.gin", "--gin.MESH_SHAPE='data=4'"],
     "MESH_SHAPE 'data=4' is for 4 devices, but there are 8 (TPU); make the product of its sizes 8."),
    (["--topology=v5e:4x4", "--gin_file=gin/layouts/expert.gin"], "num_experts ('expert', 8) over the 16 devices")])
def test_what_cannot_be_asked_is_one_sentence(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["compile", *RUN, *arguments]) == 2
    found = capsys.readouterr().err
    assert message in found
    assert len(found.strip().splitlines()) == 1, found


def test_the_program_of_dtensor_is_refused_before_tensorflow_is_imported(tmp_path):
    code = ("import sys; from switch_tf.cli.main import main; print(main(sys.argv[1:])); "
            "print('tensorflow' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code, "compile", *RUN, "--topology=v5e:2x2",
                           "--gin.Layout.backend='dtensor'"], capture_output=True, text=True)
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert done.stderr.strip() == (
        "switch-tf compile: For TPUs the program of the pjrt back end is compiled, not that of 'dtensor'; use "
        "backend='pjrt', or leave Layout.backend out.")


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_compiles(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(estimate, "answer", lambda *arguments: pytest.fail("it compiled"))
    taken = tmp_path / "taken"
    taken.write_text("")
    assert main(["compile", *RUN, "--topology=v5e:2x2", f"--save={taken / 'programs'}"]) == 2
    assert "--save needs a folder that can be written to, and" in capsys.readouterr().err
    assert main(["compile", *RUN, "--topology=v5e:2x2", f"--plot={taken / 'step.png'}"]) == 2
    assert "--plot needs a folder that can be written to, and" in capsys.readouterr().err
    assert main(["compile", *RUN, "--topology=v5e:2x2", f"--plot={tmp_path}"]) == 2
    assert "is a folder; name one in it, such as step.png." in capsys.readouterr().err


def test_an_answer_that_cannot_be_kept_is_still_given(capsys, monkeypatch, tmp_path):
    (tmp_path / "switch_tf").write_text("")  # in the way of the cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(estimate, "answer", lambda *arguments: ({"fits": True}, {}))
    monkeypatch.setattr(answers, "describe", lambda answer: "the answer")
    assert main(["compile", *RUN, "--topology=v5e:2x2"]) == 0
    found = capsys.readouterr()
    assert "the answer" in found.out and "could not be written (Not a directory)" in found.err


def test_a_program_that_cannot_be_saved_ends_with_a_status_and_leaves_no_half(capsys, monkeypatch, tmp_path):
    def compiled(*arguments):
        (tmp_path / "kept" / "one").mkdir()  # in the way of the file
        return {"fits": True}, {tmp_path / "kept" / "one": "text"}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(estimate, "answer", compiled)
    monkeypatch.setattr(answers, "describe", lambda answer: "the answer")
    assert main(["compile", *RUN, "--topology=v5e:2x2", f"--save={tmp_path / 'kept'}"]) == 1
    found = capsys.readouterr()
    assert "the answer" in found.out and "could not be written (Is a directory)" in found.err
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["one"]


def test_without_a_layout_the_one_for_the_topology_is_compiled_with_a_runs_flags(capsys, monkeypatch, tmp_path):
    def compiled(described, *arguments):
        asked.append((described.layout, os.environ["LIBTPU_INIT_ARGS"]))
        return {"fits": True}, {}

    asked = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    monkeypatch.delitem(environment.OF_USER, "LIBTPU_INIT_ARGS")
    monkeypatch.setattr(compiler, "devices_of", lambda topology: range(16))  # libtpu would keep the flags
    monkeypatch.setattr(estimate, "answer", compiled)
    monkeypatch.setattr(answers, "describe", lambda answer: "the answer")
    for _ in range(2):  # the second from the cache
        assert main(["compile", *RUN, "--topology=v5e:4x4"]) == 0
        errors = capsys.readouterr().err
        assert errors.count("No layout is named, so 16 devices use gin/layouts/fully_sharded_experts.gin, "
                            "mesh expert=1,fsdp=8,data=2.\n") == 1
        assert errors.count("LIBTPU_INIT_ARGS is not set") == 1
        os.environ["LIBTPU_INIT_ARGS"] = ""
    [(layout, flags)] = asked
    assert layout.mesh == {"expert": 1, "fsdp": 8, "data": 2} and flags.count("--xla") == 2


@pytest.mark.slow
def test_a_process_of_its_own_says_that_sentence_alone(tmp_path):
    # libtpu would write that it finds no TPU.
    done = subprocess.run([sys.executable, "-m", "switch_tf.cli", "compile", *RUN, "--topology=v5e:3x7"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 2
    first, *others = done.stderr.strip().splitlines()
    assert first == "Importing TensorFlow ..." and len(others) == 1, done.stderr


COMPARED = ["--topology=v5e:4x4", "--compare=data,expert", "--gin.SwitchConfig.num_groups_multiple=16"]
REFUSAL = ("The layout cuts num_experts ('expert', 8) over the 16 devices of mesh axis 'data', which must divide it; "
           "make it a multiple of 16, or set MESH_SHAPE to data=8.")


def _check_table(lines):
    table = lines[next(index for index, line in enumerate(lines) if "GiB a chip" in line):]
    assert table[0].split()[:4] == ["GiB", "a", "chip", "fits"] and "step ms" in table[0]
    assert table[1].split()[0] == "data" and table[2].split() == ["expert", "no"]
    assert table[3].startswith("expert: The layout cuts num_experts")


def test_layouts_are_put_side_by_side_and_one_that_is_refused_says_why(compile_, monkeypatch):
    asked = {}

    def ask(questions):
        asked.update(questions)
        return {"data": _answer(["--gin.MESH_SHAPE='data=16,model=2'", "--gin.SwitchConfig.group_size=1000",
                                 "--gin.SwitchConfig.train_capacity_factor=1.0"]), "expert": {"mistake": REFUSAL}}

    monkeypatch.setattr(answers, "ask", ask)
    status, result, errors = compile_(*COMPARED)
    assert status == 0 and result["layouts"]["expert"] == {"mistake": REFUSAL}
    for name, (_, *rest) in asked.items():
        files = [word for word in rest if word.startswith("--gin_file=")]
        assert files == [*RUN[:3], f"--gin_file=gin/layouts/{name}.gin"]
        assert "--gin.SwitchConfig.num_groups_multiple=16" in rest and "--topology=v5e:4x4" in rest
    _check_table(errors.splitlines())


@pytest.mark.slow
def test_layouts_are_compiled_side_by_side_in_processes_of_their_own(compile_):
    status, result, errors = compile_(*SMALL, *COMPARED)
    assert status == 0, errors
    assert result["layouts"]["data"]["fits"] and result["layouts"]["data"]["mesh"] == {"data": 16}
    assert result["layouts"]["expert"] == {"mistake": REFUSAL}
    assert any(line.startswith("[2 of 2]") for line in errors.splitlines())
    _check_table(errors.splitlines())


@pytest.mark.parametrize("arguments, message", [
    (["--compare=expert"], "--compare needs at least two layouts"),
    (["--compare=data,expert", "--gin_file=gin/layouts/data.gin"], "leave out the layout's --gin_file"),
    (["--compare=data,expert", "--search"], "do not go with each other"),
    (["--search"], "--search starts from a layout; name one, such as --gin_file=gin/layouts/expert.gin."),
    (["--search", "--plot=step.png"], "nor with --save and --plot")])
def test_a_wrong_comparison_is_one_sentence(arguments, message, capsys):
    assert main(["compile", *RUN, "--topology=v5e:2x4", *arguments]) == 2
    found = capsys.readouterr().err
    assert message in found
    assert len(found.strip().splitlines()) == 1, found


def test_memory_that_only_keeps_files_at_hand_is_available():
    page = os.sysconf("SC_PAGE_SIZE")
    free, total = (page * os.sysconf(name) for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    assert 0.5 * free < host.memory("MemAvailable") < total


def _answer(words):
    """Made up: a model axis costs links, small groups save compute, and without one a chip is too small."""
    values = dict(word.removeprefix("--gin.").split("=", 1) for word in words if word.startswith("--gin."))
    mesh = dict(axis.split("=") for axis in values["MESH_SHAPE"].strip("'").split(","))
    compute = int(values["SwitchConfig.group_size"]) / 1000 * float(values["SwitchConfig.train_capacity_factor"])
    parts = {"compute_seconds": compute, "memory_seconds": 0.1, "links_seconds": int(mesh["model"]) / 2}
    step = compute + parts["links_seconds"]
    by_part = {"dispatch": compute, "sent, not hidden": parts["links_seconds"]}
    return {"fits": mesh["model"] != "1", "warnings": [], "collectives": {}, "bytes_per_device": {"needed": 2**30},
            "predicted": {**parts, "floor_seconds": step / 2, "step_seconds": step, "parts": by_part,
                          "tokens_per_second": 1 / step, "model_flops_utilization": 0.1}}


def test_a_search_goes_from_meshes_to_groups_to_capacities(monkeypatch, capsys):
    asked = []

    def ask(questions):
        asked.append(list(questions))
        return {name: _answer(words) for name, words in questions.items()}

    monkeypatch.setattr(answers, "ask", ask)
    status = main(["compile", *RUN, "--gin_file=gin/layouts/expert_model.gin", "--topology=v5e:4x4", "--search",
                   "--gin.BATCH_SIZE=128", "--gin.SwitchConfig.group_size=2048", "--json"])
    assert status == 0
    assert asked == [
        ["data=8,model=2, groups of 2048, capacity 1.25", "data=16,model=1, groups of 2048, capacity 1.25",
         "data=4,model=4, groups of 2048, capacity 1.25", "data=2,model=8, groups of 2048, capacity 1.25",
         "data=1,model=16, groups of 2048, capacity 1.25"],
        ["model=2,data=8, groups of 2048, capacity 1.25"],
        ["data=8,model=2, groups of 512, capacity 1.25", "data=8,model=2, groups of 256, capacity 1.25"],
        ["data=8,model=2, groups of 256, capacity 1"]]
    shown = capsys.readouterr()
    best = json.loads(shown.out.splitlines()[-1])["candidates"][0]
    assert (best["mesh_shape"], best["group_size"], best["capacity_factor"]) == ("data=8,model=2", 256, 1.0)
    assert ("The best: --gin.MESH_SHAPE=\"'data=8,model=2'\" --gin.SwitchConfig.group_size=256 "
            "--gin.SwitchConfig.num_groups_multiple=8 --gin.SwitchConfig.train_capacity_factor=1.0") in shown.err
    assert "(as it was): dispatch 2560.0 -> 256.0 ms." in shown.err
