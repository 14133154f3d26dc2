"""A whole experiment before it is built."""

import copy
import dataclasses
import importlib
import os
import pathlib
import typing
from collections.abc import Sequence
from typing import Any

from switch_tf import checks
from switch_tf.configs import gin_syntax, names, parts
from switch_tf.configs.gin_syntax import Gin, Macro, Reference
from switch_tf.configs.parts import Part
from switch_tf.configs.run import MACROS, Run, StepSettings, check_periods
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.refusals import Refusal

PARTS = ("a model (gin/models/switch_tiny.gin), a task (gin/tasks/docs_corpus.gin) and a run "
         "(gin/runs/pretrain.gin)")
_MODEL = Part(parts.MODEL, {"dtype": Part(parts.DTYPE_POLICY, {})})
_OPTIMIZER = Part(parts.ADAFACTOR, {"learning_rate": Part(parts.RSQRT_DECAY, {})})
_OF_KERAS_OBJECTS = {"class_name", "module", "registered_name"}  # keys by which Keras imports a module
_MODULES = {"keras", parts.TASKS, *parts.LIBRARIES, *(name.rpartition(".")[0] for name in parts.ALLOWED)}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A complete training run as data, without TensorFlow. Change it with `dataclasses.replace`.

    Attributes:
        config: None if a user's function makes the model, until it exists.
        layout: Layout. Its mesh is complete once the devices are known.
        model, optimizer: The model lacks its argument `config`. The optimizer defaults to Adafactor with T5's learning
            rates.
        objective: None for the cross-entropy of the targets.
        gin: The gin that it was read from.
        partitioner: None for unknown devices and another machine's.
    """

    config: SwitchConfig | None
    layout: Any
    run: Run
    settings: StepSettings
    model: Part = _MODEL
    optimizer: Part = _OPTIMIZER
    objective: Part | None = None
    gin: Gin | None = dataclasses.field(default=None, compare=False)
    partitioner: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            kind, *alternatives = typing.get_args(field.type) or (field.type,)
            if kind is not Any and not isinstance(value := getattr(self, field.name), (kind, *alternatives)):
                raise Refusal(f"Experiment.{field.name} must be a {kind.__name__}, not {checks.shown(value)}.")
        check_periods(self.run, self.settings)

    @classmethod
    def from_gin(cls, files: Sequence[str], bindings: Sequence[str] = (), search_paths: str = "",
                 **changes: Any) -> "Experiment":
        """Returns the experiment that gin files describe, without building it.

        Args:
            files: Later files win. Shipped files are found from any folder.
            bindings: "NAME=VALUE" that override the files.
            search_paths: Comma-separated folders, searched before the shipped files.
            changes: Macros to override, such as TRAIN_STEPS=300.
        """
        if not files:
            raise Refusal(f"A run is described by gin files: give {PARTS}, each with --gin_file.")
        return cls._read(gin_syntax.read(files, search_paths=search_paths), files, bindings, changes)

    @classmethod
    def from_run(cls, folder: str | pathlib.Path, *, trust: bool = False, **changes: Any) -> "Experiment":
        """Returns the experiment of a run folder. `changes` override macros.

        Args:
            trust: Whether to import modules that the folder names and this package does not ship.
        """
        file = os.path.join(folder, "operative_config.gin")
        gin = gin_syntax.read([file])
        if not trust:
            check_trust(gin, file)
        return cls._read(gin, [file], (), changes)

    @classmethod
    def _read(cls, gin, files, bindings, changes):
        if ("", parts.TRAINER) not in gin.bound:
            raise Refusal(f"These gin files describe no run: {', '.join(files)}. Give {PARTS}.")
        gin.bind([*bindings, *(f"{name}={value!r}" for name, value in changes.items())])
        return cls.of(gin.check())

    @classmethod
    def of(cls, found: Gin) -> "Experiment":
        """Returns the experiment described by checked gin files."""
        trainer = found.part(parts.TRAINER).arguments
        model = trainer.get("model")
        run = trainer.get("run") or found.part(parts.RUN)
        settings = trainer.get("step_settings") or found.part(parts.STEP_SETTINGS)
        layout = found.part(parts.PARTITIONER).arguments.get("layout", found.part(parts.LAYOUT))
        config = None
        if isinstance(model, Part) and model.name == parts.MODEL:
            arguments = dict(model.arguments)
            config = parts.made(arguments.pop("config", None))
            model = dataclasses.replace(model, arguments=arguments)
        experiment = cls(config, parts.made(layout), parts.made(run), parts.made(settings), model,
                         trainer.get("optimizer"), trainer.get("objective"), found)
        names.check_task(experiment.run.mixture_or_task_name)
        return experiment

    def as_gin(self) -> Gin:
        """Returns gin for this experiment: the gin it was read from, if any, with later changes.

        A layout completed for this machine counts as unchanged.

        Raises:
            Refusal: Two parts of one name have arguments that gin cannot keep apart.
        """
        gin = copy.deepcopy(self.gin) or Gin()
        before = self.of(gin) if self.gin else None
        if before is None:
            gin.imports[parts.TASKS] = "the experiment"
            gin.macros = {name.upper(): getattr(self.run, name) for name in MACROS}
            gin.bound["", parts.RUN] = {name: Macro(name.upper()) for name in MACROS}
        made = ("model", "optimizer", "objective")
        if before is None or any(getattr(self, name) != getattr(before, name) for name in made):
            # Binds all parts anew: a shared part would inherit removed arguments.
            gin.forget(getattr(before, name, None) for name in made)
            for name in made:
                gin.set(parts.TRAINER, name, gin.refer(getattr(self, name)))
            if self.model.name == parts.MODEL:
                gin.set(parts.MODEL, "config", Reference(parts.CONFIG, "", True))
        for name, part in (("config", parts.CONFIG), ("run", parts.RUN), ("settings", parts.STEP_SETTINGS),
                           ("layout", parts.LAYOUT)):
            value, old = getattr(self, name), getattr(before, name, None)
            is_left_out = value is None or name == "layout" and self.partitioner is not None
            for field in () if is_left_out else dataclasses.fields(value):
                new = getattr(value, field.name)
                if new != getattr(old, field.name, field.default):
                    gin.set(part, field.name, new)
        return gin

    def make_model(self) -> Any:
        """Returns a new SwitchTransformer, not built."""
        part = self.model
        if self.config is not None:
            part = dataclasses.replace(part, arguments=part.arguments | {"config": self.config})
        return self._make("model", part)

    def make_optimizer(self) -> Any:
        """Returns a new Keras optimizer, not built."""
        return self._make("optimizer", self.optimizer)

    def make_objective(self) -> Any:
        """Returns a new Objective, not built."""
        part = self.objective
        return self._make("objective", Part("switch_tf.evaluation.objectives.Objective", {}) if part is None else part)

    def _make(self, name, part):
        made = parts.made(part)
        parts.find("switch_tf.training.trainer.check_parts")(**{name: made})
        return made

    @property
    def activation_dtype(self) -> str | None:
        """ACTIVATION_DTYPE of the model's dtype policy, or None."""
        match self.model.arguments.get("dtype"):
            case Part(parts.DTYPE_POLICY, arguments):
                return arguments.get("activation_dtype", "auto")
        return None

    def train(self) -> dict:
        """Trains or resumes on this machine's devices, and returns the run's summary."""
        return importlib.import_module("switch_tf.experiments").train(self)

    def evaluate(self, step: int | str = "last", split: str = "validation", num_examples: int | None = None) -> dict:
        """Computes the task metrics of a checkpoint, as `switch-tf eval`.

        Args:
            step: A step, "best" or "last".
            num_examples: Largest number of examples of each task. None for all.

        Returns:
            "step", "tasks": {task: {metric: value}}, and "average" over tasks or None.
        """
        return importlib.import_module("switch_tf.experiments").evaluate(self, str(step), split, num_examples)


def check_trust(found: Gin, file: str) -> None:
    """Refuses a stranger's gin file that names a module or function that the package does not ship.

    `file` is for the message. Call it before `Gin.check` imports modules.
    """
    for what in _list_foreign(found):
        raise Refusal(f"{file} {what}, which switch_tf does not ship. A gin file is a program, so this one is not run: "
                      "read it, and add --trust if you trust whoever wrote it.")


def _list_foreign(gin):
    for module in gin.imports:
        if module not in _MODULES and module.rpartition(".")[0] != parts.TASKS:
            yield f"imports {module!r}"
    for _, reference in gin.references():
        if isinstance(reference, Reference) and reference.name not in parts.ALLOWED:
            yield f"refers to {repr(reference)!r}"
    for _, name in gin.bound:
        if name not in parts.BOUND:
            yield f"binds parameters of {name!r}"
    for value in (gin.macros, *gin.bound.values()):
        yield from _list_foreign_keys(list(value.values()))


def _list_foreign_keys(value):
    if isinstance(value, dict):
        for key in value:
            if isinstance(key, Macro) or not isinstance(key, str | int | float | None) or key in _OF_KERAS_OBJECTS:
                yield f"describes an object by the key {checks.shown(key)}"
        value = list(value.values())
    if isinstance(value, list | tuple):
        for entry in value:
            yield from _list_foreign_keys(entry)
