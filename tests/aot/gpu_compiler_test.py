"""The real compiler of NVIDIA's GPUs on the real step of a small model, for servers of GPUs that are not here.

`make cuda` installs the compiler beside the environment and runs these.
"""

import json
import re

import pytest

pytest.importorskip("jax_plugins.xla_cuda12", reason="the compiler for NVIDIA's GPUs is not installed; run: make cuda")

from switch_tf.aot import hlo
from switch_tf.cli.main import main

pytestmark = pytest.mark.cuda

RUN = ["--gin_file=gin/models/switch_tiny.gin", "--gin_file=gin/tasks/c4.gin", "--gin_file=gin/runs/pretrain.gin",
       "--gin.BATCH_SIZE=32", "--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 32}",
       "--gin.SwitchConfig.num_encoder_layers=1", "--gin.SwitchConfig.num_decoder_layers=1",
       "--gin.SwitchConfig.encoder_sparse_step=1", "--gin.SwitchConfig.decoder_sparse_step=1",
       "--gin.SwitchConfig.num_experts=8", "--gin.SwitchConfig.num_groups_multiple=32"]
SWITCH_LAYER = {"attention", "router", "dispatch", "experts", "combine", "norms and residuals", "logits and loss",
                "optimizer"}
# Layout -> mesh, topology, and kinds of collectives that the step must have.
LAYOUTS = {
    "data": ("data=8", "h100:8", {"all-reduce"}),
    "expert": ("data=8", "h100:8", {"all-reduce", "all-to-all"}),
    "data_expert": ("data=2,expert=4", "h100:2x4", {"all-reduce", "all-to-all"}),
    "data_model": ("data=4,model=2", "a100:8", {"all-reduce"}),
    "expert_model": ("data=4,model=2", "h200:8", {"all-reduce", "all-to-all"}),
    "fully_sharded": ("data=8", "h100:8", {"all-gather", "all-to-all"}),
    "fully_sharded_experts": ("data=2,expert=2,fsdp=2", "h100:8", {"all-gather", "all-to-all"}),
    "fully_sharded_model": ("data=4,model=2", "h100:8", {"all-gather"}),
    "pod_256": ("data=2,model=2", "h100:4", {"all-reduce", "all-to-all"}),
    "pod_256_experts": ("expert_outer=2,data=2,expert=2,fsdp=1", "h100:2x4", {"all-gather", "all-to-all"}),
    "pod_512": ("data=4,model=2", "h100:8", {"all-to-all"}),
    "pod_512_experts": ("data=8", "h100:8", {"all-to-all"}),
    "pod_512_fully_sharded": ("expert=2,expert_x=1,expert_y=1,fsdp_y=1,data_y=2,fsdp=2,data=1", "h100:8",
                              {"all-gather"}),
    "single": ("data=1", "h100:1", set()),
}


@pytest.fixture
def compiled(capsys, monkeypatch, tmp_path):
    """A function from arguments to the JSON object of the command and the text of the optimised program."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments):
        status = main(["compile", *RUN, *arguments, f"--save={tmp_path / 'kept'}", "--json"])
        shown = capsys.readouterr()
        assert status == 0, shown.err
        (text,) = (tmp_path / "kept").glob("*.optimized.hlo")
        return json.loads(shown.out.splitlines()[-1]), text.read_text()

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_compiler_takes_the_program_of_every_layout(layout, compiled):
    mesh, topology, kinds = LAYOUTS[layout]
    result, text = compiled(f"--gin_file=gin/layouts/{layout}.gin", f"--gin.MESH_SHAPE={mesh!r}",
                            f"--topology={topology}")
    assert result["fits"] and result["collectives"].keys() >= kinds
    assert result["predicted"]["counted_by"] == "rates" and result["predicted"]["parts"].keys() >= SWITCH_LAYER
    if layout == "single":
        assert result["collectives"] == {}
    _check_products(text, result)


def _check_products(text, result):
    """Only the router, the position bias and the gradients of float32 logits multiply float32 numbers."""
    module = hlo.Module(text)
    products = [instruction for instruction in module.instructions.values() if instruction.is_product]
    wide = {instruction.operation for instruction in products
            if module.instructions[instruction.operands[0]].shape.startswith("f32")}
    known = re.compile(r"router|relpos_bias|token_embedder|/switch_transformer(_1)?/(Tensordot|logits_dense)/")
    assert products and all(map(known.search, wide)), wide
    assert result["flops_per_device"] > 0


SETTINGS = {
    "microbatches": ["--gin.StepSettings.num_microbatches=2", "--gin.SwitchConfig.num_groups_multiple=16"],
    "packed": ["--gin.Run.pack=True"],
    "remat": ["--gin.SwitchConfig.remat=True"],
    "clipped": ["--gin.StepSettings.clip_norm=1.0"],
    "top2": ["--gin.SwitchConfig.routing_policy='top2'", "--gin.SwitchConfig.decoder_routing_policy='switch'"],
    "float32": ["--gin.ACTIVATION_DTYPE='float32'"],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_compiler_takes_a_step_with_each_setting(name, compiled):
    result, _ = compiled("--gin_file=gin/layouts/expert.gin", "--topology=h100:8", *SETTINGS[name])
    assert result["fits"] and result["warnings"] == []


def test_less_memory_per_program_is_less_than_enough(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.0001")
    status = main(["compile", *RUN, "--gin_file=gin/layouts/data.gin", "--topology=h100:8", "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 1 and not result["fits"] and any("a chip are missing" in line for line in result["advice"])


def test_other_back_ends_are_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["compile", *RUN, "--gin_file=gin/layouts/data.gin", "--topology=h100:8",
                 "--gin.Layout.backend='mirrored'"]) == 2
    assert "For GPUs the program of the pjrt back end is compiled" in capsys.readouterr().err
