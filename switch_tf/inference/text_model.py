"""Answers and scores texts with a model, and compiles prediction for any layout."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from switch_tf import checks, context, data, decoding, partitioning
from switch_tf.ops import forms
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal

_FEW_ROWS = (1, 4)  # inputs in programs of static shape


class Inputs(NamedTuple):
    """A tokenised text.

    `ids`: Cut to the model's length, with the end of sequence.
    `num_cut`: Number of ids cut off.
    """

    ids: list[int]
    num_cut: int


class Answer(NamedTuple):
    """An answer to a text. `score`: see `decoding.Decoded`. `ids` include the end of sequence."""

    text: str
    score: float
    ids: list[int]


class TextModel:
    """Answers batches of texts.

    Args:
        model: SwitchTransformer, built.
        inputs_length, max_length: Largest numbers of tokens to read and to decode, ends included.
        sampler: See `SwitchTransformer.generate`.
        batch_size: Every batch is padded to this size. With None, one program takes batches of any shape, and programs
            for few inputs are compiled in the background (`FewRows`).
        partitioner: Partitioner that built the model, or None for one device of any library. With `has_fixed_shapes`,
            `batch_size` is rounded up to a multiple of a batch's pieces, and batches are padded to the largest lengths.
    """

    def __init__(self, model: keras.Model, features: data.Reading, inputs_length: int, max_length: int,
                 sampler: str | decoding.Sampler = "greedy", batch_size: int | None = 32,
                 partitioner: Partitioner | None = None):
        decoding.check_decodes(model.config)
        self.model = model
        self.features = features
        self.inputs_length = checks.integer("inputs_length", inputs_length, 1)
        self.max_length = checks.integer("max_length", max_length, 1)
        self.batch_size = checks.optional("batch_size", batch_size, checks.integer, 1)
        self.sampler = decoding.get_sampler(sampler)
        self._partitioner = partitioner if partitioner and partitioner.has_fixed_shapes else None
        self._num_pieces = self._partitioner.layout.num_pieces("batch") if self._partitioner else 1
        self._few_rows, self._row_counts = None, [2]
        if self._partitioner:
            self.batch_size = -(-(batch_size or 1) // self._num_pieces) * self._num_pieces
            self._row_counts = [self.batch_size]
        elif not batch_size:
            self._few_rows = FewRows(
                self._sample, self.inputs_length, decoding.max_fused_sequences(model, self.sampler))
        self._decode = self._compiled(self._sample, None if batch_size else (2, 2))
        self._likelihoods = self._compiled(self._likelihood)

    def _compiled(self, function, ranks=None):
        """Compiles a function of two <int32>[batch, length] arrays."""
        if self._partitioner:
            program = compile_features(
                lambda features: function(features["first"], features["second"]), self._partitioner)
            return lambda first, second: program({"first": first, "second": second})
        return forms.compiled(function, ranks)

    def warm_up(self) -> None:
        """Compiles the programs for answers and routes. With fixed shapes, adds one for few inputs."""
        ids = [self.features.inputs.eos_id]
        if self._partitioner:
            self._row_counts = sorted({self._num_pieces, self.batch_size})
        for rows in self._row_counts:
            self.answer([ids] * rows, range(rows))
        self.routes(ids, ids)

    def read(self, text: str) -> Inputs:
        """Tokenises a text, see `data.Reading`, and refuses an empty one."""
        return _not_empty(self.features.read(text, self.inputs_length))

    def read_target(self, text: str) -> Inputs:
        """Tokenises a target, and refuses an empty one."""
        return _not_empty(self.features.read_target(text, self.max_length))

    def answer(self, inputs: list[list[int]], rows: Sequence[int]) -> list[list[Answer]]:
        """Returns the results of one to `batch_size` inputs, the best first.

        Args:
            inputs: Ids from `read`.
            rows: Number of each input among all answered ones, for samplers.
        """
        shape = self._shape(inputs, self.inputs_length)
        shape, decode = (self._few_rows and self._few_rows.program(*shape)) or (shape, self._decode)
        numbers = _filled([[row] for row in rows], (shape[0], 1))
        ids, scores = map(np.asarray, decode(_filled(inputs, shape), numbers))
        return [[self._answer(*result) for result in zip(*results, strict=True)]
                for results in zip(ids[:len(inputs)], scores, strict=False)]

    def score(self, inputs: list[list[int]], targets: list[list[int]]) -> list[float]:
        """Returns the log-likelihood in nats of each input's target, for at most `batch_size` inputs."""
        targets = _filled(targets, self._shape(targets, self.max_length))
        inputs_to_score = _filled(inputs, self._shape(inputs, self.inputs_length))
        return np.asarray(self._likelihoods(inputs_to_score, targets))[:len(inputs)].tolist()

    def routes(self, inputs: list[int], outputs: list[int]) -> dict:
        """Returns the experts of the tokens of a text and its answer, as chosen during decoding.

        Args:
            inputs, outputs: `ids` of `read` and of an `Answer`.

        Returns:
            JSON-able.
            `inputs`: pieces of text.
            `outputs`: pieces that the decoder reads: the start of sequence and `outputs` without its last id.
            `num_experts`: int.
            `layers`: list of dict, in order. `layer`: path. `reads`: "inputs" or "outputs". `experts`: for each token a
                list of `[expert, gate]`, the largest gate first, empty for a token without an expert.
        """
        read = [0, *outputs[:-1]]
        gates_of_layers = self._gates(*(
            _filled([ids], (self._num_pieces, most if self._partitioner else len(ids)))
            for ids, most in ((inputs, self.inputs_length), (read, self.max_length))))
        layers = []
        for name, gates in gates_of_layers.items():
            path = name.partition("/")[2]
            reads, ids = ("outputs", read) if path.startswith("decoder/") else ("inputs", inputs)
            layers.append({"layer": path, "reads": reads, "experts": [
                [[int(expert), round(float(token[expert]), 4)]
                 for expert in np.argsort(-token, kind="stable") if token[expert]]
                for token in np.asarray(gates)[0, :len(ids)]]})
        return {"inputs": data.pieces(self.features.inputs, inputs),
                "outputs": data.pieces(self.features.targets, read),
                "num_experts": self.model.config.num_experts, "layers": layers}

    @functools.cached_property
    def _gates(self):
        def run(inputs, outputs):
            recorded = {}
            with context.within(no_drop=True, routes=recorded):
                self.model.forward({"encoder_input_tokens": inputs, "decoder_input_tokens": outputs})
            return recorded

        return self._compiled(run, (2, 2))

    def _sample(self, inputs, rows):
        return self.sampler.decode(self.model, {"encoder_input_tokens": inputs}, self.max_length,
                                   self.features.targets.eos_id, rows[:, 0])

    def _likelihood(self, inputs, targets):
        return decoding.log_likelihoods(self.model, {
            "encoder_input_tokens": inputs, "decoder_input_tokens": ops.pad(targets, ((0, 0), (1, 0)))[:, :-1],
            "decoder_target_tokens": targets, "decoder_loss_weights": ops.cast(targets > 0, "int32")})

    def _shape(self, texts, most):
        length = max(map(len, texts))
        if self._partitioner:
            return next(rows for rows in self._row_counts if rows >= len(texts)), most
        if not self.batch_size:
            return len(texts), length
        return self.batch_size, min(most, decoding.bucketed_length(length))

    def _answer(self, ids, score):
        ids = np.trim_zeros(ids, "b").tolist()
        if (end := self.features.targets.eos_id) in ids:
            ids = ids[:ids.index(end) + 1]
        text = data.spell(self.features.targets, ids[:len(ids) - (ids[-1:] == [end])])
        return Answer(text, float(score), ids)


class FewRows:
    """Compiled programs for one to four inputs.

    A program of static shape takes half the time of the one for any shape, but seconds to compile. A thread compiles it
    when first needed, one at a time; meanwhile the program for any shape answers. Lengths are padded to 32, 64, 128 and
    so on, because a program takes some 50 MiB.

    Args:
        decode: Maps <int32>[rows, length] and <int32>[rows, 1] to a tuple of tensors [rows, ...].
        most_rows: Largest number of inputs that a static shape makes faster, `decoding.max_fused_sequences`.
    """

    def __init__(self, decode: Callable[..., Any], inputs_length: int, most_rows: int):
        self._decode = decode
        self._rows = [rows for rows in _FEW_ROWS if rows <= most_rows]
        self._inputs_length = inputs_length
        self._programs = {}
        self._maker: threading.Thread | None = None

    def program(self, rows: int, length: int) -> tuple[tuple[int, int], Callable[..., Any]] | None:
        """Returns the shape to pad to and its program, or starts to compile it and returns None."""
        rows = next((most for most in self._rows if rows <= most), 0)
        if not rows:
            return None
        filled = max(decoding.bucketed_length(1), 1 << (length - 1).bit_length())
        shape = rows, min(filled, self._inputs_length)
        if program := self._programs.get(shape):
            return shape, program
        if shape not in self._programs and not (self._maker and self._maker.is_alive()):
            # A process that ends while a daemon traces is aborted.
            self._maker = threading.Thread(target=self._make, args=shape, name="compiler", daemon=False)
            self._maker.start()
        return None

    def _make(self, rows, length):
        self._programs[rows, length] = None  # no second attempt after an error; the thread prints it
        program = forms.compiled(self._decode)
        program(np.zeros((rows, length), "int32"), np.zeros((rows, 1), "int32"))
        self._programs[rows, length] = program


def compile_prediction(model: keras.Model, max_length: int, partitioner: Partitioner,
                       end_id: int | tuple[int, ...] | None = None) -> Callable[..., Any]:
    """Returns a greedy decoder from features, dict of <int32>[batch, length], to <int32>[batch, max_length]."""
    return compile_features(lambda features: decoding.Greedy().ids(model, features, max_length, end_id), partitioner)


def compile_features(function: Callable[[dict[str, Any]], Any], partitioner: Partitioner,
                     join: Callable[[Any], Any] | None = None, use_xla: bool = False) -> Callable[[dict], Any]:
    """Compiles a function of features for a layout. Features and results are on the host.

    Args:
        function: Maps a dict of <int32>[batch, length] to a nest of tensors, equal on every device.
        join: Joins the results of all parts of the batch. Defaults to `partitioner.gather_rows`.
    """
    def call(features):
        with partitioning.part_of_batch(*partitioner.current_part()):
            return (join or partitioner.gather_rows)(function(features))

    program = partitioner.compile(partitioner.results(call), use_xla)
    return lambda features: tf.nest.map_structure(
        np.asarray, program(partitioner.place({name: np.asarray(value)[None] for name, value in features.items()})))


def _not_empty(inputs):
    if not inputs[0]:
        raise Refusal("There is no text in it.")
    return Inputs(*inputs)


def _filled(texts, shape):
    batch = np.zeros(shape, "int32")
    for row, ids in zip(batch, texts, strict=False):
        row[:len(ids)] = ids
    return batch


def fitting_vocabulary(vocabulary: Any, model: keras.Model) -> Any:
    """Returns a vocabulary as in `generate`, and refuses one with more ids than the model's embedding."""
    vocabulary = data.get_vocabulary(vocabulary) if isinstance(vocabulary, str) else vocabulary
    if vocabulary.vocab_size > model.config.vocab_size:
        raise Refusal(f"The vocabulary has {vocabulary.vocab_size} ids and the model an embedding for "
                      f"{model.config.vocab_size}; give the vocabulary that it was trained with.")
    return vocabulary


def generate(model: keras.Model, texts: list[str], vocabulary: Any, max_length: int = 64,
             sampler: str | decoding.Sampler = "greedy", batch_size: int = 32, inputs_length: int = 512) -> list[str]:
    """Returns the answers of a model to texts, without the end of sequence.

    Args:
        model: SwitchTransformer.
        texts: `<extra_id_0>` is a sentinel.
        vocabulary: Name of a registered vocabulary, path of a SentencePiece model, or a seqio vocabulary.
        max_length: Largest number of tokens to decode.
        sampler: See `SwitchTransformer.generate`.
        inputs_length: Tokens after which a text is cut.
    """
    if isinstance(texts, str):
        raise Refusal(f"texts must be a list of them, such as [{checks.shown(texts)}].")
    vocabulary = fitting_vocabulary(vocabulary, model)
    if not model.built:
        model.build()
    texts = [checks.text("A text", text) for text in texts]
    if not texts:
        return []
    answers = TextModel(model, data.Reading(vocabulary, vocabulary), inputs_length, max_length, sampler,
                        min(checks.integer("batch_size", batch_size, 1), len(texts)))
    inputs = [answers.read(text).ids for text in texts]
    outputs = []
    for first in range(0, len(inputs), answers.batch_size):
        batch = inputs[first:first + answers.batch_size]
        outputs += [results[0].text for results in answers.answer(batch, range(first, first + len(batch)))]
    return outputs
