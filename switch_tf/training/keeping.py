"""Writes the model, task and vocabularies of a run as data, so that its folder is enough to use the model."""

import pathlib
from collections.abc import Callable

from switch_tf.checkpoints import run_config
from switch_tf.configs import policies
from switch_tf.configs.run import Run
from switch_tf.data import providers, stored_vocabularies, task_catalog
from switch_tf.data.reading import reading_of
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.ops.dtypes import dtype_policy
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places, whole_file

_FEATURES = ("inputs", "targets")


def keep(folder: str | pathlib.Path, model: SwitchTransformer, run: Run, activation_dtype: str | None,
         say: Callable[[str], None]) -> None:
    """Copies the vocabularies of a run into its folder, then writes `config.json`.

    A model with a class or dtype of the user's own gets no `config.json`, nor does a task without inputs or targets:
    only the gin file describes them. A failure to write is printed and does not stop the run. A `config.json` of
    something else, such as a Hugging Face model, stays as it is.

    Args:
        folder: path of the run folder.
        model: SwitchTransformer.
        run: Run.
        activation_dtype: str or None. The ACTIVATION_DTYPE that the model's policy was derived from.
        say: function that prints a line of text.
    """
    try:
        reason = "the one there is not a run's, and stays" if run_config.is_foreign(folder) else None
        if reason is None:
            _keep(folder, model, run, activation_dtype, say)
    except (OSError, Refusal) as error:
        reason = first_line(error)
    if reason is not None:
        say(f"{folder} keeps no {run_config.FILE} of the run ({reason}), so commands on this run need its gin file, "
            "its tasks and its vocabulary.")


def _keep(folder, model, run, activation_dtype, say):
    features = providers.get_provider(run.mixture_or_task_name, run.vocabulary).output_features
    dtype = model.dtype_policy.name
    if type(model) is not SwitchTransformer or dtype not in run_config.DTYPES or not features.keys() >= set(_FEATURES):
        whole_file.remove(places.at(folder) / run_config.FILE)
        return
    if activation_dtype not in run_config.ACTIVATION_DTYPES or dtype_policy(activation_dtype) != dtype:
        activation_dtype = None
    config = model.config
    homes = {name: policies.get(name).place for name in {config.routing_policy, config.decoder_policy}}
    reading = reading_of(run.mixture_or_task_name, run.vocabulary).as_data()
    run_config.write(folder, run_config.RunConfig(
        config, dtype, activation_dtype, run.mixture_or_task_name, dict(run.task_feature_lengths), reading,
        _vocabularies(folder, features, run.vocabulary, say),
        {name: place for name, place in homes.items() if not place.startswith("switch_tf.")}))


def _vocabularies(folder, features, chosen, say):
    """Returns feature -> its vocabulary as data. Two features with one vocabulary share its file."""
    vocabularies = {}
    for feature in _FEATURES:
        vocabulary = features[feature].vocabulary
        if feature == "targets" and vocabulary == features["inputs"].vocabulary:
            vocabularies[feature] = vocabularies["inputs"]
            continue
        try:
            stored = stored_vocabularies.store(vocabulary, folder, feature, chosen)
        except stored_vocabularies.Unreadable as error:  # it was readable when the run was checked
            say(f"{error} Commands on this run will read it from there.")
            stored = stored_vocabularies.Stored(stored_vocabularies.OTHER, vocabulary.sentencepiece_model_file,
                                                vocabulary.vocab_size)
        vocabularies[feature] = stored._asdict()
    return vocabularies


def vocabulary_in_words(run: Run) -> str:
    """Returns the names of a run's vocabularies, as a user can type them, with their fingerprints."""
    features = providers.get_provider(run.mixture_or_task_name, run.vocabulary).output_features
    vocabularies = {task_catalog.fingerprint_of_vocabulary(feature.vocabulary): feature.vocabulary
                    for feature in features.values()}
    return " and ".join(f"{run.vocabulary or stored_vocabularies.name_of(vocabulary)!r} ({fingerprint})"
                        for fingerprint, vocabulary in sorted(vocabularies.items()))


def kept_vocabulary_in_words(folder: str | pathlib.Path, fingerprint: list[str]) -> str | None:
    """Returns the names of the vocabularies that a run folder keeps, with their files; None if it keeps none.

    Args:
        folder: path of a run folder.
        fingerprint: list of str, the vocabularies in a checkpoint's record.
    """
    if not run_config.is_in(folder):
        return None
    try:
        vocabularies = run_config.read(folder).vocabularies.values()
        stored = [stored_vocabularies.Stored.from_data(saved) for saved in vocabularies]
    except ValueError:  # damaged, so the checkpoint's fingerprint has to do
        return None
    names = " and ".join(repr(vocabulary.name) for vocabulary in dict.fromkeys(stored))
    files = " and ".join(dict.fromkeys(
        f"{places.at(folder) / vocabulary.file}" for vocabulary in stored if vocabulary.file))
    return f"{names} ({'; '.join(map(str, fingerprint))}{f'; the copy of the run is {files}' * bool(files)})"
