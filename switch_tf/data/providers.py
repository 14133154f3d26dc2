"""The seqio tasks and mixtures behind names, and what can be asked of them without reading their data."""

import difflib
import os
import sys

import keras

from switch_tf import checks


def vocabulary_size(mixture_or_task_name: str) -> int:
    """Returns the number of ids that the vocabulary of a task or mixture has, sentinels included.

    Raises:
        ValueError: an unknown name, or a vocabulary that cannot be read.
    """
    vocabularies = vocabularies_of(get_provider(mixture_or_task_name))
    try:
        return max(vocabulary.vocab_size for vocabulary in vocabularies)
    except Exception as error:  # SentencePiece, protobuf and TensorFlow each have their own
        paths = {str(getattr(vocabulary, "sentencepiece_model_file", "")) for vocabulary in vocabularies}
        raise ValueError(
            f"The vocabulary of {mixture_or_task_name!r}, {', '.join(sorted(paths))}, cannot be read "
            f"({type(error).__name__}); it has to be a SentencePiece model, and a gs:// path needs network access to "
            "Google Cloud Storage."
        ) from error


def vocabularies_of(provider) -> list:
    """Returns the vocabularies of the features of a task or mixture."""
    return [feature.vocabulary for feature in provider.output_features.values()]


def tasks_of(provider, split: str) -> list:
    """Returns the tasks that a split is read from: the task itself, or those of a mixture that have the split."""
    return [task for task in getattr(provider, "tasks", [provider]) if split in task.splits]


def check_vocabulary(mixture_or_task_name: str, vocab_size: int) -> None:
    """Refuses a model that has no embedding for some token of the task.

    Args:
        mixture_or_task_name: str. A registered seqio task or mixture.
        vocab_size: int. Rows of the model's embedding.

    Raises:
        ValueError: the task's vocabulary is larger.
    """
    checks.integer("vocab_size", vocab_size, at_least=1)
    needed = vocabulary_size(mixture_or_task_name)
    if vocab_size < needed:
        raise ValueError(
            f"The model has vocab_size {vocab_size}, but {mixture_or_task_name!r} has token ids up to {needed - 1}; "
            f"set SwitchConfig.vocab_size to at least {needed}, or choose a task with a smaller vocabulary."
        )


def check_task(name: str) -> None:
    """Refuses a name that no task and no mixture has.

    Raises:
        ValueError: names the nearest registered ones.
    """
    checks.text("The name of a task or mixture", name)
    seqio = import_seqio()
    known = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
    if name in known:
        return
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"the nearest are {', '.join(nearest)}" if nearest else f"registered are {', '.join(known) or 'none'}"
    raise ValueError(
        f"No task or mixture is called {name!r}: {hint}; tasks are registered by the module that a gin file imports, "
        "for example --gin_file=gin/tasks/docs_corpus.gin."
    )


def check_split(provider, split: str) -> None:
    """Refuses a split that a task or mixture does not have."""
    splits = sorted(provider.splits)
    if split not in splits:
        raise ValueError(f"{provider.name!r} has the splits {', '.join(splits)}, received {split!r}.")


def get_provider(name: str):
    """Returns the seqio task or mixture of that name."""
    check_task(name)
    return import_seqio().get_mixture_or_task(name)


def import_seqio():
    """Returns seqio, imported so that its metrics take no accelerator."""
    keep_jax_on_cpu()
    import seqio

    return seqio


def keep_jax_on_cpu() -> None:
    """Keeps seqio's metrics, which run on JAX, from taking the accelerator that TensorFlow trains on.

    Does nothing where Keras itself runs on JAX, or where JAX_PLATFORMS is set.
    """
    if keras.config.backend() != "tensorflow":
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax = sys.modules.get("jax")  # TensorFlow imports it, before anyone could set the variable
    if jax is not None and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
