"""A seqio source for TFDS data sets that are too large to be prepared during a run."""

import re
from collections.abc import Mapping

import seqio

from switch_tf.refusals import Refusal


class PreparedTfdsSource(seqio.TfdsDataSource):
    """A source of a prepared data set, which never starts a download.

    The folder is `$TFDS_DATA_DIR`, or `~/tensorflow_datasets`.

    Args:
        tfds_name: str. Name, config and version, for example "c4/en:3.1.0".
        split_names: seqio's split -> split of the data set, or a part of it, for example `{"train": "de[:90%]"}`.
    """

    def __init__(self, tfds_name: str, split_names: Mapping[str, str]):
        super().__init__(tfds_name, splits=dict(split_names), read_only=True)
        self._split_names = dict(split_names)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits of the task.

        Raises:
            Refusal: The data set is not prepared, or lacks one of the splits.
        """
        info = self.tfds_dataset.info
        names = dict.fromkeys(re.sub(r"\[.*\]", "", name) for name in self._split_names.values())
        missing = [name for name in names if name not in info.splits]
        if missing:
            raise Refusal(
                f"The TFDS data set {self.tfds_dataset.name} is not prepared: no split {' and '.join(missing)} in "
                f"{info.data_dir}; prepare it with tensorflow-datasets, or set TFDS_DATA_DIR to the folder that holds "
                "a prepared copy."
            )
        return tuple(self._split_names)
