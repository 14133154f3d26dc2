"""A few examples of a task, as a model reads them, for inspection."""

from switch_tf import checks
from switch_tf.data.description import DatasetDescription, check_description
from switch_tf.data.pipeline import failure, no_global_seed, read_once
from switch_tf.data.providers import check_split, get_provider
from switch_tf.data.spelling import spell
from switch_tf.refusals import Refusal


@no_global_seed()
def examples(description: DatasetDescription, count: int) -> list[dict[str, dict]]:
    """Returns the first examples of a split, in order, each `{feature: {"text": str, "ids": list of int}}`.

    Args:
        description: DatasetDescription. Its batch size and packing do not matter.
        count: int. Largest number of examples.

    Raises:
        Refusal: The name or split is unknown, or the data are missing or cannot be read.
    """
    check_description(description)
    checks.integer("count", count, at_least=1)
    provider = get_provider(description.mixture_or_task_name, description.vocabulary)
    try:
        check_split(provider, description.split)
        dataset = read_once(provider, {
            "sequence_length": dict(description.task_feature_lengths), "split": description.split, "shuffle": False,
            "seed": description.seed, "try_in_mem_cache": False,
        })  # fmt: skip
        return [
            {name: {"text": spell(feature.vocabulary, example[name].tolist()), "ids": example[name].tolist()}
             for name, feature in provider.output_features.items() if name in example}
            for example in dataset.take(count).as_numpy_iterator()
        ]
    except Exception as error:  # from preprocessors of the user, of any kind
        raise Refusal(failure(provider, description.split, error)) from error


def describe(result: dict) -> str:
    """Returns examples as text and ids, from their task's `name`, `split`, `lengths`, `vocabulary_size`, `examples`."""
    lines = [f"{result['name']}, split {result['split']}, at most {result['lengths']} tokens of "
             f"{result['vocabulary_size']}"]
    for number, example in enumerate(result["examples"], 1):
        for feature, shown in example.items():
            lines += [f"{number}. {feature}: {shown['text']}", f"   {' '.join(map(str, shown['ids']))}"]
    return "\n".join(lines)
