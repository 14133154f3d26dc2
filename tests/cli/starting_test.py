import re
import shlex

from switch_tf import SwitchConfig
from switch_tf.cli import starting


def test_the_run_folders_configuration_begins_with_what_a_reader_will_ask():
    config = SwitchConfig.from_preset("switch_tiny")
    command, versions, parameters, *rest = starting.origin(["train", "--gin.MODEL_DIR='a run'"], config).split("\n")
    assert shlex.split(command) == ["#", "switch-tf", "train", "--gin.MODEL_DIR='a run'"]
    assert re.fullmatch(r"# \d{4}-\d\d-\d\d .+, switch_tf \S+, TensorFlow 2\.\S+, Keras 3\.\S+", versions)
    assert parameters == f"# {config.num_parameters:,} parameters" and rest == ["", ""]
