"""The reading of texts of a task, the same in training, evaluation, inference, serving and exported programs."""

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from switch_tf import checks
from switch_tf.configs.choices import check_choice
from switch_tf.data.spelling import SENTINELS, read_text
from switch_tf.data.vocabularies import get_provider
from switch_tf.refusals import Refusal

if TYPE_CHECKING:
    import seqio

_DECLARATION = "typed_sentinels"
# T5's objectives with gaps in their inputs.
_OBJECTIVES = {f"t5.data.preprocessors.{name}" for name in ("denoise", "iid_denoising", "span_corruption",
                                                            "unsupervised")}
# seqio's steps that append the end of sequence -> whether it stays at the end of a text that is cut.
_APPENDING = {"seqio.preprocessors.append_eos_after_trim": True, "seqio.preprocessors.append_eos": False,
              "seqio.preprocessors.tokenize_and_append_eos": False}
_KNOWN_PACKAGES = {"seqio", "switch_tf", "t5"}


@dataclasses.dataclass(frozen=True)
class Reading:
    """The conventions by which texts of a task become ids.

    Args:
        inputs, targets: seqio vocabularies.
        inputs_end, targets_end: bool. Whether the end of sequence follows.
        prefix: str. Put before inputs.
        sentinels: str. The meaning of a typed `<extra_id_0>`. "gaps": the sentinel of removed tokens. "spelt_out":
            text, in ordinary pieces. "as_tokenized": the ids that the vocabulary gives it.
        keeps_end: bool. Whether a text that is cut keeps its end of sequence, as after seqio's `append_eos_after_trim`.
        fields: tuple of two str or int. Keys or column numbers of inputs and targets in files of the task.

    Raises:
        Refusal: A value has another type or range.
    """

    inputs: Any
    targets: Any
    inputs_end: bool = True
    targets_end: bool = True
    prefix: str = ""
    sentinels: str = "gaps"
    keeps_end: bool = True
    fields: tuple[str | int, str | int] = ("inputs", "targets")

    def __post_init__(self):
        checks.fields(self, ("inputs_end", "targets_end", "keeps_end"), checks.flag)
        # JSON may hold half of a surrogate pair, which no vocabulary reads.
        if not isinstance(self.prefix, str) or re.search("[\ud800-\udfff]", self.prefix):
            raise Refusal(f"The prefix must be text, not {checks.shown(self.prefix)}.")
        check_choice("sentinels", self.sentinels, SENTINELS)
        if not (isinstance(self.fields, tuple) and len(self.fields) == 2 and all(map(_is_field, self.fields))):
            raise Refusal(f"fields must be two names or numbers of columns, not {checks.shown(self.fields)}.")

    def as_data(self) -> dict:
        """Returns the record without its vocabularies, JSON-able."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[2:]}
        return {**values, "fields": list(self.fields)}

    @classmethod
    def from_data(cls, data: Mapping, inputs_vocabulary: "seqio.Vocabulary",
                  targets_vocabulary: "seqio.Vocabulary") -> "Reading":
        """Returns the record of a result of `as_data`.

        Raises:
            Refusal: A key is missing or unknown, or a value has another type or range.
        """
        names = [field.name for field in dataclasses.fields(cls)[2:]]
        if not isinstance(data, Mapping) or sorted(data) != sorted(names):
            raise Refusal(f"A reading must have the keys {', '.join(names)}, received {checks.shown(data)}.")
        fields = data["fields"]
        return cls(inputs_vocabulary, targets_vocabulary,
                   **{**data, "fields": tuple(fields) if isinstance(fields, list) else fields})

    def raw(self) -> "Reading":
        """Returns the reading without a prefix and with typed sentinels as gaps."""
        return dataclasses.replace(self, prefix="", sentinels="gaps")

    def read(self, text: str, length: int) -> tuple[list[int], int]:
        """Returns the ids of an input, at most `length`, and the number of ids that were cut."""
        return self._cut(self.inputs, self.prefix + text, length, self.inputs_end)

    def read_target(self, text: str, length: int) -> tuple[list[int], int]:
        """Returns the same for a target, which has no prefix."""
        return self._cut(self.targets, text, length, self.targets_end)

    def _cut(self, vocabulary, text, length, has_end):
        ids = read_text(vocabulary, text, self.sentinels)
        if not ids:
            return [], 0
        end = [vocabulary.eos_id] * has_end
        num_cut = max(0, len(ids) + len(end) - length)
        if self.keeps_end:
            return [*ids[:length - len(end)], *end], num_cut
        return [*ids, *end][:length], num_cut


def _is_field(field):
    return isinstance(field, str) or type(field) is int and field >= 0


def typed_sentinels(meaning: str) -> Callable:
    """Returns a decorator that declares the meaning of a typed `<extra_id_0>` for a preprocessor.

    The last declaration among a task's preprocessors counts. The default is "as_tokenized".

    Args:
        meaning: See `Reading.sentinels`.

    Raises:
        Refusal: The meaning is unknown.
    """
    check_choice("The typed_sentinels of a preprocessor", meaning, SENTINELS)

    def declare(step):
        setattr(step, _DECLARATION, meaning)
        return step

    return declare


def reading_of(mixture_or_task_name: str, vocabulary: str | None = None) -> Reading:
    """Returns the Reading of a task or mixture; `vocabulary` as for `get_provider`.

    `prefix` and `fields` are attributes of the task's source, such as `TextFilesSource`. The preprocessors declare the
    meaning of sentinels. A mixture has the values that all of its tasks share. If prefixes or sentinels differ, a note
    is printed to standard error, and texts are read without a prefix, or with typed sentinels as gaps.

    Raises:
        Refusal: The name is unknown, or the task has no inputs or no targets.
    """
    provider = get_provider(mixture_or_task_name, vocabulary)
    features = provider.output_features
    for name in ("inputs", "targets"):
        if name not in features:
            raise Refusal(f"Task {mixture_or_task_name!r} has no {name!r}, so it answers no texts; its features are "
                          f"{', '.join(sorted(features))}.")
    first, *others = conventions = [_conventions(task) for task in getattr(provider, "tasks", [provider])]
    has_end = any(task.pop("has_end") for task in conventions)
    agreed = {name: value for name, value in first.items() if all(other[name] == value for other in others)}
    differ = [words for name, words in (("prefix", "prefixes"), ("sentinels", "readings of <extra_id_0>"))
              if name not in agreed]
    if differ:
        print(f"The tasks of {mixture_or_task_name!r} have different {' and '.join(differ)}. Texts are read with "
              "what all tasks agree on; otherwise without a prefix, and with <extra_id_0> as a gap.",
              file=sys.stderr, flush=True)
    inputs, targets = features["inputs"], features["targets"]
    return Reading(inputs.vocabulary, targets.vocabulary, inputs.add_eos and has_end, targets.add_eos and has_end,
                   **agreed)


def _conventions(task):
    """Returns the fields of a Reading that a task decides, and `has_end`, whether its steps append ends."""
    sentinels, keeps_end, is_known = "as_tokenized", None, True
    for given in task.preprocessors:
        step = given
        # Without bound arguments and wrappers, or the outermost one with a declaration.
        while not hasattr(step, _DECLARATION) and (
                inner := step.func if isinstance(step, functools.partial) else getattr(step, "__wrapped__", None)):
            step = inner
        origin = f"{getattr(step, '__module__', None)}.{getattr(step, '__name__', None)}"
        is_known &= origin.partition(".")[0] in _KNOWN_PACKAGES
        sentinels = getattr(step, _DECLARATION, "gaps" if origin in _OBJECTIVES else sentinels)
        if origin in _APPENDING:
            keeps_end = _APPENDING[origin]
        elif isinstance(given, functools.partial) and given.keywords.get("with_eos"):  # seqio's `tokenize`
            keeps_end = False
    fields = getattr(task.source, "fields", None)
    fields = fields if isinstance(fields, Mapping) else {}  # in a source of the user it may have another meaning
    # An unknown step may append the end as well.
    return {"prefix": getattr(task.source, "prefix", ""), "sentinels": sentinels, "keeps_end": keeps_end is not False,
            "has_end": keeps_end is not None or not is_known,
            "fields": (fields.get("inputs", "inputs"), fields.get("targets", "targets"))}
