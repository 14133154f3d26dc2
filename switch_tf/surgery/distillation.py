"""Distillation (section 4.2): a model learns from targets and from a larger model's predictions."""

import dataclasses
import functools
import hashlib
import json
import pathlib
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf

from switch_tf import checks, context, data, losses
from switch_tf.checkpoints import folders, tensors
from switch_tf.configs import policies
from switch_tf.configs.experiment import Experiment
from switch_tf.configs.run import StepSettings
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import formats, source_vocabulary, weight_source
from switch_tf.conversion.formats import SWITCH_TF, Format
from switch_tf.data.batches import AddedFeatures
from switch_tf.data.task_catalog import fingerprint_of_pieces
from switch_tf.evaluation.objectives import Objective, target_features
from switch_tf.inference import text_model
from switch_tf.metrics import Mean, Measurements, RouterStats
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.ops import dtypes, indexing
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.reporting import progress
from switch_tf.storage import places
from switch_tf.surgery import predictions
from switch_tf.surgery.predictions import PredictionStore

_ALL = 2**31 - 1  # expert slots for a sequence, enough for all tokens
_BUDGET = 256 * 2**20  # bytes to read of all files together for the identity


class Distillation(Objective):
    """A mixture of the cross-entropies to the targets and to a teacher's probabilities.

    The loss is `(1 - soft_weight) * cross_entropy + soft_weight * distillation`, plus the student's z-loss and router
    losses. "distillation" is T^2 times the cross-entropy between softmax(teacher / T) and softmax(student / T) (Hinton
    et al., 2015; Mesh TensorFlow's StudentTeacher). Its minimum is T^2 times the entropy of softmax(teacher / T).

    Only reported: "teacher_cross_entropy", the teacher's cross-entropy to the targets, and "teacher_unshared", its
    probability of ids that the student lacks, if the teacher has more rows. Probabilities of shared ids are then scaled
    up.

    With `predictions` no teacher runs, and all tokens but the stored ones are one outcome
    (`losses.coarse_soft_cross_entropy`).

    Args:
        teacher: See `LiveTeacher`. Not read with `predictions`.
        soft_weight: In [0, 1]. Share of the teacher's probabilities. 0.25 is the paper's best (Table 6).
        temperature: T, above 0. The paper states none.
        teacher_capacity_factor: Of a teacher that runs. None drops no token; on TPUs and GPUs a sparse layer then costs
            as much as one dense layer for each expert. Required if experts choose tokens.
        dtype: Keras dtype policy of a teacher that runs.
        predictions: Folder made by `switch-tf cache --teacher`.
    """

    def __init__(self, teacher: str, soft_weight: float = 0.25, temperature: float = 1.0,
                 teacher_capacity_factor: float | None = None, dtype: str | None = None,
                 predictions: str | None = None):
        self._soft_weight = checks.number("SOFT_WEIGHT", soft_weight, "in [0, 1]")
        self.temperature = checks.number("TEMPERATURE", temperature, "above 0")
        self.live_teacher = LiveTeacher(teacher, teacher_capacity_factor, dtype)  # not built with `predictions`
        self._teacher = self.live_teacher if predictions is None else StoredTeacher(predictions, self.temperature)
        self.coefficients = {"cross_entropy": 1 - self._soft_weight, "distillation": self._soft_weight,
                             "teacher_cross_entropy": 0.0, "teacher_unshared": 0.0}

    def check(self, config: SwitchConfig, configuration: dict[str, Any]) -> None:
        self._teacher.check(config, configuration)

    def build(self, partitioner: Partitioner) -> None:
        self._teacher.build(partitioner)

    def restore(self) -> None:
        self._teacher.restore()

    @property
    def variables(self) -> list:
        return self._teacher.variables

    def added_features(self) -> AddedFeatures | None:
        return self._teacher.added_features()

    def get_config(self) -> dict[str, Any]:
        return {**self._teacher.record(), "soft_weight": self._soft_weight, "temperature": self.temperature}

    def for_evaluation(self) -> Objective:
        return Objective()

    def measure(self, config: SwitchConfig, features: dict[str, Any], logits: Any,
                router_stats: tuple[RouterStats, ...], settings: StepSettings) -> Measurements:
        measured = super().measure(config, features, logits, router_stats, settings)
        terms = self._teacher.cross_entropies(config, features, logits, self.temperature)
        return measured._replace(loss_terms=measured.loss_terms | terms)


class LiveTeacher(Objective):
    """A checkpoint's model in the student's layout, without dropout or gradient.

    The folder is opened when first needed.

    Args:
        folder: Run folder (its newest checkpoint), checkpoint, or folder of another format that states its model.
        capacity_factor: See `Distillation`.
        argument: Names the folder in messages.
    """

    def __init__(self, folder: str, capacity_factor: float | None = None, dtype: str | None = None,
                 argument: str = "TEACHER"):
        self._folder, self._argument = checks.place(argument, folder), argument
        self.capacity_factor = checks.optional("Distillation.teacher_capacity_factor", capacity_factor, checks.number,
                                               "above 0")
        self.dtype = dtype

    @functools.cached_property
    def _source(self) -> tuple[Any, Format]:
        """Fixed for the life of this object."""
        path, source_format = formats.locate(self._folder, self._argument)
        return source_format.resolve(path), source_format

    @functools.cached_property
    def _config(self) -> SwitchConfig:
        path, source_format = self._source
        config = source_format.config_of(path)
        if config is None:
            raise Refusal(f"{self._argument} {path} is of {source_format.name} and does not describe its model; "
                          f"convert it first: switch-tf convert --input {self._folder} --output FOLDER "
                          "--gin_file=gin/models/NAME.gin")
        if source_format is SWITCH_TF:
            folders.check_size(config, path)
        return config

    @functools.cached_property
    def _description(self):
        return folders.describe(self._source[0])

    @functools.cached_property
    def identity(self) -> str:
        """Identifies the checkpoint by a hash of its files, or of samples of large files."""
        path, source_format = self._source
        if source_format is SWITCH_TF:
            return folders.identity(self._description)
        start = str(path)
        files = [name.removeprefix(start) for name, _, _ in formats.state(path)
                 if "/state." not in name.removeprefix(start)]  # the optimizer's, of T5X
        content = [(file, places.sample(start + file, _BUDGET // len(files))) for file in files]
        return f"{source_format.name}, {hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}"

    def record(self) -> dict[str, Any]:
        """Returns this teacher's JSON-able entries in a run's configuration."""
        return {"teacher": self.identity, "teacher_capacity_factor": self.capacity_factor, "teacher_dtype": self.dtype,
                "top_k": None}

    def check(self, config: SwitchConfig, configuration: dict[str, Any]) -> None:
        """Refuses a teacher that does not predict the student's targets."""
        (path, _), teacher = self._source, self._config
        name, own = self._vocabulary()
        if own is None and config.vocab_size != teacher.vocab_size:
            raise Refusal(f"A teacher needs the student's vocab_size, {config.vocab_size}, or its vocabulary, and "
                          f"{path} has {teacher.vocab_size} rows and no vocabulary to compare; put its spiece.model "
                          f"there, or use SwitchConfig.vocab_size={teacher.vocab_size}.")
        if config.is_encoder_only != teacher.is_encoder_only:
            one, other = ("student", "teacher") if config.is_encoder_only else ("teacher", "student")
            raise Refusal(f"A teacher has to predict the student's targets, but the {one} is an encoder alone and the "
                          f"{other} has a decoder ({path}).")
        if own not in (None, configuration[name]):
            raise Refusal(f"The vocabulary of the teacher in {path} is not the student's, so their tokens "
                          "differ; set VOCABULARY to the one that the teacher was trained with, of which its run "
                          "folder keeps a copy.")
        if not teacher.sparse_layer_names:
            return
        if self.capacity_factor is None and any(
                policies.get(policy).experts_choose for policy, layers in (
                    (teacher.routing_policy, teacher.encoder_sparse_layers),
                    (teacher.decoder_policy, teacher.decoder_sparse_layers)) if layers):
            raise Refusal(f"The experts of the teacher in {path} choose tokens and leave out others at any capacity; "
                          "set Distillation.teacher_capacity_factor, such as the teacher's own in evaluation, "
                          f"{teacher.eval_capacity_factor}.")
        if self.capacity_factor is not None and teacher.rules.groups_are_sequences:
            raise Refusal(f"Distillation.teacher_capacity_factor has no effect on the teacher in {path}, which has a "
                          f"fixed capacity (semantics={teacher.semantics!r}); leave it out, and no token is dropped.")

    def _vocabulary(self):
        """Returns a name in `continuation.record` and its value for the vocabulary, None if unknown."""
        path, source_format = self._source
        if source_format is SWITCH_TF:
            record = self._description["configuration"]
            # Earlier versions recorded only the bytes of vocabularies.
            name = "pieces" if record.get("pieces") else "vocabulary"
            return name, record.get(name)
        vocabulary = source_vocabulary.find(path)
        if vocabulary.name is None and vocabulary.content is None:
            return "vocabulary", None
        with tempfile.TemporaryDirectory() as folder:
            file = vocabulary.name
            if file is None:
                file = pathlib.Path(folder, "spiece.model")
                file.write_bytes(vocabulary.content)
            return "pieces", [fingerprint_of_pieces(data.get_vocabulary(str(file)))]

    def build(self, partitioner: Partitioner) -> None:
        """Creates the variables."""
        config = self._config
        if self.capacity_factor is not None:
            config = dataclasses.replace(config, eval_capacity_factor=self.capacity_factor)
        elif config.rules.groups_are_sequences:
            config = dataclasses.replace(config, expert_capacity=_ALL)
        self._model = SwitchTransformer(config, dtype=self.dtype, name="teacher")
        partitioner.build(self._model, draws_weights=False)

    def restore(self) -> None:
        """Loads the weights, under any layout."""
        path, source_format = self._source
        if source_format is SWITCH_TF:
            tensors.restore(path, tensors.state_variables(self._model))
        else:
            weight_source.fill(source_format.module.open_weights(path, self._config),
                               weight_source.variables_of(self._model))

    @property
    def variables(self) -> list:
        """Keras variables."""
        return self._model.variables

    def shared_logits(self, config: SwitchConfig, features: dict[str, Any]) -> tuple[Any, Any]:
        """Returns logits of the student's ids, and the probability of further ids, <float32>[batch, length] or None.

        Software pads vocabularies to different numbers of rows. `config` is the student's.
        """
        with context.within(no_drop=self.capacity_factor is None, routes=None):
            logits = tf.stop_gradient(self._model.forward(features, training=False)[0])
        missing = config.vocab_size - logits.shape[-1]
        if not missing:
            return logits, None
        if missing > 0:
            return tf.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=indexing.LEFT_OUT), None
        shared, unshared = logits[..., :missing], logits[..., missing:]
        unshared = tf.reduce_logsumexp(unshared, axis=-1) - tf.reduce_logsumexp(logits, axis=-1)
        return shared, tf.exp(unshared)

    def cross_entropies(self, config: SwitchConfig, features: dict[str, Any], logits: Any,
                        temperature: float) -> dict[str, Mean]:
        """Returns the terms of `Distillation`, "teacher_unshared" only for a teacher with further ids.

        `config` and `logits` are the student's.
        """
        targets, weights = (features[name] for name in target_features(config))
        teacher_logits, unshared = self.shared_logits(config, features)
        hard, _, _ = losses.cross_entropy(teacher_logits, targets, weights, z_loss_weight=0.0)
        terms = {"distillation": losses.soft_cross_entropy(logits, teacher_logits, weights, temperature),
                 "teacher_cross_entropy": hard}
        if unshared is None:
            return terms
        weights = tf.cast(weights, unshared.dtype)
        return terms | {"teacher_unshared": Mean(tf.reduce_sum(unshared * weights), tf.reduce_sum(weights))}


class StoredTeacher(Objective):
    """Predictions that `switch-tf cache --teacher` stored at `temperature`."""

    def __init__(self, folder: str, temperature: float):
        self._folder = checks.path("TEACHER_PREDICTIONS", folder)
        self._temperature = temperature

    @functools.cached_property
    def _store(self) -> PredictionStore:
        return PredictionStore(self._folder)

    def record(self) -> dict[str, Any]:
        """Returns the same as `LiveTeacher.record`. Earlier versions did not store the dtype."""
        return {name: self._store.manifest.get(name)
                for name in ("teacher", "teacher_capacity_factor", "teacher_dtype", "top_k")}

    def check(self, config: SwitchConfig, configuration: dict[str, Any]) -> None:
        """Refuses predictions of other targets than the student's."""
        stored, wanted = self._store.manifest, configuration | {"TEMPERATURE": self._temperature}
        for name in ("TEMPERATURE", "vocabulary", "TASK_FEATURE_LENGTHS", "Run.pack"):
            there, here = stored[name.removeprefix("Run.").lower()], wanted[name]
            if there != here:
                raise Refusal(f"The predictions in {self._folder} are for {name} {there!r}, and this run has {here!r}; "
                              "use that, cache again into another folder, or leave TEACHER_PREDICTIONS out to run the "
                              "teacher.")
        if stored["vocab_size"] > config.vocab_size:
            raise Refusal(f"The predictions in {self._folder} are for {stored['vocab_size']} ids, and this run has "
                          f"SwitchConfig.vocab_size {config.vocab_size}; use as many, or cache again into another "
                          "folder.")

    def added_features(self) -> AddedFeatures:
        """Returns the predictions as features of a batch."""
        store = self._store
        widths = {name: int(np.prod(store.row_dtype[name].shape)) for name in predictions.NAMES}

        def of_rows(features):
            is_filled = np.any([values.any(axis=1) for values in features.values()], axis=0)
            stored = store.read(predictions.keys_of({name: values[is_filled] for name, values in features.items()}))
            if stored is None:
                reads = " and ".join(
                    f"{read['steps']} steps of SEED {read['seed']} with BATCH_SIZE {read['batch_size']}"
                    for read in store.manifest["reads"]) or "an unfinished command"
                raise Refusal(f"A row of the next batch has no predictions in {self._folder}, which has those of "
                              f"{reads}; cache this run's with the same `switch-tf cache --teacher` and its SEED, "
                              "BATCH_SIZE and TRAIN_STEPS, or leave TEACHER_PREDICTIONS out to run the teacher.")
            added = {name: np.zeros((len(is_filled), width), np.int32) for name, width in widths.items()}
            for name, values in stored.items():
                added[name][is_filled] = values
            return added

        return AddedFeatures(widths, of_rows)

    def cross_entropies(self, config: SwitchConfig, features: dict[str, Any], logits: Any,
                        temperature: float) -> dict[str, Mean]:
        """Returns the same as `LiveTeacher.cross_entropies`, with all tokens but k as one outcome."""
        weights = features[target_features(config)[1]]
        token_ids, log_probs, log_rest, target_log_probs = (
            features[name] if name == predictions.IDS else tf.bitcast(features[name], tf.float32)
            for name in predictions.NAMES)
        of_tokens = (-1, weights.shape[1], self._store.manifest["top_k"])
        soft = losses.coarse_soft_cross_entropy(logits, losses.Predictions(
            tf.reshape(token_ids, of_tokens), tf.reshape(log_probs, of_tokens), log_rest), weights, temperature)
        target_log_probs = tf.cast(target_log_probs, soft.total.dtype)
        hard = -tf.reduce_sum(target_log_probs * tf.cast(weights, target_log_probs.dtype))
        return {"distillation": soft, "teacher_cross_entropy": Mean(hard, soft.weight)}


def store(described: Experiment, teacher: LiveTeacher, folder: Any, temperature: float, top_k: int,
          vocabulary: list[str], overwrite: bool = False) -> dict[str, Any]:
    """Stores the missing predictions of a run's training rows.

    Args:
        described: Of one process, with its final VOCABULARY.
        teacher: Checked and not built.
        folder: Locked.
        temperature: The student's.
        top_k: Tokens stored for each target.
        vocabulary: Its fingerprint.

    Returns:
        `rows` and `bytes` of the folder, `new_rows`, `new_targets`, and `unshared`, the teacher's mean probability of
        ids that the student lacks, at new targets.
    """
    run, config, partitioner = described.run, described.config, described.partitioner
    writer = predictions.PredictionWriter(folder, {
        **teacher.record(), "temperature": temperature, "top_k": top_k, "vocab_size": config.vocab_size,
        "vocabulary": vocabulary, "pack": run.pack, "task_feature_lengths": dict(run.task_feature_lengths)}, overwrite)
    row_dtype, (target_name, weight_name) = predictions.row_dtype(writer.manifest), target_features(config)
    teacher.build(partitioner)
    teacher.restore()
    description = data.description_of_data(run, config, "train", run.seed)
    batches = data.get_batches(description)

    def predict(features):
        logits, unshared = teacher.shared_logits(config, features)
        logits = dtypes.widen(logits)
        normalizer, target_logit, _ = indexing.normalizers_and_targets(logits, features[target_name])
        return ((*losses.most_probable(logits, top_k, temperature), target_logit - normalizer),
                tf.zeros_like(normalizer) if unshared is None else unshared)

    predict = text_model.compile_features(predict, partitioner)
    num_before, num_targets, unshared = len(writer), 0, 0.0
    try:
        with progress.bar(run.train_steps, "storing predictions", " steps") as bar, data.refusing_bad_rows(description):
            for _ in range(run.train_steps):
                batch = {name: np.asarray(value)[0] for name, value in next(batches).items()}
                keys = predictions.keys_of(batch)
                new = writer.lacks(keys)
                if len(new):
                    # The whole batch, to drop the same tokens as in training.
                    predicted, mass = predict(batch)
                    is_target = batch[weight_name][new] > 0
                    writer.add(keys[new], predictions.pack(row_dtype, [values[new] for values in predicted], is_target))
                    num_targets += int(is_target.sum())
                    unshared += float(mass[new][is_target].sum())
                bar.set_postfix_str(f"{len(writer):,} rows", refresh=False)
                bar.update()
    finally:
        batches.close()
    writer.finish({"task": run.mixture_or_task_name, "seed": run.seed, "batch_size": run.batch_size,
                   "steps": run.train_steps, "data": data.fingerprint(description)})
    return {"rows": len(writer), "bytes": places.tree_size(folder), "new_rows": len(writer) - num_before,
            "new_targets": num_targets, "unshared": unshared / max(1, num_targets)}
