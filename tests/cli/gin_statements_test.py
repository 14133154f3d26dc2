"""What gin files say is known before anything that they name is imported."""

import pytest

from switch_tf import SwitchConfig
from switch_tf.cli import gin_files
from switch_tf.cli.gin_statements import Macro, Reference, Statements, Unknown
from switch_tf.refusals import Refusal

FILE = """
from __gin__ import dynamic_registration
from switch_tf.configs import switch_config
import nothing.that.exists

WIDTH = 8
HEADS = (1, %WIDTH)
switch_config.SwitchConfig:
  d_model = %WIDTH
  d_ff = 32
switch_config.SwitchConfig.d_ff = 64
nothing.that.exists.Thing.of = {"a": @switch_config.SwitchConfig(), "b": %HEADS}
deep/switch_config.SwitchConfig.d_model = 2
"""


def _statements(tmp_path, text=FILE, bindings=()):
    (tmp_path / "file.gin").write_text(text)
    statements = Statements()
    statements.add_file(str(tmp_path / "file.gin"))
    for binding in bindings:
        statements.add_binding(binding)
    return statements


def test_the_last_statement_of_a_name_counts_and_macros_are_filled_in(tmp_path):
    statements = _statements(tmp_path)
    assert statements.arguments_of(SwitchConfig) == {"d_model": 8, "d_ff": 64}
    assert statements.macros == {"WIDTH": 8, "HEADS": (1, Macro("WIDTH"))}
    assert statements.value(Macro("HEADS")) == (1, 8)
    assert statements.used_macros() == {"WIDTH", "HEADS"}


def test_the_command_line_needs_only_the_end_of_a_name(tmp_path):
    bindings = ["SwitchConfig.d_ff=4", "WIDTH=16", "switch_config.SwitchConfig.d_kv=2"]
    statements = _statements(tmp_path, bindings=bindings)
    assert statements.arguments_of(SwitchConfig) == {"d_model": 16, "d_ff": 4, "d_kv": 2}


def test_a_name_is_the_same_however_its_module_is_imported(tmp_path):
    imports = ("import switch_tf.tasks.c4", "from switch_tf.configs import switch_config as c",
               "from switch_tf.configs import switch_config")
    values = ("switch_tf.configs.switch_config.SwitchConfig.d_kv = 1", "c.SwitchConfig.d_kv = 2",
              "switch_config.SwitchConfig.d_ff = 3")
    statements = _statements(tmp_path, "\n".join((*imports, *values)) + "\n")
    assert statements.parameters == {("", "switch_tf.configs.switch_config.SwitchConfig", "d_kv"): 2,
                                     ("", "switch_tf.configs.switch_config.SwitchConfig", "d_ff"): 3}


def test_what_has_to_be_imported_is_not_known(tmp_path):
    statements = _statements(tmp_path, FILE + "switch_config.SwitchConfig.num_heads = @nothing.heads()\n")
    key = "", "switch_tf.configs.switch_config.SwitchConfig", "num_heads"
    assert statements.parameters[key] == Reference("nothing.heads")
    with pytest.raises(Unknown):
        statements.arguments_of(SwitchConfig)


def test_a_class_of_the_users_own_is_left_alone(tmp_path):
    statements = _statements(tmp_path, "from mine import config\nconfig.SwitchConfig.d_model = 'wide'\n")
    assert statements.arguments_of(SwitchConfig) is None


def test_an_included_file_that_is_not_there_is_named(tmp_path):
    (tmp_path / "file.gin").write_text("include 'gone.gin'\n")
    with pytest.raises(Refusal, match="it includes 'gone.gin', which is neither here nor among the shipped"):
        gin_files.read([str(tmp_path / "file.gin")])


HEAD = ("from __gin__ import dynamic_registration\nfrom switch_tf.configs import switch_config\nimport a\nimport b\n"
        "X = 1\n")


@pytest.mark.parametrize("text, told", [
    ("X = %X", "X stands for itself: X = %X."),
    ("X = [1, %Y]\nY = %X", "Y stands for itself: Y = %X."),
    ("switch_config.SwitchConfig.d_ff = @switch_config.SwitchConfig()",
     "switch_tf.configs.switch_config.SwitchConfig.d_ff stands for itself: "
     "switch_tf.configs.switch_config.SwitchConfig.d_ff = @switch_tf.configs.switch_config.SwitchConfig()."),
    ("a.A.x = @b.B()\nb.B.y = {'of': %X}\nX = @a.A()", "b.B.y stands for itself: b.B.y = {'of': %X}."),
    ("a.A.x = @s/a.A()", "a.A.x stands for itself: a.A.x = @s/a.A()."),
    ("s/a.A.x = @a.A()\nb.B.y = @s/a.A()", "s/a.A.x stands for itself: s/a.A.x = @a.A()."),
])
def test_what_stands_for_itself_is_refused(tmp_path, text, told):
    (tmp_path / "file.gin").write_text(f"{HEAD}{text}\n")
    with pytest.raises(Refusal) as caught:
        gin_files.collect([str(tmp_path / "file.gin")])
    assert str(caught.value) == told


@pytest.mark.parametrize("text", [
    "a.A.x = @a.A", "a.A.x = @s/a.A()\ns/a.A.x = 1", "s/a.A.x = @t/a.A()\nb.B.y = @s/a.A()",
    "a.A.x = @b.B()\na.A.y = @b.B()\nb.B.y = %X\nb.B.z = %X",
    "a.A.x = @b.B()\nb.B.y = @s/a.A()\ns/b.B.y = 5"])
def test_what_ends_is_allowed(tmp_path, text):
    (tmp_path / "file.gin").write_text(f"{HEAD}{text}\n")
    statements = gin_files.collect([str(tmp_path / "file.gin")])
    assert statements.endless() is None
    names = {f"{scope}/{owner}.{name}".lstrip("/") for scope, owner, name in statements.parameters}
    assert names >= {line.split(" = ")[0] for line in text.splitlines()}


def test_the_command_line_may_close_a_circle(tmp_path):
    (tmp_path / "file.gin").write_text(f"{HEAD}switch_config.SwitchConfig.d_ff = 8\n")
    with pytest.raises(Refusal, match="SwitchConfig.d_ff stands for itself"):
        gin_files.collect([str(tmp_path / "file.gin")], ["SwitchConfig.d_ff=@switch_config.SwitchConfig()"])
