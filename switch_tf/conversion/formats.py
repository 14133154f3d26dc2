"""Formats of weights, and conversion between them. Choosing a format needs no TensorFlow."""

import dataclasses
import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from etils import epy

import switch_tf
from switch_tf.checkpoints import continuation, folders, run_config
from switch_tf.configs.run import Run
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import (
    huggingface_config,
    mesh_tensorflow_file,
    model_gin,
    source_vocabulary,
    t5x_config,
    t5x_file,
    untrusted_files,
)
from switch_tf.hardware import host
from switch_tf.refusals import Refusal
from switch_tf.storage import places

with epy.lazy_imports():  # imports Keras
    from switch_tf.conversion import huggingface, mesh_tensorflow, own, t5x, weight_source

_BYTES_PER_PARAMETER = 12  # to read and run a model
_TOLERANCE = 1e-4  # of logits, relative to their standard deviation or 1, the larger one
_BATCH, _LENGTHS = 2, (16, 8)  # sequences, and tokens of encoder and decoder


class Format(NamedTuple):
    """A format of weights. Its functions of a folder also take one in a bucket.

    Args:
        description: Its folders, for messages.
        module: `open_weights(folder, SwitchConfig or None)` returns a WeightSource. `write_weights(WeightSource, new or
            empty folder, vocabulary, identity)` writes a WRITABLE format. `read_optimizer(folder, SwitchTransformer
            with its weights)` returns the Adafactor, except for HUGGING_FACE.
        config_of: Returns the SwitchConfig of a folder, or of our own checkpoint, or None, without reading weights.
        describes_model: Whether a folder holds the configuration. Otherwise `open_weights` needs one.
        resolve: Returns the folder within it that is read.
    """

    name: str
    description: str
    recognises: Callable[[Any], bool]
    module: Any
    config_of: Callable[[Any], SwitchConfig | None] = lambda folder: None
    describes_model: bool = True
    resolve: Callable[[Any], Any] = lambda folder: folder


HUGGING_FACE = Format(
    "hugging_face", "Hugging Face's, which holds config.json", run_config.is_hugging_face, huggingface,
    config_of=huggingface_config.read_config)
T5X = Format(
    "t5x", "T5X's, a checkpoint with the msgpack file checkpoint or Orbax' _METADATA", t5x_file.is_t5x, t5x,
    config_of=lambda folder: (t5x_config.find(folder) or (None,))[0], describes_model=False)
MESH_TENSORFLOW = Format(
    "mesh_tensorflow", "Mesh TensorFlow's, which holds model.ckpt-N.index", mesh_tensorflow_file.is_tensorflow,
    mesh_tensorflow, describes_model=False)
SWITCH_TF = Format(
    "switch_tf", "a run folder with checkpoints, or one checkpoint",
    lambda folder: (folder / folders.DESCRIPTION).is_file() or (folder / "checkpoints").is_dir(), own,
    config_of=model_gin.recorded, resolve=folders.resolve)

FORMATS = (HUGGING_FACE, T5X, MESH_TENSORFLOW, SWITCH_TF)
WRITABLE = {one.name: one for one in (HUGGING_FACE, SWITCH_TF)}


def find(folder: str | pathlib.Path) -> Format | None:
    """Returns the format of a folder, or None."""
    folder = places.at(folder)
    return next((one for one in FORMATS if one.recognises(folder)), None)


def locate(folder: str | pathlib.Path, argument: str | None = None) -> tuple[Any, Format | None]:
    """Returns the path and the format of weights, for a T5X run folder its newest checkpoint.

    Refuses an unknown format if an `argument` is named.
    """
    folder, source_format = places.at(folder), find(folder)
    if source_format is None and (newest := t5x_file.newest_in(folder)) is not None:
        print(f"{folder} is a run folder of T5X; reading its newest checkpoint, {newest.name}.", file=sys.stderr)
        return newest, T5X
    if source_format is None and argument is not None:
        raise Refusal(f"{argument} must be a folder: {', '.join(one.description for one in FORMATS)}; {str(folder)!r} "
                      "is none of these.")
    return folder, source_format


def default_target(source_format: Format) -> Format:
    """Returns Hugging Face's format for our own weights, else ours."""
    return HUGGING_FACE if source_format is SWITCH_TF else SWITCH_TF


def convert(source: pathlib.Path, output: pathlib.Path, to: Format, expert_capacity: int | None = None,
            config: SwitchConfig | None = None, dtype: str = "float32", is_verified: bool = False,
            with_optimizer: bool = False) -> tuple[dict, str]:
    """Converts weights a portion at a time. After a kill, the same call continues.

    Args:
        output: New or empty folder.
        expert_capacity: Slots of each expert for each sequence, in Hugging Face's configuration.
        config: For a format that does not describe the model.
        dtype: "float32", or "bfloat16" in Hugging Face's format.
        is_verified: Whether to compare the output with the source.
        with_optimizer: Whether to convert slots and step too. This takes the model's memory, and starts anew after a
            kill.

    Returns:
        (JSON object, text for people).
    """
    (source, source_format), config_file, step = locate(source, "--input"), None, None
    if config is not None and source_format.describes_model:
        raise Refusal(f"{source} describes its model itself, so --gin_file and --gin.NAME=VALUE, which are for "
                      "checkpoints of T5X and Mesh TensorFlow, have no effect on it; leave them out.")
    if config is None and source_format is T5X and (recorded := t5x_config.find(source)):
        config, config_file = recorded
    if with_optimizer:
        check_optimizer(source, source_format, to)
    opened, vocabulary = source_format.module.open_weights(source, config), source_vocabulary.find(source)
    if with_optimizer:
        model = weight_source.read_model(opened)
        optimizer = source_format.module.read_optimizer(source, model)
        step = int(optimizer.iterations.numpy())
        to.module.write_weights(weight_source.model_weights(model), output, vocabulary.content, optimizer=optimizer)
    else:
        options = {"expert_capacity": expert_capacity, "dtype": dtype} if to is HUGGING_FACE else {}
        identity = identity_of(source, source_format, to, output, opened.config, vocabulary.content) | options
        to.module.write_weights(opened, output, vocabulary.content, identity, **options)
    num_parameters = opened.config.num_parameters
    result = {"input": str(source), "from": source_format.name, "to": to.name, "output": str(output),
              "num_parameters": num_parameters}
    lines = [f"{num_parameters:,} parameters from {source} ({source_format.name}) in {output} ({to.name})."]
    if config_file is not None:
        result["config_file"] = str(config_file)
        lines.append(f"Its model is taken from {config_file}.")
    if is_verified:
        result["verified"], sentence = verify(opened, output, to, dtype)
        lines.append(sentence)
    if to is HUGGING_FACE:
        if vocabulary.content is None:
            reason = vocabulary.reason or f"the VOCABULARY is {vocabulary.name!r}, which is no SentencePiece model"
            lines.append(f"transformers also needs the tokenizer's files, such as {source_vocabulary.FILE}: copy "
                         f"them there ({reason.rstrip('.')}).")
        return result, "\n".join(lines)
    if step is not None:
        result["step"] = step
        lines.append(f"With the slots of Adafactor at step {step:,}.")
    result["vocabulary"], more = start_from(output, vocabulary, step)
    return result, "\n".join([*lines, *more])


def check_optimizer(source: pathlib.Path, source_format: Format, to: Format) -> None:
    """Refuses to convert an optimizer if either format has none."""
    if source_format is HUGGING_FACE:
        names = ", ".join(one.name for one in FORMATS if one is not HUGGING_FACE)
        raise Refusal(f"--with_optimizer reads the optimizer's state from checkpoints of {names}, and {source} is of "
                      f"{source_format.name}; leave it out.")
    if to is not SWITCH_TF:
        raise Refusal(f"--with_optimizer is for --to={SWITCH_TF.name}, because {to.name} keeps no optimizer's state; "
                      "leave it out.")


def start_from(output: pathlib.Path, vocabulary: source_vocabulary.Vocabulary,
               step: int | None = None) -> tuple[str | None, list[str]]:
    """Returns the VOCABULARY of written weights or None, and lines on how to train them.

    Args:
        step: Step of the written optimizer, or None.
    """
    name, lines = vocabulary.name, []
    if vocabulary.content is not None:
        name = name or str(output / source_vocabulary.FILE)
    if not name:
        lines.append(f"Without a vocabulary: {vocabulary.reason}")
    run, more = ("finetune", "") if step is None else (
        "pretrain", f" --gin.Run.initial_variables=\"'with_optimizer'\" --gin.TRAIN_STEPS={step + 10_000}")
    lines.append(f"Train them: switch-tf train --gin_file={output}/model.gin --gin_file=TASK "
                 f"--gin_file=gin/runs/{run}.gin --gin.INITIAL_CHECKPOINT=\"'{output}'\" "
                 f"--gin.VOCABULARY=\"'{name or 'VOCABULARY'}'\" --gin.MODEL_DIR=\"'runs/x'\"{more}")
    return name, lines


def identity_of(source: pathlib.Path, source_format: Format, to: Format, output: pathlib.Path, config: SwitchConfig,
                vocabulary: bytes | None) -> dict[str, Any]:
    """Returns what determines the files of a conversion besides its options, to recognise a killed one.

    Args:
        output: Its hidden neighbours are no part of the source.
    """
    place, output = places.at(source_format.resolve(source)).resolve(), output.resolve()
    files = [file for file in state(place) if not file[0].startswith(str(output.parent / f".{output.name}."))]
    return {"source": str(place), "state of the source": _sum(files), "format": to.name,
            "configuration": _sum(list(dataclasses.asdict(config).items())), "vocabulary": _sum([vocabulary]),
            "version of switch_tf": switch_tf.__version__, "size of a part": weight_source.LARGEST}


def _sum(values):
    return hashlib.sha256(json.dumps(values, default=repr).encode()).hexdigest()


def state(place: Any) -> Iterator[tuple[str, int, float]]:
    """Yields path, size and time of a folder's files, or of a checkpoint's such as model.ckpt-7."""
    entries = untrusted_files.files_in(place) if place.is_dir() else (
        entry for entry in sorted(place.parent.iterdir()) if entry.name.startswith(f"{place.name}."))
    for entry in entries:
        if entry.is_file():
            yield str(entry), entry.stat().st_size, entry.stat().st_mtime


def verify(source: Any, output: Any, to: Format, dtype: str) -> tuple[dict[str, Any], str]:
    """Compares a written folder with its source, rounded to `dtype`, and refuses a difference.

    Also compares logits of a fixed batch, if both models route alike and fit into memory.

    Returns:
        (JSON object, sentence for people).
    """
    def different(what):
        return Refusal(f"{output} is not what its source is: {what}; remove it and convert again.")

    read, dtype = source.read, untrusted_files.DTYPES[dtype]
    source = source._replace(read=lambda name, rows: read(name, rows).astype(dtype).astype(np.float32))
    written = to.module.open_weights(output, None)
    for _, portions in weight_source.read_groups(source, weight_source.groups_of(source), "verifying"):
        for name, rows, values in portions:
            written_values = written.read(name, rows)
            if not np.array_equal(values, written_values):
                norms = [np.linalg.norm(each.ravel()) for each in (values, written_values)]
                raise different(f"rows {rows.start} to {rows.stop - 1} of {name!r} have the norm {norms[1]:.9g}, "
                                f"and {norms[0]:.9g} in the source")
    sentence = f"All {len(source.weights)} weights in {output} have the values and norms of the source"
    config, written_config, reason, difference = source.config, written.config, None, None
    needed, available = _BYTES_PER_PARAMETER * config.num_parameters, host.memory("MemAvailable")
    if config.num_experts and (config.semantics, config.expert_capacity) != (
            written_config.semantics, written_config.expert_capacity):
        reason = "its experts have another capacity"
    elif needed > available:
        reason = f"a model needs {needed / 1e9:,.1f} GB of memory, and {available / 1e9:,.1f} GB are free"
    else:
        logits, written_logits = map(_logits, (source, written))
        difference = float(np.abs(logits - written_logits).max())
        if not difference <= _TOLERANCE * max(1.0, logits.std()):
            raise different(f"logits of a fixed batch differ by {difference:.2g}, with equal weights")
    end = f", and its logits differ by at most {difference:.2g}." if reason is None else (
        f"; logits were not compared, because {reason}.")
    return {"weights": len(source.weights), "largest_logit_difference": difference}, sentence + end


def _logits(source):
    model, generator = weight_source.read_model(source), np.random.default_rng(0)
    names = ("encoder_input_tokens", "decoder_input_tokens")[:1 if model.config.is_encoder_only else 2]
    return model({name: generator.integers(1, model.config.vocab_size, (_BATCH, length))
                  for name, length in zip(names, _LENGTHS, strict=False)}).numpy()


class Opened:
    """Opened weights of any format. `tensors.start` reads them into any layout, each process its own pieces.

    Attributes:
        description: As in `folders.describe`.
    """

    def __init__(self, source: "weight_source.WeightSource", path: Any):
        self.source, self.path = source, path
        self.description = {"step": 0, "configuration": continuation.record_of(source.config), "variables": {
            f"{folders.MODEL}{name}": {"shape": list(weight.shape)} for name, weight in source.weights.items()}}

    def fill(self, variables: dict[str, Any]) -> None:
        """Reads Keras variables by their paths."""
        weight_source.fill(self.source, {
            path.removeprefix(folders.MODEL): variable for path, variable in variables.items()})


def opened(run: Run, config: SwitchConfig) -> Opened | None:
    """Returns the weights of a new run if INITIAL_CHECKPOINT is of another format, else None."""
    folder, source_format = run.initial_checkpoint, None
    if folder is not None and not folders.steps(folders.checkpoints_of(run.model_dir)):
        folder, source_format = locate(folder)
    if source_format in (None, SWITCH_TF):
        return None
    if run.initial_variables == "with_optimizer":
        raise Refusal(f"Run.initial_variables is 'with_optimizer', and INITIAL_CHECKPOINT {folder} is of "
                      f"{source_format.name}; convert it with switch-tf convert --with_optimizer, and start from the "
                      "output.")
    if run.initial_variables == "matching":  # models may differ
        config = source_format.config_of(folder) or config
    return Opened(source_format.module.open_weights(folder, config), folder)
