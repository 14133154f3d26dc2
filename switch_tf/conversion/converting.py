"""Conversion of a folder of weights into another format, with a report."""

import pathlib

from switch_tf import conversion
from switch_tf.checkpoints import run_config
from switch_tf.conversion import huggingface_vocabulary
from switch_tf.refusals import Refusal
from switch_tf.storage import places

HUGGING_FACE, SWITCH_TF = "hugging_face", "switch_tf"


def format_of(source: pathlib.Path) -> str:
    """Returns the format of a folder, `HUGGING_FACE` or `SWITCH_TF`.

    Raises:
        Refusal: The folder has neither.
    """
    if run_config.is_hugging_face(source):
        return HUGGING_FACE
    if (source / "checkpoint.json").is_file() or (source / "checkpoints").is_dir():
        return SWITCH_TF
    raise Refusal("--input must be a folder: Hugging Face's, which holds config.json, a run folder "
                  f"with checkpoints, or one checkpoint; {str(source)!r} is none of these.")


def convert(source: pathlib.Path, output: pathlib.Path, to: str, expert_capacity: int | None) -> tuple[dict, str]:
    """Converts the weights of a folder.

    Args:
        source: Folder of weights.
        output: New or empty folder.
        to: Format of the output.
        expert_capacity: Slots of each expert for each sequence, in Hugging Face's configuration.

    Returns:
        (JSON object, text for people).

    Raises:
        Refusal: The weights are damaged or cannot be expressed in the other format.
    """
    source_format = format_of(source)
    read = conversion.from_hugging_face if source_format == HUGGING_FACE else conversion.from_switch_tf
    with places.fetched(source) as local:
        model, vocabulary = read(local), huggingface_vocabulary.find(local, source)
    result = {"input": str(source), "from": source_format, "to": to, "output": str(output),
              "num_parameters": model.config.num_parameters}
    lines = [f"{model.config.num_parameters:,} parameters from {source} ({source_format}) in {output} ({to})."]
    if to == HUGGING_FACE:
        conversion.to_hugging_face(model, output, expert_capacity)
        lines.append("transformers also needs the tokenizer's files, such as spiece.model: copy them there.")
        return result, "\n".join(lines)
    conversion.to_switch_tf(model, output, vocabulary.content)
    result["vocabulary"] = vocabulary.name
    if vocabulary.content is not None:
        result["vocabulary"] = vocabulary.name or str(output / huggingface_vocabulary.FILE)
    if not result["vocabulary"]:
        lines.append(f"Without a vocabulary: {vocabulary.reason}")
    lines.append(f"Train them: switch-tf train --gin_file={output}/model.gin --gin_file=TASK "
                 f"--gin_file=gin/runs/finetune.gin --gin.INITIAL_CHECKPOINT=\"'{output}'\" "
                 f"--gin.VOCABULARY=\"'{result['vocabulary'] or 'VOCABULARY'}'\" --gin.MODEL_DIR=\"'runs/x'\"")
    return result, "\n".join(lines)
