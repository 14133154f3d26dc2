import pytest

from switch_tf.refusals import first_line


@pytest.mark.parametrize(("error", "line"), [
    (ValueError("the first\n  In call to configurable 'x'"), "the first"),
    (ValueError(""), "ValueError"),
    (KeyError("text"), "'text'"),
    (TypeError("in user code:\n\n    File 'a.py', line 1\n\n    TypeError: a number was expected\n"),
     "TypeError: a number was expected"),
    (RuntimeError("{{function_node __wrapped__Next_device_/job:x}} corrupted record [Op:IteratorGetNext] name: "),
     "corrupted record"),
    ("only text", "only text"),
])
def test_the_message_is_what_is_left_without_its_wrapping(error, line):
    assert first_line(error) == line
