"""The gin file of a stranger's run: what it may name, and the ways around that."""

import re

import pytest

from switch_tf.configs import experiment, gin_syntax, shipped_gin
from switch_tf.refusals import Refusal

DYNAMIC = "from __gin__ import dynamic_registration\n"
TASKS = "from switch_tf.tasks import text_files\n"


def check(tmp_path, text):
    (tmp_path / "operative_config.gin").write_text(text)
    file = str(tmp_path / "operative_config.gin")
    experiment.check_trust(gin_syntax.read([file]), file)


@pytest.mark.parametrize("kind", ["models", "tasks", "runs", "layouts"])
def test_all_that_the_package_ships_passes(tmp_path, kind):
    files = sorted((shipped_gin.folder() / "gin" / kind).glob("*.gin"))
    check(tmp_path, "".join(f'include "gin/{kind}/{file.name}"\n' for file in files))
    assert files


def test_a_resolved_configuration_passes(tmp_path):
    """With optimizers of Keras, and what gin writes down of t5's functions."""
    check(tmp_path, DYNAMIC + """
import keras
from switch_tf.configs import switch_config
import switch_tf.tasks.docs_corpus
from switch_tf.training import trainer
from t5.data import preprocessors

TASK_FEATURE_LENGTHS = {'inputs': 128, 'targets': 29}
MODEL/switch_config.SwitchConfig.num_experts = %NUM_EXPERTS
NUM_EXPERTS = 8
preprocessors.random_spans_helper.verbose = False
keras.optimizers.AdamW:
  learning_rate = @keras.optimizers.schedules.CosineDecay()
trainer.Trainer.optimizer = @keras.optimizers.AdamW()
""")


@pytest.mark.parametrize("text, named", [
    ("import os\n", "imports 'os'"),
    ("import \\\n  os\n", "imports 'os'"),
    ("from \\\n subprocess import run\n", "imports 'subprocess.run'"),
    ("import subprocess as keras\n", "imports 'subprocess'"),
    ("import os as gin\n", "imports 'os'"),
    ("from __gin__ import os\n", "imports '__gin__.os'"),
    ("import my_tasks\n", "imports 'my_tasks'"),
    ("import switch_tf.tasks.text_files.os\n", "imports 'switch_tf.tasks.text_files.os'"),
    ("from switch_tf.training import processes\n", "imports 'switch_tf.training.processes'"),
    (TASKS + "X = @text_files.os.system()\n", "text_files.os.system()'"),
    (TASKS + "X = [{1: (2, @a/b/text_files.data.os.system)}]\n", "refers to '@a/b/"),
    ("import switch_tf\nX = @switch_tf.tasks.text_files.os.system\n", "refers to '@switch_tf.tasks.text_files.os"),
    ("import switch_tf.tasks.docs_corpus as keras\nX = @keras.optimizers.Adam()\n", ".docs_corpus.optimizers.A"),
    (TASKS + "text_files.os.system.command = 'x'\n", "text_files.os.system'"),
    (TASKS + "a/text_files.os.system.command = 'x'\n", "text_files.os.system'"),
    (TASKS + "text_files.os.system:\n  command = 'x'\n", "text_files.os.system'"),
    ("import keras\nX = @keras.optimizers.deserialize()\n", "refers to '@keras.optimizers.deserialize()'"),
    ("import keras\nX = @keras.saving.load_model()\n", "refers to '@keras.saving.load_model()'"),
    ("X = {'class_name': 'system', 'config': {}}\n", "describes an object by the key 'class_name'"),
    ("X = [({1: {'module': 'os'}},)]\n", "describes an object by the key 'module'"),
    ("X = {%KEY: 'os'}\nKEY = 'module'\n", "describes an object by the key %KEY"),
    ("X = @a/gin.singleton()\na/gin.singleton.constructor = @print\n", "refers to '@a/gin.singleton()'"),
    ("X/gin.macro.value = 1\n", "binds parameters of 'gin.macro'"),
    ("from t5.data import preprocessors\nX = @preprocessors.random_spans_helper()\n", "preprocessors.ra"),
    ("from t5.data import preprocessors\npreprocessors.tf.io.gfile.remove.path = 'x'\n", "preprocessors.tf.io."),
])
@pytest.mark.parametrize("before", [DYNAMIC, ""])
def test_what_the_package_does_not_ship_is_refused_and_named(tmp_path, before, text, named):
    if not before and text.startswith("import switch_tf.tasks.docs_corpus as"):
        pytest.skip("without dynamic registration an alias names nothing")
    with pytest.raises(Refusal, match=re.escape(named)) as raised:
        check(tmp_path, before + text)
    assert "which switch_tf does not ship" in str(raised.value) and "add --trust" in str(raised.value)


def test_an_included_file_is_checked_too(tmp_path):
    (tmp_path / "more.gin").write_text("import os\n")
    with pytest.raises(Refusal, match="operative_config.gin imports 'os'"):
        check(tmp_path, f'include "{tmp_path}/more.gin"\n')
    with pytest.raises(Refusal, match="it includes itself"):
        check(tmp_path, f'include "{tmp_path}/operative_config.gin"\n')
    with pytest.raises(Refusal, match="includes 'nowhere.gin', which is neither"):
        check(tmp_path, 'include "nowhere.gin"\n')


@pytest.mark.parametrize("text, message", [
    ("X = " + "[" * 100_000 + "\n", "more than 50,000 words"),
    ("X = " + "[" * 40_000 + "\n", "cannot be read"),
    ("X = " + "'' " * 1000 + "\n", "more than 100 strings in a row"),
    ("X = " + "[" * 100 + "]" * 100 + "\n", "nested too deeply"),
    ("#" * 2**20 + "\n", "larger than"),
    ("X = 'a\n", "cannot be read"),
    ("X = [\n", "cannot be read"),
    ("X\x00 = 1\n", "cannot be read"),
])
def test_what_is_no_gin_file_is_one_sentence(tmp_path, text, message):
    with pytest.raises(Refusal, match=message) as raised:
        check(tmp_path, text)
    assert len(str(raised.value)) < 300
