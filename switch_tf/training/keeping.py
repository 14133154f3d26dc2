"""Writes a run's model, task and vocabularies as data, so that its folder alone is enough to use the model."""

import pathlib

from switch_tf.checkpoints import run_config
from switch_tf.configs import policies
from switch_tf.data import providers, source_fingerprints, stored_vocabularies
from switch_tf.data.reading import reading_of
from switch_tf.messages import first_line
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.ops.dtypes import dtype_policy
from switch_tf.refusals import Refusal

_FEATURES = ("inputs", "targets")


def keep(folder, model, run, activation_dtype, say) -> None:
    """Copies the vocabularies of a run into its folder, then writes `config.json`.

    A model of a class or dtype of the user's own, and a task without inputs or targets, have none: only the gin file
    describes them. What lies in the way of these files does not stop the run, and a `config.json` of something else,
    such as a Hugging Face model, is left as it is.

    Args:
        folder: path of the run folder.
        model: SwitchTransformer.
        run: Run.
        activation_dtype: str or None. The ACTIVATION_DTYPE that the model's policy was made of.
        say: function of a line of text.
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
        (pathlib.Path(folder) / run_config.FILE).unlink(missing_ok=True)
        return
    if activation_dtype not in run_config.ACTIVATION_DTYPES or dtype_policy(activation_dtype) != dtype:
        activation_dtype = None
    config = model.config
    places = {name: policies.get(name).place for name in {config.routing_policy, config.decoder_policy}}
    reading = reading_of(run.mixture_or_task_name, run.vocabulary).as_data()
    run_config.write(folder, run_config.RunConfig(
        config, dtype, activation_dtype, run.mixture_or_task_name, dict(run.task_feature_lengths), reading,
        _vocabularies(folder, features, run.vocabulary, say),
        {name: place for name, place in places.items() if not place.startswith("switch_tf.")}))


def _vocabularies(folder, features, chosen, say):
    """Feature -> its vocabulary as data; two features with one vocabulary share its file."""
    found = {}
    for feature in _FEATURES:
        vocabulary = features[feature].vocabulary
        if feature == "targets" and vocabulary == features["inputs"].vocabulary:
            found[feature] = found["inputs"]
            continue
        try:
            stored = stored_vocabularies.store(vocabulary, folder, feature, chosen)
        except stored_vocabularies.Unreadable as error:  # which was read before, or the run would not have started
            say(f"{error} Commands on this run will read it from there.")
            stored = stored_vocabularies.Stored(stored_vocabularies.OTHER, vocabulary.sentencepiece_model_file,
                                                vocabulary.vocab_size)
        found[feature] = stored._asdict()
    return found


def vocabulary_in_words(run) -> str:
    """The vocabularies of a run, by a name that a person can type."""
    features = providers.get_provider(run.mixture_or_task_name, run.vocabulary).output_features
    vocabularies = {source_fingerprints.fingerprint_of_vocabulary(one): one for one in
                    (feature.vocabulary for feature in features.values())}
    return " and ".join(f"{run.vocabulary or stored_vocabularies.name_of(one)!r} ({fingerprint})"
                        for fingerprint, one in sorted(vocabularies.items()))


def kept_vocabulary_in_words(folder, fingerprint: list) -> str | None:
    """Names the vocabularies that a run folder keeps copies of, and the copies; None if it keeps none.

    Args:
        folder: path of a run folder.
        fingerprint: list of str, what a checkpoint of the run says of its vocabularies.
    """
    if not run_config.is_in(folder):
        return None
    try:
        stored = [stored_vocabularies.Stored.from_data(one) for one in run_config.read(folder).vocabularies.values()]
    except ValueError:  # damaged; the checkpoint's own words will do
        return None
    names = " and ".join(repr(one.name) for one in dict.fromkeys(stored))
    files = " and ".join(dict.fromkeys(f"{pathlib.Path(folder) / one.file}" for one in stored if one.file))
    return f"{names} ({'; '.join(map(str, fingerprint))}{f'; the copy of the run is {files}' * bool(files)})"
