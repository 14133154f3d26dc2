"""Pretrains and fine-tunes a dense and a sparse model alike, and scores both beside methods without a network.

`make finetune-demo` runs it. Every step is a command of switch-tf, printed before it runs; finished steps are not
repeated. Leaves runs/finetune_demo/summary.json.
"""

import json
import pathlib
import shlex
import subprocess
import sys

FOLDER = pathlib.Path("runs/finetune_demo")
MODELS = {"dense": "gin/models/t5_tiny.gin", "sparse": "gin/models/switch_tiny.gin"}
PRETRAINING_STEPS = 300
TASK = "docs_corpus_library"


def run_module(module: str, *words) -> dict:
    """Runs a module in a process of its own; returns the JSON object that is its last line."""
    done = subprocess.run([sys.executable, "-m", module, *words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def switch_tf(*words) -> dict:
    """Prints and runs a command."""
    print(f"\n$ {shlex.join(['switch-tf', *words])}", file=sys.stderr, flush=True)
    return run_module("switch_tf.cli", *words, "--json")


def fine_tuned_accuracy(kind: str) -> float:
    """Returns a model's accuracy on the held-out examples after its last step, in per cent."""
    pretrained, tuned = FOLDER / f"{kind}_pretrained", FOLDER / kind
    switch_tf("train", "--gin_file=gin/runs/demo.gin", f"--gin_file={MODELS[kind]}", f"--gin.MODEL_DIR='{pretrained}'",
              f"--gin.TRAIN_STEPS={PRETRAINING_STEPS}")
    switch_tf("train", f"--gin_file={MODELS[kind]}", "--gin_file=gin/runs/finetune_demo.gin",
              f"--gin.INITIAL_CHECKPOINT='{pretrained}'", f"--gin.MODEL_DIR='{tuned}'")
    # Of the last step, not of the best one: choosing by these examples would flatter.
    return switch_tf("eval", f"--run={tuned}")["results"][-1]["tasks"][TASK]["accuracy"]


def main() -> None:
    """Prints the four scores and writes them down."""
    print("Majority and TF-IDF with logistic regression ...", file=sys.stderr, flush=True)
    summary = run_module("switch_tf.tasks.docs_corpus_baselines")
    summary |= {kind: fine_tuned_accuracy(kind) for kind in MODELS}
    (FOLDER / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"\nWhich of ten libraries does a docstring document? Accuracy on {summary['num_examples']} held-out ones:")
    for name, key in (("always the commonest", "majority_baseline"), ("TF-IDF, logistic regression", "tfidf_baseline"),
                      ("dense, fine-tuned", "dense"), ("8 experts, fine-tuned", "sparse")):
        print(f"  {name:<28} {summary[key]:5.1f} %")
    print(f"{FOLDER / 'summary.json'}")


if __name__ == "__main__":
    main()
