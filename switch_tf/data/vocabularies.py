"""seqio, imported on demand, with its tasks, mixtures and vocabularies.

A run folder's vocabulary is not trusted: the file must lie in the folder, have a vocabulary's size, and match the hash.
"""

import copy
import dataclasses
import functools
import hashlib
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import sentencepiece
import tensorflow as tf

from switch_tf import checks, context
from switch_tf.configs import names
from switch_tf.configs.choices import check_choice, nearest
from switch_tf.hardware import devices
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places
from switch_tf.storage.whole_file import write_whole, writing

if TYPE_CHECKING:
    import seqio

_OF_TPU = "tpu,cpu"  # JAX's default on a TPU VM
# Sentinels replace spans in span corruption. They are the last ids of a vocabulary, <extra_id_0> the very last.
NUM_SENTINELS = 100
_FOLDER = "vocabulary"
_FILE = re.compile(rf"{_FOLDER}/[a-z]+\.model")
_LARGEST_FILE = 256 * 2**20  # bytes; mT5's has 4 MB
_MOST_EXTRA_IDS = 10_000  # seqio adds them one by one
SENTENCEPIECE, BYTES, OTHER = "sentencepiece", "bytes", "other"


def import_seqio() -> Any:
    """Returns seqio. Its metrics take no accelerator."""
    keep_jax_on_cpu()
    import seqio  # only after the line above

    return seqio


def keep_jax_on_cpu() -> None:
    """Keeps seqio's JAX metrics from taking the accelerator that TensorFlow trains on.

    Has no effect if Keras or the back end runs on JAX, or if JAX_PLATFORMS is set.
    """
    if keras.config.backend() != "tensorflow" or devices.are_jax():
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax = sys.modules.get("jax")  # TensorFlow imports it before the variable is set
    if jax is not None and jax.config.jax_platforms in (None, "", _OF_TPU):
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def num_sentinels(vocabulary: "seqio.Vocabulary") -> int:
    """Returns the number of sentinels at the end of a vocabulary."""
    if vocabulary.extra_ids:
        return vocabulary.extra_ids
    last = vocabulary.decode([vocabulary.vocab_size - 1])
    return NUM_SENTINELS if isinstance(last, str) and last.strip() == "<extra_id_0>" else 0


def get_vocabulary(name: str) -> "seqio.Vocabulary":
    """Returns the seqio vocabulary of a name or path, always the same object.

    Args:
        name: A registered name, or the path of a SentencePiece model here or at gs://. A file without sentinels gets
            100. In any other file they must be the last ids, as in mT5's.
    """
    checks.text("VOCABULARY", name)
    make = names.vocabularies().get(name)
    return make() if make else _open_vocabulary(name)


@functools.cache
def _open_vocabulary(path):
    registered = names.vocabularies()
    try:
        content = _read(path)
    except (tf.errors.OpError, UnicodeError) as error:
        reason = "there is no such file" if isinstance(error, tf.errors.NotFoundError) else first_line(error)
        raise Refusal(f"VOCABULARY {path!r} is no registered vocabulary "
                         f"({', '.join(sorted(registered)) or 'none is registered'}), and no SentencePiece model that "
                         f"can be read: {reason}.{nearest(path, registered)}") from error
    num_extra = 0 if _holds_sentinels(path, _pieces(path, content)) else NUM_SENTINELS
    return import_seqio().SentencePieceVocabulary(path, num_extra)


def _read(path):
    with tf.io.gfile.GFile(path, "rb") as file:
        return file.read()


def _pieces(path, content):
    """Padding must be id 0, because models mask it."""
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_proto=content) if content else None
    except RuntimeError:  # SentencePiece's message names its own source file
        pieces = None
    if not pieces or not pieces.get_piece_size():
        raise Refusal(f"VOCABULARY {path!r} is no SentencePiece model, or a damaged one; `switch-tf vocabulary` trains "
                      "one, and files of other kinds (vocab.txt) do not serve. A tokenizer.json becomes one with the "
                      "weights beside it: `switch-tf convert --input FOLDER --output NEW` writes NEW/spiece.model.")
    if pieces.pad_id() != 0 or pieces.eos_id() < 1:
        special = ", ".join(f"{name} {pieces.piece_to_id(name)}" for name in ("<unk>", "<s>", "</s>", "<pad>")
                            if pieces.id_to_piece(pieces.piece_to_id(name)) == name)
        raise Refusal(f"A vocabulary needs padding at id 0 and an end of sequence, and VOCABULARY {path!r} has "
                      f"{special or 'neither'}; `switch-tf vocabulary` trains one that fits.")
    return pieces


def _holds_sentinels(path, pieces):
    size, held = pieces.get_piece_size(), {}
    for number in (0, NUM_SENTINELS - 1):
        ids = [pieces.piece_to_id(f"{start}<extra_id_{number}>") for start in ("▁", "")]
        held[number] = next((id_ for id_ in ids if id_ != pieces.unk_id()), None)
    if held[0] is None:
        return False
    if held != {0: size - 1, NUM_SENTINELS - 1: size - NUM_SENTINELS}:
        raise Refusal(f"VOCABULARY {path!r} holds <extra_id_0> as id {held[0]} of {size}; sentinels have to be the "
                      f"last {NUM_SENTINELS} ids, <extra_id_0> the very last. Use the file without any, to which "
                      "they are added.")
    return True


class Unreadable(Refusal):
    """An unreadable vocabulary file, in one sentence."""


class Stored(NamedTuple):
    """A vocabulary in a run's `config.json`.

    `kind`: "sentencepiece" with a `file`, "bytes", or "other", made by code.
    `name`: A registered name or a path.
    `size`: Number of ids, sentinels included.
    `extra_ids`: Number of sentinels that seqio adds.
    `file`, `sha256`: The copy, relative to the run folder, and its hash.
    """

    kind: str
    name: str
    size: int
    extra_ids: int = 0
    file: str | None = None
    sha256: str | None = None

    @classmethod
    def from_data(cls, data: dict) -> "Stored":
        """Returns the description in parsed JSON."""
        if not isinstance(data, dict) or not {"kind", "name", "size"} <= data.keys() <= set(cls._fields):
            raise Refusal(f"a vocabulary needs the keys {', '.join(cls._fields)}, not {checks.shown(data)}")
        stored = cls(**data)
        check_choice("the kind of a vocabulary", stored.kind, (SENTENCEPIECE, BYTES, OTHER))
        checks.text("the name of a vocabulary", stored.name)
        checks.integer("the size of a vocabulary", stored.size, 1)
        checks.integer("extra_ids of a vocabulary", stored.extra_ids, 0)
        if stored.extra_ids > min(stored.size, _MOST_EXTRA_IDS):
            raise Refusal(f"extra_ids of a vocabulary of {stored.size} ids must be at most "
                          f"{min(stored.size, _MOST_EXTRA_IDS)}, not {stored.extra_ids}")
        expected = str if stored.kind == SENTENCEPIECE else type(None)
        if not isinstance(stored.file, expected) or not isinstance(stored.sha256, expected):
            raise Refusal(f"a vocabulary of kind {SENTENCEPIECE}, and no other, has a file and its sha256")
        return stored


def store(vocabulary: "seqio.Vocabulary", folder: Any, feature: str, name: str | None = None) -> Stored:
    """Copies a vocabulary into a run folder.

    Args:
        feature: "inputs" or "targets".
        name: The run's VOCABULARY, or None.

    Raises:
        Unreadable: The vocabulary's own file can no longer be read.
    """
    name, seqio = name or name_of(vocabulary), import_seqio()
    if type(vocabulary) is seqio.ByteVocabulary:
        return Stored(BYTES, name, vocabulary.vocab_size, vocabulary.extra_ids)
    is_made_of_its_file = type(vocabulary) is seqio.SentencePieceVocabulary and (  # and its number of sentinels
        {**vocabulary.__getstate__(), "_use_fast_tokenizer": False} == seqio.SentencePieceVocabulary(
            vocabulary.sentencepiece_model_file, vocabulary.extra_ids).__getstate__())
    if not is_made_of_its_file:
        return Stored(OTHER, name, vocabulary.vocab_size)
    path = vocabulary.sentencepiece_model_file
    try:
        content = _read(path)
    except tf.errors.OpError as error:
        raise Unreadable(f"The vocabulary {path} could not be copied into {folder} ({first_line(error)}).") from error
    target = folder / _FOLDER / f"{feature}.model"
    with writing(target.parent):
        target.parent.mkdir(exist_ok=True)
    write_whole(target, content)
    return Stored(SENTENCEPIECE, name, vocabulary.vocab_size, vocabulary.extra_ids,
                  f"{_FOLDER}/{feature}.model", hashlib.sha256(content).hexdigest())


def load(stored: Stored, folder: Any) -> "seqio.Vocabulary":
    """Returns the vocabulary of a run folder, the same object for the same file."""
    if stored.kind == BYTES:
        vocabulary = import_seqio().ByteVocabulary(stored.extra_ids)
        if vocabulary.vocab_size != stored.size:
            raise Refusal(f"A vocabulary of bytes with {stored.extra_ids} sentinels has {vocabulary.vocab_size} "
                          f"ids, and config.json in {folder} gives it {stored.size}.")
        return vocabulary
    if stored.kind == OTHER:
        raise Refusal(f"The vocabulary {stored.name!r} of {folder} is made by code, which {folder} cannot hold.")
    return _open_copy(path_of(stored, folder), stored.extra_ids, stored.size)


def path_of(stored: Stored, folder: Any) -> Any:
    """Returns the verified SentencePiece file in a run folder."""
    path = folder / stored.file
    if not _FILE.fullmatch(stored.file) or path.is_symlink() or path.parent.is_symlink():
        raise Refusal(f"config.json in {folder} must name a file in the folder {_FOLDER!r} beside it that is no "
                      f"link, not {checks.shown(stored.file)}.")
    try:
        content = places.content(path, _LARGEST_FILE)
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}, the vocabulary that the run copied from {checks.shown(stored.name)}, cannot be read "
                      f"({getattr(error, 'strerror', None) or error}); copy it from the place where the run folder "
                      "came from.") from error
    if hashlib.sha256(content).hexdigest() != stored.sha256:
        raise Refusal(f"{path} is not the vocabulary that the run copied from {checks.shown(stored.name)}: its "
                      "SHA-256 differs from the one in config.json. Copy it again.")
    return path


def choice_of(stored: Stored, folder: Any) -> str | None:
    """Returns the VOCABULARY that selects a run folder's vocabulary, or None."""
    if stored.kind == OTHER:
        return None
    choice = str(path_of(stored, folder)) if stored.kind == SENTENCEPIECE else stored.name
    if stored.kind == BYTES and choice not in names.vocabularies():
        return None
    chosen = get_vocabulary(choice)
    return choice if (chosen.vocab_size, chosen.extra_ids) == (stored.size, stored.extra_ids) else None


def name_of(vocabulary: "seqio.Vocabulary") -> str:
    """Returns the name or path that selects a vocabulary, or else its class."""
    for name, make in names.vocabularies().items():
        try:
            if make() is vocabulary:
                return name
        except Exception:  # a failing function of the user makes another vocabulary
            continue
    if type(vocabulary) is import_seqio().ByteVocabulary:
        return BYTES
    return getattr(vocabulary, "sentencepiece_model_file", type(vocabulary).__name__)


@functools.cache
def _open_copy(path, extra_ids, size):
    pieces = _pieces(str(path), path.read_bytes())
    if pieces.get_piece_size() + extra_ids != size:
        raise Refusal(f"{path} has {pieces.get_piece_size()} pieces, and config.json says {size - extra_ids}.")
    return import_seqio().SentencePieceVocabulary(str(path), extra_ids)


def vocabulary_size(mixture_or_task_name: str, vocabulary: str | None = None) -> int:
    """Returns the number of ids of a task's vocabulary, sentinels included."""
    vocabularies = vocabularies_of(get_provider(mixture_or_task_name, vocabulary))
    try:
        return max(vocabulary.vocab_size for vocabulary in vocabularies)
    except Exception as error:  # of SentencePiece, protobuf or TensorFlow
        paths = {str(getattr(vocabulary, "sentencepiece_model_file", "")) for vocabulary in vocabularies}
        raise Refusal(
            f"The vocabulary of {mixture_or_task_name!r}, {', '.join(sorted(paths))}, cannot be read "
            f"({type(error).__name__}); it has to be a SentencePiece model, and a gs:// path needs network access to "
            "Google Cloud Storage."
        ) from error


def vocabularies_of(provider: "seqio.Task | seqio.Mixture") -> list:
    """Returns the vocabularies of a task's or mixture's features."""
    return [feature.vocabulary for feature in provider.output_features.values()]


def target_vocabulary(mixture_or_task_name: str, vocabulary: str | None = None) -> "seqio.Vocabulary":
    """Returns the seqio vocabulary of a task's or mixture's targets."""
    return get_provider(mixture_or_task_name, vocabulary).output_features["targets"].vocabulary


def tasks_of(provider: "seqio.Task | seqio.Mixture", split: str) -> list:
    """Returns the task, or a mixture's tasks, that have a split."""
    check_split(provider, split)
    return [task for task in getattr(provider, "tasks", [provider]) if split in task.splits]


def check_vocabulary(mixture_or_task_name: str, vocab_size: int, vocabulary: str | None = None) -> None:
    """Refuses a model without an embedding for every token of the task.

    Args:
        vocab_size: Rows of the model's embedding.
    """
    checks.integer("vocab_size", vocab_size, at_least=1)
    needed = vocabulary_size(mixture_or_task_name, vocabulary)
    if vocab_size < needed:
        chosen = f" with VOCABULARY {vocabulary!r}" if vocabulary else ""
        raise Refusal(
            f"The model has vocab_size {vocab_size}, but {mixture_or_task_name!r}{chosen} has token ids up to "
            f"{needed - 1}; set SwitchConfig.vocab_size to at least {needed}, or choose a smaller vocabulary."
        )


def all_names() -> list[str]:
    """Returns the sorted names of all tasks and mixtures."""
    seqio = import_seqio()
    return sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})


def check_task(name: str) -> None:
    """Registers a declared task. Refuses an unknown name or a missing package."""
    names.check_task(name)
    names.register_task(name)
    known = all_names()
    if name not in known:
        mixture = name.partition(".")[0]
        members = [member for member in known if member.startswith(f"{mixture}.")]
        raise Refusal(f"No task or mixture is called {name!r}.{nearest(name, [mixture, *members])}")


def check_split(provider: "seqio.Task | seqio.Mixture", split: str) -> None:
    """Refuses a split that a task or mixture lacks."""
    splits = sorted(provider.splits)
    if split not in splits:
        raise Refusal(f"{provider.name!r} has the splits {', '.join(splits)}, received {split!r}.")


def get_provider(name: str, vocabulary: str | None = None) -> "seqio.Task | seqio.Mixture":
    """Returns a seqio task or mixture.

    Args:
        vocabulary: Name or path that replaces the task's vocabulary, see `get_vocabulary`. The registered task stays
            unchanged. A source of ids takes no other vocabulary.
    """
    check_task(name)
    provider = import_seqio().get_mixture_or_task(name)
    if vocabulary is None:
        return provider
    new = get_vocabulary(vocabulary)

    def change(task):
        features = {name: dataclasses.replace(feature, vocabulary=new) if _is_text(feature) else feature
                    for name, feature in task.output_features.items()}
        if features == dict(task.output_features) and new not in vocabularies_of(task):
            raise Refusal(f"{task.name!r} has ids from its source, not text, so it takes no other VOCABULARY.")
        return task.replace(output_features=features)

    return replace_tasks(provider, change)


def _is_text(feature):
    seqio = import_seqio()
    return type(feature) is seqio.Feature and not isinstance(feature.vocabulary, seqio.PassThroughVocabulary)


def text_vocabularies_of(name: str) -> list:
    """Returns the vocabularies of features that come as text."""
    return [feature.vocabulary for feature in get_provider(name).output_features.values() if _is_text(feature)]


def replace_tasks(provider: "seqio.Task | seqio.Mixture", change: Callable) -> "seqio.Task | seqio.Mixture":
    """Returns a changed task, or a mixture of changed tasks. The registered one stays unchanged.

    Args:
        change: Function from a seqio.Task to another of the same name.
    """
    seqio, made = import_seqio(), {}

    def replaced(provider):  # each once
        if provider.name not in made and isinstance(provider, seqio.Mixture):
            rates = [(replaced(provider._task_map[name]), rate) for name, rate in provider.rate_per_task_name.items()]
            made[provider.name] = seqio.Mixture(provider.name, rates, sample_fn=provider._sample_fn)
        elif provider.name not in made:
            made[provider.name] = change(provider)
        return made[provider.name]

    return replaced(provider)


def passes(one_pass: Callable[[tf.Tensor], tf.data.Dataset], seed: int | None) -> tf.data.Dataset:
    """Returns the examples of a source in a new order in each pass.

    TensorFlow's `rerandomize_each_iteration` and `reshuffle_each_iteration` lose the number of the repetition if a
    position is saved while prefetched examples span two, so a resumed run would read other examples. Here every
    position holds the number of the pass.

    Args:
        one_pass: Function of a key, <int64>[2] from 0, to all examples in an order that depends only on the key.
        seed: None for a random order.

    Returns: Endless passes, each with its own key, for a training run. Otherwise one pass, with a new key in each
        repetition.
    """
    one_pass = tf.autograph.experimental.do_not_convert(one_pass)  # conversion would take seconds
    if not context.current().endless_passes or seed is None:
        keys = tf.data.Dataset.random(seed, rerandomize_each_iteration=True)
        return keys.batch(2, drop_remainder=True).take(1).flat_map(one_pass)

    def numbered(number):
        return one_pass(tf.random.stateless_uniform(
            [2], tf.stack([tf.constant(seed, tf.int64), number]), 0, tf.int64.max, tf.int64))

    return tf.data.Dataset.counter().flat_map(tf.autograph.experimental.do_not_convert(numbered))


def read_part(source: Any, split: str, index: int, count: int, seed: int | None = None) -> tf.data.Dataset:
    """Returns a part of a seqio source, in order, as seqio divides it: some files, or every n-th example."""
    is_split = source.supports_arbitrary_sharding or len(source.list_shards(split)) >= count
    part = import_seqio().ShardInfo(index, count) if is_split and count > 1 else None
    examples = source.get_dataset(split=split, shuffle=False, seed=seed, shard_info=part)
    return examples if is_split else examples.shard(count, index)


def count_passes(task: Any, seed: int) -> Any:
    """Returns a seqio task that reads its source in the order of `seed`. The seed from seqio sets only the noise.

    Where seqio itself reads files, each pass has a new order of them. Other sources use `passes`, have a fixed order,
    or shuffle in a way that no position can hold (a function, or TFDS).
    """
    source = task.source
    is_of_files = isinstance(source, import_seqio().FileDataSource)

    def get_dataset(split, shard_info=None, **arguments):
        if not is_of_files:
            return source.get_dataset(split, shard_info=shard_info, **arguments | {"seed": seed})
        files = sorted(source.list_shards(split))
        files = files[shard_info.index::shard_info.num_shards] if shard_info else files

        def one_pass(key):
            order = tf.random.experimental.stateless_shuffle(tf.constant(files), seed=key)
            return tf.data.Dataset.from_tensor_slices(order).interleave(
                source._reader, cycle_length=source._cycle_length, block_length=source._block_length,
                num_parallel_calls=tf.data.AUTOTUNE)

        return passes(one_pass, seed)

    counting = copy.copy(source)
    counting.get_dataset = get_dataset
    return task.replace(source=counting)
