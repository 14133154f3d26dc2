"""`mc4_span_corruption`: mT5's pretraining mixture (arXiv 2010.11934), one task per language of mC4.

The data are `c4/multilingual:3.1.0`, the version that tensorflow-datasets 4.9.10 can prepare. The task of a language
is `mc4_span_corruption.sw`; a hyphen in its code becomes an underscore, as in `mc4_span_corruption.zh_Latn`.
"""

import functools
from collections.abc import Sequence

import seqio
from tensorflow_datasets.text import c4

from switch_tf.tasks import prepared_tfds, preprocessors, vocabularies

# A language with n documents is drawn in proportion to n ** 0.3, so that small ones are seen more than their share.
RATE_EXPONENT = 0.3


def add_mixture(
    name: str, languages: Sequence[str], vocabulary: seqio.Vocabulary, tfds_name: str = "c4/multilingual:3.1.0"
) -> None:
    """Registers a mixture of mC4's languages and, as `{name}.{language}`, the tasks in it.

    Args:
        name: str. Name of the mixture.
        languages: mC4's codes of the languages, for example `["en", "zh-Latn"]`.
        vocabulary: vocabulary of inputs and targets.
        tfds_name: str. The prepared data set, with splits `en` and `en-validation` for every language.
    """
    tasks = [f"{name}.{language.replace('-', '_')}" for language in languages]
    for task, language in zip(tasks, languages, strict=True):
        splits = {"train": language, "validation": f"{language}-validation"}
        seqio.TaskRegistry.add(
            task,
            source=prepared_tfds.PreparedTfdsSource(tfds_name, splits),
            preprocessors=preprocessors.pretraining(preprocessors.span_corruption),
            output_features=preprocessors.output_features(vocabulary),
            metric_fns=[],
        )
    rate = functools.partial(seqio.mixing_rate_num_examples, temperature=1 / RATE_EXPONENT)
    seqio.MixtureRegistry.add(name, tasks, default_rate=rate)


add_mixture("mc4_span_corruption", c4.MC4_LANGUAGES, vocabularies.mt5())
