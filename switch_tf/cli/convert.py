"""`switch-tf convert`: the weights of a Hugging Face folder become a checkpoint to start from, and the other way."""

import pathlib
import sys

from switch_tf import checks
from switch_tf.checkpoints import run_config
from switch_tf.cli import outputs
from switch_tf.configs.choices import check_choice
from switch_tf.installation import quiet
from switch_tf.refusals import Refusal

HUGGING_FACE, SWITCH_TF = "hugging_face", "switch_tf"

EXAMPLES = r"""
switch-tf convert --input downloads/t5-small --output t5_small
switch-tf convert --input runs/first --output first_hf --to hugging_face
"""


def add_arguments(parser) -> None:
    """Declares the two folders."""
    parser.add_argument("--input", required=True, metavar="FOLDER",
                        help="a Hugging Face folder (config.json and tensors), a run folder or a checkpoint")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument("--to", metavar=f"{HUGGING_FACE}|{SWITCH_TF}", help="what to write; by default the other one")
    parser.add_argument("--expert_capacity", type=int, metavar="N",
                        help="to Hugging Face: slots of each expert for each sequence")


def run(arguments) -> dict:
    """Writes the output folder; what was converted is the JSON object."""
    source, output = pathlib.Path(arguments.input), pathlib.Path(arguments.output)
    kind = _kind(source)
    to = arguments.to or (SWITCH_TF if kind == HUGGING_FACE else HUGGING_FACE)
    check_choice("--to", to, (HUGGING_FACE, SWITCH_TF))
    if arguments.expert_capacity is not None and to != HUGGING_FACE:
        raise Refusal("--expert_capacity is for --to=hugging_face alone.")
    checks.optional("--expert_capacity", arguments.expert_capacity, checks.integer, 1)
    checks.new_folder(output)
    with outputs.locked(output):
        model, vocabulary = _convert(source, kind, output, to, arguments.expert_capacity)
    result = {"input": str(source), "from": kind, "to": to, "output": str(output),
              "num_parameters": model.config.num_parameters}
    if to == SWITCH_TF:
        from switch_tf.conversion import huggingface_vocabulary
        result["vocabulary"] = vocabulary.name or (
            str(output / huggingface_vocabulary.FILE) if vocabulary.content is not None else None)
    print(_told(result, vocabulary.reason), file=sys.stderr if arguments.json else sys.stdout)
    return result


def _convert(source, kind, output, to, expert_capacity):
    quiet.import_tensorflow()
    from switch_tf import conversion
    from switch_tf.conversion import huggingface_vocabulary
    model = (conversion.from_hugging_face if kind == HUGGING_FACE else conversion.from_switch_tf)(source)
    vocabulary = huggingface_vocabulary.find(source)
    if to == HUGGING_FACE:
        conversion.to_hugging_face(model, output, expert_capacity)
    else:
        conversion.to_switch_tf(model, output, vocabulary.content)
    return model, vocabulary


def _kind(source):
    if run_config.is_hugging_face(source):
        return HUGGING_FACE
    if (source / "checkpoint.json").is_file() or (source / "checkpoints").is_dir():
        return SWITCH_TF
    raise Refusal("--input must be a folder on this machine: Hugging Face's, which holds config.json, a run folder "
                  f"with checkpoints, or one checkpoint; {str(source)!r} is none of these.")


def _told(result, without_vocabulary):
    output = result["output"]
    lines = [f"{result['num_parameters']:,} parameters from {result['input']} ({result['from']}) in {output} "
             f"({result['to']})."]
    if result["to"] == HUGGING_FACE:
        lines.append("transformers also needs the tokenizer's files, such as spiece.model: copy them there.")
    else:
        vocabulary = result["vocabulary"] or "VOCABULARY"
        if not result["vocabulary"]:
            lines.append(f"Without a vocabulary: {without_vocabulary}")
        lines.append(f"Train them: switch-tf train --gin_file={output}/model.gin --gin_file=TASK "
                     f"--gin_file=gin/runs/finetune.gin --gin.INITIAL_CHECKPOINT=\"'{output}'\" "
                     f"--gin.VOCABULARY=\"'{vocabulary}'\" --gin.MODEL_DIR=\"'runs/x'\"")
    return "\n".join(lines)
