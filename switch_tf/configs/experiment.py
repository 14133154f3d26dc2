"""A whole experiment before it is built: the model, the layout, the run and the settings of its steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

from switch_tf.configs.run import Run, StepSettings, check_periods
from switch_tf.configs.switch_config import SwitchConfig


class Experiment(NamedTuple):
    """Everything that a gin configuration describes; commands and lower floors take it as one argument.

    Attributes:
        config: SwitchConfig of the model. None until the model exists if a function of the user makes it.
        layout: Layout. Its mesh is complete once the devices are known.
        run: Run.
        settings: StepSettings.
        make_model: Function that returns a new SwitchTransformer, not built.
        make_optimizer: Function that returns a new Keras optimizer, not built.
        make_objective: Function that returns a new Objective, not built.
        partitioner: Partitioner of the layout. None until the devices are known, and for devices of another machine.
    """

    config: SwitchConfig | None
    layout: Any
    run: Run
    settings: StepSettings
    make_model: Callable
    make_optimizer: Callable
    make_objective: Callable
    partitioner: Any = None

    def check(self) -> None:
        """Refuses parts that cannot be combined on any devices.

        Raises:
            Refusal: The sentence has the rule and the value.
        """
        check_periods(self.run, self.settings)
