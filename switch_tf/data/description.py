"""The description of batches: two readers with the same description read the same."""

import dataclasses
from collections.abc import Mapping

from switch_tf import checks
from switch_tf.configs.run import Run
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal

FEATURES = ("inputs", "targets")


@dataclasses.dataclass(frozen=True)
class DatasetDescription:
    """A task and the form of its batches, as `get_dataset` reads them.

    Args:
        mixture_or_task_name: str. A registered seqio task or mixture.
        task_feature_lengths: Tokens of a sequence, for example `{"inputs": 512, "targets": 114}`.
        batch_size: int. Sequences in the global batch.
        split: str. A split of the task. "train" is shuffled and repeated forever, any other split is read once, in
            order.
        seed: int. Fixes the order and the noise.
        pack: bool. Several examples per sequence, separated by segment ids.
        encoder_only: bool. Features for an encoder without a decoder: inputs in which the last id of the vocabulary
            masks tokens, and targets of the same length.
        vocabulary: str or None. Replaces the task's vocabulary: the name of a registered one, or the path of a
            SentencePiece model, see `get_vocabulary`.
        use_cached_tasks: bool. Read the tokens of `switch-tf cache` instead of text, see `cached_tasks.py`.
        cache_dir: str or None. Folder of the cache. None means `cache_manifest.default_folder()`.
        cache_parts: int. Number of parts of a training batch from the cache, which processes can read separately.
            Another number gives other batches.
        skip_corrupt_records: int. Number of corrupt records to leave out of each cached task and part.

    Raises:
        Refusal: The batch has no sequences, or no model can use the lengths.
    """

    mixture_or_task_name: str
    task_feature_lengths: Mapping[str, int]
    batch_size: int
    split: str = "train"
    seed: int = 0
    pack: bool = False
    encoder_only: bool = False
    vocabulary: str | None = None
    use_cached_tasks: bool = False
    cache_dir: str | None = None
    cache_parts: int = 1
    skip_corrupt_records: int = 0

    def __post_init__(self):
        checks.fields(self, ("mixture_or_task_name", "split"), checks.text)
        object.__setattr__(self, "batch_size", checks.integer("BATCH_SIZE", self.batch_size, 1))
        object.__setattr__(self, "seed", checks.integer("SEED", self.seed, 0))
        checks.fields(self, ("pack", "encoder_only"), checks.flag)
        checks.flag("USE_CACHED_TASKS", self.use_cached_tasks)
        checks.optional("VOCABULARY", self.vocabulary, checks.text)
        checks.optional("CACHE_DIR", self.cache_dir, checks.place)
        object.__setattr__(self, "cache_parts", checks.integer("CACHE_PARTS", self.cache_parts, 1))
        checks.integer("Run.skip_corrupt_records", self.skip_corrupt_records, 0)
        if self.use_cached_tasks and self.batch_size % self.cache_parts:
            raise Refusal(f"CACHE_PARTS must divide BATCH_SIZE ({self.batch_size}), not {self.cache_parts}.")
        lengths = checks.lengths("TASK_FEATURE_LENGTHS", self.task_feature_lengths)
        if self.encoder_only and lengths["inputs"] != lengths["targets"]:
            raise Refusal(
                "An encoder without a decoder predicts one target per input token, so both have the same length, "
                f"received {dict(lengths)}; set targets to {lengths['inputs']}."
            )

    @property
    def is_training(self) -> bool:
        """Whether the split is read repeatedly, each time in a new order."""
        return self.split == "train"


def check_description(description: DatasetDescription) -> None:
    """Raises Refusal unless it is a DatasetDescription."""
    if not isinstance(description, DatasetDescription):
        raise Refusal(f"description must be a DatasetDescription, not {checks.shown(description)}.")


def description_of_data(run: Run, config: SwitchConfig, split: str, seed: int) -> DatasetDescription:
    """Returns the description of the batches that a run reads.

    Args:
        run: Run.
        config: SwitchConfig.
        split: str. A split of the run's task.
        seed: int. Fixes the order and the noise.
    """
    return DatasetDescription(run.mixture_or_task_name, run.task_feature_lengths, run.batch_size, split, seed, run.pack,
                              config.is_encoder_only, run.vocabulary, run.use_cached_tasks, run.cache_dir,
                              run.cache_parts, run.skip_corrupt_records if split == "train" else 0)
