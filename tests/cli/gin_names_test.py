"""Gin files may name the parts of a run as earlier versions did; nothing is imported for it."""

import subprocess
import sys

import gin
import pytest

from switch_tf.cli import gin_files, gin_names
from switch_tf.configs import part_names

EARLIER = """from __gin__ import dynamic_registration
from switch_tf import config
from switch_tf.models import switch_transformer as model
from switch_tf.optim import schedules
from switch_tf.partitioning import dtypes
from switch_tf.training import run
from switch_tf.training import trainer
import switch_tf.tasks.docs_corpus
import switch_tf.optim.adafactor

MODEL = @model.SwitchTransformer()
LEARNING_RATE = @schedules.Cooldown()
schedules.Cooldown:
  schedule = @switch_tf.optim.schedules.RsqrtDecay()
  last_step = %TRAIN_STEPS
switch_tf.optim.adafactor.Adafactor.clip_threshold = 2.0
config.SwitchConfig.d_ff = 64
run.Run.eval_batches = 7
run.StepSettings.use_xla = True
dtypes.dtype_policy.activation_dtype = 'float32'
trainer.Trainer.optimizer = @switch_tf.optim.adafactor.Adafactor()
"""
RUN = ["gin/models/switch_tiny.gin", "gin/tasks/docs_corpus.gin", "gin/runs/pretrain.gin"]


@pytest.mark.parametrize("is_first", [True, False])
def test_earlier_names_bind_the_same_parameters(tmp_path, is_first):
    (tmp_path / "mine.gin").write_text(EARLIER)
    files = [*RUN, str(tmp_path / "mine.gin")]
    gin_files.parse_files(files[::-1] if is_first else files, "")
    gin_files.parse_bindings(["MODEL_DIR='run'", "schedules.Cooldown.share=0.5", "config.SwitchConfig.d_kv=4"])
    factories = "switch_tf.configs.factories"
    assert gin.query_parameter(f"{factories}.Cooldown.share") == 0.5
    assert gin.query_parameter(f"{factories}.Adafactor.clip_threshold") == 2.0
    assert gin.query_parameter("switch_tf.configs.switch_config.SwitchConfig.d_kv") == 4
    assert gin.query_parameter("switch_tf.configs.run.Run.eval_batches") == 7
    names = {selector for _, selector in gin.config._CONFIG}
    assert names <= {*part_names.PARTS.values(), "gin.macro"}
    # What gin writes down can be parsed again.
    text = gin.config_str()
    gin_files.parse_files([], "")
    gin.parse_config(text)
    assert gin.config_str() == text


def test_every_name_leads_to_a_part_that_exists():
    for name in part_names.PARTS:
        module, _, part = name.rpartition(".")
        assert callable(getattr(gin_names.Module(module), part)), name


def test_a_whole_run_is_parsed_by_plain_gin_without_tensorflow():
    code = """
import importlib.util, sys
import gin
from switch_tf.configs import shipped_gin
folder = shipped_gin.folder()
gin.add_config_file_search_path(str(folder))
for path in folder.glob("gin/*/*.gin"):
    gin.clear_config()
    gin.parse_config_file(str(path.relative_to(folder)))
print(sorted({"tensorflow", "keras", "seqio", "jax"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
