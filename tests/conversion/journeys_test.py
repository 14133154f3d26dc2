"""Whole journeys through the commands: a foreign checkpoint is converted, evaluated, fine-tuned and written for others.

Weights are those of PyTorch's models in tests/golden, with a vocabulary of bytes. What comes out is read by
`numpy_reader.py`, which knows nothing of this package.
"""

import dataclasses
import json
import pathlib
import re
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from switch_tf import SwitchConfig, conversion
from switch_tf.cli import main
from switch_tf.conversion import model_gin
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.reporting import report
from tests.conversion import mesh_tensorflow_checkpoints, numpy_reader, shared, t5x_checkpoints
from tests.conversion.shared import BLOCKS, GOLDEN, assert_same_values, assert_weights_are, copy, expected_logits
from tests.conversion.t5x_orbax_test import write_orbax

VOCAB_SIZE, STEPS, LENGTHS = 384, 20, {"inputs": 24, "targets": 12}
ALL = 24  # slots of an expert for a sequence, which drop nothing
TRAIN = ["--gin_file=gin/tasks/text_files.gin", "--gin_file=gin/runs/finetune.gin", "--gin_file=gin/layouts/single.gin",
         "--gin.TRAIN_FILES='lines.txt'", "--gin.VALIDATION_FILES='held_out.txt'", "--gin.VOCABULARY='bytes'",
         f"--gin.TASK_FEATURE_LENGTHS={LENGTHS}", "--gin.BATCH_SIZE=4", "--gin.Run.eval_batches=1",
         f"--gin.TRAIN_STEPS={STEPS}", f"--gin.EVAL_PERIOD={STEPS}",
         "--gin.DROPOUT_RATE=0.0", "--gin.EXPERT_DROPOUT_RATE=0.0"]
BLOCK = re.compile(r"(encoder|decoder)\.block\.(\d+)\.")
LOSS = "eval/text_files/loss"


class Case(NamedTuple):
    """A checkpoint: a golden model, the layout of its files, their dtype, and the fields that its names do not show."""

    golden: str
    layout: str
    dtype: str = "float32"
    fields: dict = {}


# Mesh TensorFlow and T5X drop no token at an evaluation with slots for all; Hugging Face's rule drops most here.
NONE_DROPPED = {"eval_capacity_factor": 4.0, "expert_capacity": None}
CASES = {
    "t5x_dense": Case("t5_1_1", "t5x"),
    "t5x_scanned": Case("umt5", "scanned"),
    "t5x_moe": Case("switch", "t5x", fields={"semantics": "t5x", **NONE_DROPPED}),
    "t5x_bfloat16": Case("t5_1_1", "t5x", "bfloat16"),
    "t5x_moe_bfloat16": Case("switch_step_1", "t5x", "bfloat16"),
    "t5x_orbax": Case("switch", "orbax"),
    "mtf_dense": Case("t5_1_1", "mtf"),
    "mtf_moe": Case("switch", "mtf", fields={"semantics": "mtf", **NONE_DROPPED}),
    "mtf_moe_bfloat16": Case("switch_step_1", "mtf", "bfloat16"),
}
# Layers of encoder and decoder to keep: tracing takes as long as a model is deep. The second of "switch" is sparse.
DEPTHS = {"t5_1_1": (1, 1), "umt5": (2, 1), "switch": (2, 2), "switch_step_1": (1, 1)}


def tensors_of(case: Case) -> dict[str, np.ndarray]:
    """Returns Hugging Face's name -> <float32> tensor, with rows for all bytes and values that the case's dtype has."""
    depths = dict(zip(("encoder", "decoder"), DEPTHS[case.golden], strict=True))
    tensors = {name: values for name, values in shared.tensors_of(case.golden).items()
        if not (match := BLOCK.match(name)) or int(match[2]) < depths[match[1]]}
    for seed, name in enumerate(("shared.weight", "lm_head.weight")):
        if name in tensors:
            more = np.random.RandomState(seed).randn(VOCAB_SIZE - len(tensors[name]), tensors[name].shape[1])
            tensors[name] = np.concatenate([tensors[name], (tensors[name].std() * more).astype(np.float32)])
    dtype = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else np.float32
    return {name: values.astype(dtype).astype(np.float32) for name, values in tensors.items()}


def config_of(case: Case) -> SwitchConfig:
    num_encoder_layers, num_decoder_layers = DEPTHS[case.golden]
    return dataclasses.replace(conversion.from_hugging_face(GOLDEN / case.golden).config, vocab_size=VOCAB_SIZE,
                               jitter_noise=0.0, num_encoder_layers=num_encoder_layers,
                               num_decoder_layers=num_decoder_layers, **case.fields)


def arrays_of(tensors: dict[str, np.ndarray], config: SwitchConfig) -> dict[str, np.ndarray]:
    """Returns T5X's arrays of Hugging Face's tensors."""
    arrays = t5x_checkpoints.arrays_from(tensors, config.num_encoder_layers, config.num_decoder_layers,
                                         config.logits_via_embedding)
    if config.relative_attention_per_layer:
        for stack, depth in depths_of(config).items():
            del arrays[f"{stack}/relpos_bias/rel_embedding"]
            arrays |= {f"{stack}/layers_{i}/relpos_bias/rel_embedding": tensors[
                f"{stack}.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight"].T for i in range(depth)}
    return arrays


def depths_of(config: SwitchConfig) -> dict[str, int]:
    return {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}


def write(case: Case, tensors: dict[str, np.ndarray], config: SwitchConfig) -> None:
    """Writes the checkpoint `there`, its model file, and the same weights in the folder `reference` for NumPy."""
    arrays, place = arrays_of(tensors, config), pathlib.Path("there")
    if case.layout == "mtf":
        variables = mesh_tensorflow_checkpoints.variables_from(arrays, BLOCKS[case.golden])
        mesh_tensorflow_checkpoints.write(place, variables, dtype=case.dtype)
    elif case.layout == "orbax":
        write_orbax(place.resolve(), arrays, case.dtype)
    else:
        arrays = t5x_checkpoints.scanned(arrays, depths_of(config)) if case.layout == "scanned" else arrays
        t5x_checkpoints.write(place, arrays, case.dtype)
    pathlib.Path("model.gin").write_text(model_gin.gin_text(config))
    copy(case.golden, pathlib.Path("reference"), tensors, num_layers=config.num_encoder_layers,
         num_decoder_layers=config.num_decoder_layers, **{"expert_capacity": ALL} if needs_capacity(config) else {})
    lines = [f"{number} plus {number} is {2 * number}, and so on\n" for number in range(40)]
    pathlib.Path("lines.txt").write_text("".join(lines[:32]))
    pathlib.Path("held_out.txt").write_text("".join(lines[32:]))


def needs_capacity(config: SwitchConfig) -> bool:
    return config.num_experts > 0 and config.expert_capacity is None


def command(*words: str) -> None:
    assert main.main(list(words)) == 0


def evaluations(run: str) -> dict[int, float]:
    """Returns step -> held-out loss that a run has logged."""
    lines = map(json.loads, pathlib.Path(run, "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[LOSS] for line in lines if LOSS in line}


def refuse(*arguments):
    raise Refusal("Stopped by a test.")


def tensors_in(folder: str) -> dict[str, np.ndarray]:
    return numpy_reader.read(pathlib.Path(folder))[1]


def logits_here(folder: str, inputs: np.ndarray, decoder_inputs: np.ndarray) -> np.ndarray:
    features = {"encoder_input_tokens": inputs, "decoder_input_tokens": decoder_inputs}
    return conversion.from_switch_tf(folder)(features).numpy()


class Journey(NamedTuple):
    """A written case. `tokens` are inputs of the encoder and the decoder, of whose logits those that count are real."""

    name: str
    config: SwitchConfig
    tensors: dict[str, np.ndarray]
    tokens: tuple[np.ndarray, np.ndarray]
    is_real: np.ndarray

    @property
    def capacity(self) -> list[str]:
        return [f"--expert_capacity={ALL}"] if needs_capacity(self.config) else []

    def reads(self, folder: str) -> np.ndarray:
        return numpy_reader.logits_of(pathlib.Path(folder), *self.tokens)

    def assert_same_logits(self, found: np.ndarray, expected: np.ndarray) -> None:
        difference = np.abs(found - expected)[self.is_real].max()
        print(f"{self.name}: largest difference of logits {difference:.1e}, of {expected.std():.1f}")
        assert difference < 1e-5

    def assert_weights_are(self, folder: str, tensors: dict[str, np.ndarray]) -> None:
        """Compares the weights of a folder of ours with Hugging Face's tensors, bit for bit."""
        assert_weights_are(conversion.from_switch_tf(folder), arrays_of(tensors, self.config))


@pytest.fixture
def journey(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = CASES[request.param]
    tensors, config, (features, _, is_real) = tensors_of(case), config_of(case), expected_logits(case.golden)
    write(case, tensors, config)
    command("convert", "--input=there", "--gin_file=model.gin", "--output=ours")
    return Journey(request.param, config, tensors, tuple(features.values()), is_real)


FIRST, *OTHERS = CASES
AGAIN = ("t5x_bfloat16", "t5x_orbax", "mtf_dense", "mtf_moe_bfloat16")  # train what other cases train, from other files


@pytest.mark.parametrize("journey", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)],
                         indirect=True)
def test_bits_and_logits_are_those_of_the_checkpoint(journey):
    to_others = ["convert", "--input=there", "--gin_file=model.gin", "--to=hugging_face", *journey.capacity]
    command(*to_others, "--output=theirs")
    command(*to_others, "--output=half", "--dtype=bfloat16")
    journey.assert_weights_are("ours", journey.tensors)
    assert_same_values(tensors_in("theirs"), journey.tensors)
    assert_same_values(tensors_in("half"), {
        name: values.astype(ml_dtypes.bfloat16) for name, values in journey.tensors.items()})
    expected = journey.reads("reference")
    journey.assert_same_logits(journey.reads("theirs"), expected)
    journey.assert_same_logits(logits_here("ours", *journey.tokens), expected)


@pytest.mark.parametrize("journey", [pytest.param(name, marks=pytest.mark.exhaustive if name in AGAIN else
                                                  pytest.mark.slow) for name in CASES], indirect=True)
def test_a_fine_tuned_model_is_read_by_others(journey, monkeypatch, capsys):
    monkeypatch.setattr("switch_tf.data.check_examples", lambda description: None)  # which takes seconds
    monkeypatch.setattr(report, "png", lambda figure: b"")
    command("train", "--gin_file=model.gin", *TRAIN, "--gin.INITIAL_CHECKPOINT='there'", "--gin.MODEL_DIR='tuned'")
    losses = evaluations("tuned")
    assert losses.keys() == {0, STEPS} and losses[STEPS] < losses[0]
    with monkeypatch.context() as patched:  # ends after the evaluation, before a step is traced
        patched.setattr(Partitioner, "trace", refuse)
        assert main.main(["train", "--gin_file=ours/model.gin", *TRAIN, "--gin.INITIAL_CHECKPOINT='ours'",
                          "--gin.MODEL_DIR='converted'"]) == 2
    assert evaluations("converted") == {0: losses[0]}
    capsys.readouterr()
    command("eval", "--run=tuned", "--json")
    scores = json.loads(capsys.readouterr().out)["results"][0]["tasks"]["text_files"]
    print(f"{journey.name}: {losses}, evaluated {scores}")
    assert np.isfinite(scores["loss"])

    command("convert", "--input=tuned", "--output=theirs", *journey.capacity)
    command("convert", "--input=theirs", "--output=back", "--verify")
    tensors = tensors_in("theirs")
    assert tensors.keys() == journey.tensors.keys()
    assert not [name for name in tensors if np.array_equal(tensors[name], journey.tensors[name])]
    for folder in ("tuned", "back"):
        journey.assert_weights_are(folder, tensors)
    journey.assert_same_logits(journey.reads("theirs"), logits_here("tuned", *journey.tokens))
