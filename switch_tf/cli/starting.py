"""Trainers of runs that gin has parsed."""

import pathlib
from collections.abc import Sequence

import gin

from switch_tf.checkpoints import vocabulary_choice
from switch_tf.configs import factories
from switch_tf.configs.experiment import Experiment
from switch_tf.configs.gin_calls import or_mistake
from switch_tf.reporting import origin

_VOCABULARY = "switch_tf.configs.run.Run.vocabulary"


def make_trainer(described: Experiment, initial_weights: str | pathlib.Path, words: Sequence[str]) -> tuple:
    """Makes the trainer of a run, with the vocabulary that its weights need.

    Args:
        described: Experiment.
        initial_weights: See `Trainer`.
        words: Arguments of `switch-tf`.

    Returns:
        (Trainer, text of its configuration).

    Raises:
        Refusal: See `Trainer`.
    """
    vocabulary = vocabulary_choice.choose(described.run)
    if vocabulary != described.run.vocabulary:
        is_macro = str(_bound(_VOCABULARY)) == "%VOCABULARY"
        gin.bind_parameter("VOCABULARY/gin.macro.value" if is_macro else _VOCABULARY, vocabulary)
    trainer = or_mistake(lambda: gin.get_configurable(factories.Trainer)(
        partitioner=described.partitioner, initial_weights=initial_weights,
        activation_dtype=_bound("ACTIVATION_DTYPE/gin.macro.value")))
    return trainer, origin.comments(words, trainer.model.config) + gin.operative_config_str()


def _bound(name):
    """Returns the value that is bound to a parameter, None if there is none."""
    try:
        return gin.query_parameter(name)
    except ValueError:
        return None
