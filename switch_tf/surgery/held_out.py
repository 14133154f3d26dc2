"""The loss of a model, and the use of its experts, on held-out examples of its run."""

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from switch_tf import data
from switch_tf.configs.experiment import Experiment
from switch_tf.evaluation import held_out_loss
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.refusals import Refusal
from switch_tf.reporting import progress


class HeldOut(NamedTuple):
    """Measurements of a model.

    Attributes:
        loss: Cross-entropy over target tokens, in nats.
        use: Name of a router -> <float64>[num_experts], share of the tokens that choose each expert first.
    """

    loss: float
    use: dict[str, np.ndarray]


def batches_of(described: Experiment) -> Iterable[dict]:
    """Returns the validation batches of a run, at most `Run.eval_batches`, which stay in memory.

    Raises:
        Refusal: The task is unknown, or takes another vocabulary than the model's.
    """
    run, config = described.run, described.config
    data.check_task(run.mixture_or_task_name)
    data.check_vocabulary(run.mixture_or_task_name, config.vocab_size, run.vocabulary)
    return data.get_dataset(_description(described)).take(run.eval_batches).cache()


def _description(described):
    return data.description_of_data(described.run, described.config, "validation", 0)


def measure(model: SwitchTransformer, batches: Iterable[dict], described: Experiment, name: str) -> HeldOut:
    """Measures a model without dropout or jitter, with the configuration's evaluation capacity factor.

    Args:
        model: SwitchTransformer, built.
        batches: From `batches_of`.
        described: Experiment on one device.
        name: Name of the model in the progress.

    Raises:
        Refusal: There is no example.
    """
    step = held_out_loss.compile_evaluation(model, described.settings, described.partitioner)
    with warnings.catch_warnings(), progress.bar(described.run.eval_batches, f"evaluating {name}", " batches") as bar:
        warnings.filterwarnings("ignore", "You are using a softmax over axis")  # by Keras, of a single expert
        with data.refusing_bad_rows(_description(described)):
            measured = held_out_loss.evaluate(step, _counted(batches, bar))
    if measured is None:
        raise Refusal(f"Split 'validation' of {described.run.mixture_or_task_name!r} has no example to measure the use "
                      "of experts on.")
    loss = measured.loss_terms["cross_entropy"]
    return HeldOut(float(loss.total / (loss.weight or 1.0)), {
        router: stats.expert_load.total / (stats.expert_load.weight or 1.0)
        for router, stats in measured.routers.items()})


def _counted(batches, bar):
    for batch in batches:
        yield batch
        bar.update()
