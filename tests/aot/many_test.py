"""Several processes are asked at once; these answer without a compiler."""

import json
import sys

import pytest

from switch_tf.aot import many


def _process(code):
    return [sys.executable, "-S", "-c", code]


def _answers(**answer):
    return _process(f"print('warming up'); print({json.dumps(answer)!r})")


def test_answers_come_in_the_order_of_the_questions_and_each_is_told():
    told = []
    fast = {"fits": True, "predicted": {"step_seconds": [0.001, 0.002]}}
    found = many.ask({"fast": _process(f"import time; time.sleep(0.2); print({json.dumps(fast)!r})"),
                      "large": _answers(fits=False)}, told.append)
    assert list(found.items()) == [("fast", fast), ("large", {"fits": False})]
    assert sorted(line.split("] ")[1].split(";")[0] for line in told) == [
        "fast: 2.0 ms a step, fits", "large: does not fit"]
    assert [line.split("]")[0] for line in told] == ["[1 of 2", "[2 of 2"] and told[-1].endswith("done.")


def test_a_mistake_is_its_sentence_without_the_name_of_the_command():
    code = "import sys; sys.stderr.write('a line before\\nswitch-tf compile: No such topology: v9.\\n'); sys.exit(2)"
    assert many.ask({"one": _process(code)}, lambda text: None) == {"one": {"mistake": "No such topology: v9."}}


def test_what_fails_otherwise_is_raised():
    with pytest.raises(RuntimeError, match="(?s)failed: .*ZeroDivisionError"):
        many.ask({"one": _process("1 / 0")}, lambda text: None)
