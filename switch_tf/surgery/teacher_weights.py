"""The weights of a teacher: a checkpoint of switch_tf, or a folder of another format that states its model."""

import functools
import hashlib
import json
from typing import Any

from switch_tf import checks
from switch_tf.checkpoints import folders, sizes, tensors
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import conversion_identity, formats, stated_config
from switch_tf.conversion.formats import SWITCH_TF, Format
from switch_tf.conversion.initial_weights import as_checkpoint
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.refusals import Refusal
from switch_tf.storage import places


class TeacherWeights:
    """Weights that are looked for when they are first asked for.

    Args:
        folder: str. Run folder, for its newest checkpoint, checkpoint, or folder of any other format.
        argument: str. The argument that names the folder, for messages.

    Raises:
        Refusal: an argument is out of its range. Later: the folder holds no weights, or does not state its model.
    """

    def __init__(self, folder: str, argument: str):
        self._argument = argument
        self._folder = checks.place(argument, folder)

    @functools.cached_property
    def _format(self) -> Format:
        found = formats.find(self._folder)
        if found is None:
            raise Refusal(f"{self._argument} must be a run folder with checkpoints, one checkpoint, or weights of "
                          f"Hugging Face, T5X or Mesh TensorFlow; {self._folder} is none of these.")
        return found

    @functools.cached_property
    def path(self) -> Any:
        """The checkpoint or the folder, the same one for as long as this object exists."""
        return folders.resolve(self._folder) if self._format is SWITCH_TF else places.at(self._folder)

    @functools.cached_property
    def _description(self) -> dict[str, Any]:
        """The description of a checkpoint of switch_tf."""
        return folders.describe(self.path)

    @functools.cached_property
    def config(self) -> SwitchConfig:
        """Configuration of the model."""
        config = stated_config.find(self.path, self._format)
        if config is None:
            raise Refusal(f"{self._argument} {self.path} is of {self._format.name} and does not describe its model; "
                          f"convert it first: switch-tf convert --input {self._folder} --output FOLDER "
                          "--gin_file=gin/models/NAME.gin")
        if self._format is SWITCH_TF:
            sizes.check(config, self.path)
        return config

    @property
    def identity(self) -> str:
        """A text that differs for any two checkpoints; of another format, for files of other names and sizes."""
        if self._format is SWITCH_TF:
            return folders.identity(self._description)
        start = str(self.path)
        files = [(name.removeprefix(start), size) for name, size, _ in conversion_identity.state(self.path)]
        return f"{self._format.name}, {hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]}"

    @property
    def vocabulary(self) -> Any:
        """The vocabulary as `continuation.record` has it, or None if it is not known."""
        return self._description["configuration"].get("vocabulary") if self._format is SWITCH_TF else None

    def restore(self, model: SwitchTransformer) -> None:
        """Loads the weights into a built model of `config`, which may be under any layout."""
        variables = tensors.state_variables(model)
        if self._format is SWITCH_TF:
            tensors.restore(self.path, variables)
            return
        with as_checkpoint(self.path, self._format, self.config) as checkpoint:
            tensors.restore(checkpoint, variables)
