"""Conversion of a folder of weights into another format, with a report."""

import pathlib

from etils import epy

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import formats, huggingface_vocabulary, t5x_config
from switch_tf.conversion.formats import HUGGING_FACE, SWITCH_TF, Extras, Format
from switch_tf.refusals import Refusal

with epy.lazy_imports():  # which imports TensorFlow, and choosing a format needs none
    from switch_tf.conversion import conversion_identity, linked_weights, source_vocabulary, verifying, weight_source


def locate(source: pathlib.Path, argument: str = "--input") -> tuple[pathlib.Path, Format]:
    """Returns what `formats.locate` does of a folder, which `argument` names in messages.

    Raises:
        Refusal: No format recognises it.
    """
    source, found = formats.locate(source)
    if found is None:
        raise Refusal(f"{argument} must be a folder: {', '.join(one.description for one in formats.FORMATS)}; "
                      f"{str(source)!r} is none of these.")
    return source, found


def default_target(source_format: Format) -> Format:
    """Returns the format to convert to if none is named: Hugging Face's for our own weights, else ours."""
    return HUGGING_FACE if source_format is SWITCH_TF else SWITCH_TF


def convert(source: pathlib.Path, output: pathlib.Path, to: Format, expert_capacity: int | None = None,
            config: SwitchConfig | None = None, dtype: str = "float32", is_verified: bool = False,
            with_optimizer: bool = False) -> tuple[dict, str]:
    """Converts the weights of a folder, a portion at a time. After a kill, the same call goes on.

    Args:
        source: Folder of weights.
        output: New or empty folder.
        to: Format of the output.
        expert_capacity: Slots of each expert for each sequence, in Hugging Face's configuration.
        config: Configuration of the model, for a format that does not describe it.
        dtype: "float32", or "bfloat16" in Hugging Face's format.
        is_verified: Whether the output is read and compared with the source.
        with_optimizer: Whether the optimizer's slots and its step are converted too. Such a conversion takes the memory
            of the model, and begins anew after a kill.

    Returns:
        (JSON object, text for people).

    Raises:
        Refusal: The weights are damaged or cannot be expressed in the other format, an unfinished conversion to this
            output was another one, or the output differs from the source.
    """
    (source, source_format), config_file = locate(source), None
    if config is None and source_format is formats.T5X and (found := t5x_config.find(source)) is not None:
        config, config_file = found
    if config is not None and source_format.describes_model:
        raise Refusal(f"{source} describes its model itself, so --gin_file and --gin.NAME=VALUE, which are for "
                      "checkpoints of T5X and Mesh TensorFlow, have no effect on it; leave them out.")
    if with_optimizer:
        check_optimizer(source, source_format, to)
    with source_format.at_hand(source, with_optimizer) as local:
        opened, vocabulary = source_format.open(local, config), source_vocabulary.find(source, local)
        extras = Extras(vocabulary.content, expert_capacity, dtype)
        if with_optimizer:
            model = linked_weights.read_model(opened)
            extras = extras._replace(optimizer=source_format.read_optimizer(local, model))
            to.write(weight_source.of_model(model), output, extras)
        else:
            to.write(opened, output, extras._replace(identity=conversion_identity.of(
                source, source_format, to, output, opened.config, extras)))
        num_parameters = opened.config.num_parameters
        result = {"input": str(source), "from": source_format.name, "to": to.name, "output": str(output),
                  "num_parameters": num_parameters}
        lines = [f"{num_parameters:,} parameters from {source} ({source_format.name}) in {output} ({to.name})."]
        if config_file is not None:
            result["config_file"] = str(config_file)
            lines.append(f"Its model is taken from {config_file}.")
        if is_verified:
            result["verified"], sentence = verifying.verify(opened, output, to, dtype)
            lines.append(sentence)
    if to is HUGGING_FACE:
        if vocabulary.content is None:
            reason = vocabulary.reason or f"the VOCABULARY is {vocabulary.name!r}, which is no SentencePiece model"
            lines.append(f"transformers also needs the tokenizer's files, such as {huggingface_vocabulary.FILE}: copy "
                         f"them there ({reason.rstrip('.')}).")
        return result, "\n".join(lines)
    if extras.optimizer is not None:
        result["step"] = int(extras.optimizer.iterations.numpy())
        lines.append(f"With the slots of Adafactor at step {result['step']:,}.")
    result["vocabulary"], more = start_from(output, vocabulary, result.get("step"))
    return result, "\n".join([*lines, *more])


def check_optimizer(source: pathlib.Path, source_format: Format, to: Format) -> None:
    """Refuses to convert an optimizer between formats that lack one."""
    if source_format.read_optimizer is None:
        names = ", ".join(one.name for one in formats.FORMATS if one.read_optimizer is not None)
        raise Refusal(f"--with_optimizer reads the optimizer's state from checkpoints of {names}, and {source} is of "
                      f"{source_format.name}; leave it out.")
    if to is not SWITCH_TF:
        raise Refusal(f"--with_optimizer is for --to={SWITCH_TF.name}, because {to.name} keeps no optimizer's state; "
                      "leave it out.")


def start_from(output: pathlib.Path, vocabulary: huggingface_vocabulary.Vocabulary,
               step: int | None = None) -> tuple[str | None, list[str]]:
    """Returns the VOCABULARY of written weights, None without one, and lines for people on how to train them.

    Args:
        output: Folder of the weights.
        vocabulary: Vocabulary, whose content was written beside them.
        step: Step of the optimizer that was written with them, or None.
    """
    name, lines = vocabulary.name, []
    if vocabulary.content is not None:
        name = name or str(output / huggingface_vocabulary.FILE)
    if not name:
        lines.append(f"Without a vocabulary: {vocabulary.reason}")
    run, more = ("finetune", "") if step is None else (
        "pretrain", f" --gin.Run.initial_variables=\"'with_optimizer'\" --gin.TRAIN_STEPS={step + 10_000}")
    lines.append(f"Train them: switch-tf train --gin_file={output}/model.gin --gin_file=TASK "
                 f"--gin_file=gin/runs/{run}.gin --gin.INITIAL_CHECKPOINT=\"'{output}'\" "
                 f"--gin.VOCABULARY=\"'{name or 'VOCABULARY'}'\" --gin.MODEL_DIR=\"'runs/x'\"{more}")
    return name, lines
