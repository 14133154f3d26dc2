"""A training step for TPUs by the compiler's own clock: ours beside Flaxformer's, part by part. No TPU is needed.

    .venv/bin/python benchmarks/tpu/step.py --model base_8 --peer_python ... --flaxformer ...

Both are compiled by the same libtpu for the same topology, with the same sizes, batch, optimizer and layout, at two
shallow depths, and extrapolated. Ours are questions to `switch-tf compile`, which caches answers. Each of Flaxformer's
takes minutes and is saved in --folder, so an interrupted run resumes.
"""

import argparse
import collections
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import NamedTuple

import saved_step

from switch_tf.aot import answers
from switch_tf.aot.program import Program
from switch_tf.cli import compile as command
from switch_tf.hardware import chips
from switch_tf.hardware.network import Network
from switch_tf.storage import outputs

PROGRAM = pathlib.Path(__file__).with_name("flaxformer_program.py")
CONTENDERS = PROGRAM.parents[1] / "contenders"  # has what the program imports
DEPTHS = (2, 4)


class Step(NamedTuple):
    """One comparison.

    Attributes:
        topology: Name of the pod.
        batch: Sequences of a batch.
        mesh: Flaxformer's mesh.
        layouts: Our files of gin/layouts for the sparse and the dense model.
        sizes: Sizes of the model, by Flaxformer's names.
        bindings: Further gin bindings of ours.
    """

    topology: str
    batch: int
    mesh: dict
    layouts: tuple[str, str]
    sizes: dict
    bindings: tuple[str, ...] = ()


_BASE = {"d_model": 768, "d_ff": 3072, "d_kv": 64, "heads": 12, "vocab_size": 32128, "encoder_length": 512,
         "decoder_length": 114, "capacity_factor": 1.25}
STEPS = {
    "base_8": Step("v5e:2x4", 128, {"data": 1, "expert": 8}, ("expert", "data"),
                   {**_BASE, "experts": 8, "group_tokens": 2048, "depth": 12}),
    "base_128": Step("v5e:16x16", 2048, {"data": 2, "expert": 128}, ("data_expert", "data"),
                     {**_BASE, "experts": 128, "group_tokens": 4096, "depth": 12},
                     ("SwitchConfig.num_groups_multiple=256", "MESH_SHAPE='data=2,expert=128'"))}
# Flaxformer's default is bfloat16; ours are float32.
SCORES = {"float32 scores": True, "bfloat16 scores": False}
# Patterns of its module names and our names, in order of application.
_NAMES = ((r"jit\(step\)/", ""), (r"transpose\(jvp\(EncoderDecoder\)\)", "gradient_tape"),
          (r"jvp\(EncoderDecoder\)", ""), (r"EncoderDecoder\.\w+/", ""),
          (r"(encoder|decoder)/\1\.\w+/", r"\1/"), (r"(layers_\d+)/\1/", r"\1/"),
          (r"\w+/token_embedder\.attend", "logits_dense"), (r"/expert/", "/experts/"),
          (r"gt\.\.\.,gtec->gec\.\.\.", "dispatch"), (r"gec\.\.\.,gtec->gt\.\.\.", "combine"))


def main():
    """Compiles both and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=STEPS, default="base_8")
    parser.add_argument("--peer_python", required=True, metavar="PATH", help="a Python with jax, flax, optax")
    parser.add_argument("--flaxformer", required=True, metavar="PATH", help="a checkout of google/flaxformer")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("tpu_step"), metavar="FOLDER",
                        help="keep Flaxformer's programs there (default ./tpu_step)")
    arguments = parser.parse_args()
    step = STEPS[arguments.model]
    columns = _ours(arguments.model, step)
    for scores, is_float32 in SCORES.items():
        for kind, experts in (("sparse", step.sizes["experts"]), ("dense", 0)):
            columns[f"Flaxformer, {kind}, {scores}"] = _theirs(arguments, step, experts, is_float32)
    for name, parts in columns.items():
        print(json.dumps({"benchmark": "tpu_step", "model": arguments.model, "name": name, "parts": parts}))
    print(_table(columns), file=sys.stderr)


def _ours(model, step):
    """Returns our steps: name -> seconds by part."""
    questions = {}
    for kind, layout, more in zip(("sparse", "dense"), step.layouts, ((), ("NUM_EXPERTS=0",)), strict=True):
        files = [f"models/switch_{model}", "tasks/c4", "runs/pretrain", f"layouts/{layout}"]
        bindings = [*(step.bindings if kind == "sparse" else ()), *more, f"BATCH_SIZE={step.batch}"]
        questions[f"switch_tf, {kind}"] = command.process(
            [*(f"--gin_file=gin/{file}.gin" for file in files), f"--topology={step.topology}",
             *(f"--gin.{binding}" for binding in bindings)])
    return {name: answer["predicted"]["parts"] for name, answer in answers.ask(questions).items()}


def _theirs(arguments, step, experts, is_float32):
    """Returns Flaxformer's step, seconds by part; saves its programs in the form of `switch-tf compile --save`."""
    folder = arguments.folder / f"{arguments.model}_{experts}_{'float32' if is_float32 else 'bfloat16'}"
    folder.mkdir(parents=True, exist_ok=True)
    answer = {"topology": step.topology, "layers": [step.sizes["depth"]] * 2,
              "compiled_layers": [[depth] * 2 for depth in DEPTHS]}
    parts = saved_step.of_all_layers(answer, [
        _compiled(arguments, step, experts, is_float32, depth, folder) for depth in DEPTHS])
    (folder / "answer.json").write_text(json.dumps({**answer, "predicted": {"parts": parts}}))
    return parts


def _compiled(arguments, step, experts, is_float32, depth, folder):
    hlo, facts = (folder / f"step_{depth}_{depth}.{suffix}" for suffix in ("optimized.hlo", "json"))
    if not facts.exists():
        started = time.perf_counter()
        outputs.say(f"Compiling Flaxformer's {folder.name}, {depth} + {depth} layers, for {step.topology} ...")
        job = {**step.sizes, "experts": experts, "layers": depth, "batch": step.batch, "mesh": step.mesh,
               "topology": step.topology, "float32_scores": is_float32, "hlo": str(hlo.resolve()),
               "flaxformer": str(pathlib.Path(arguments.flaxformer).resolve())}
        # Flaxformer derives the number of copies of an expert from the number of devices of the process.
        count = math.prod(step.mesh.values())
        libtpu = pathlib.Path(importlib.util.find_spec("libtpu").origin).with_name("libtpu.so")
        environment = {"JAX_PLATFORMS": "cpu", "TPU_LIBRARY_PATH": str(libtpu), "TPU_SKIP_MDS_QUERY": "1",
                       "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "PYTHONPATH": str(CONTENDERS),
                       "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
        done = subprocess.run([arguments.peer_python, str(PROGRAM), json.dumps(job)], text=True, capture_output=True,
                              env={**os.environ, **environment})
        if done.returncode:
            raise SystemExit(f"Flaxformer's {folder.name} failed:\n{done.stderr[-4000:]}")
        hlo.write_text(renamed(hlo.read_text()))
        facts.write_text(done.stdout.splitlines()[-1])
        outputs.say(f"... {time.perf_counter() - started:.0f} s.")
    known = json.loads(facts.read_text())
    chip, network = chips.find_chip(step.topology), Network(step.topology, step.mesh, known["coordinates"])
    return Program(hlo.read_text(), step.mesh).schedule(chip, network).parts


def renamed(text: str) -> str:
    """Returns an optimised program of Flaxformer with our names of layers."""

    def rename(found):
        name = found[1].partition(";")[0]  # of several operations in one, the first
        for pattern, ours in _NAMES:
            name = re.sub(pattern, ours, name)
        return f'op_name="{name}"'

    return re.sub(r'op_name="([^"]*)"', rename, text)


def _table(columns):
    """Returns a Markdown table in ms, the longest parts first."""
    total = collections.Counter()
    for parts in columns.values():
        total.update(parts)
    lines = [["ms", *columns], ["---"] * (len(columns) + 1)]
    lines += [[part, *(f"{1e3 * parts.get(part, 0.0):.1f}" for parts in columns.values())] for part, _ in
              total.most_common()]
    lines.append(["a step", *(f"{1e3 * sum(parts.values()):.1f}" for parts in columns.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
