"""Several processes are asked at once; these answer without a compiler."""

import json
import sys

import pytest

from switch_tf.aot import jobs, result
from tests.aot.made_up import QUESTION, answer


def _process(code):
    return [sys.executable, "-S", "-c", code]


def _answers(found, before=""):
    return _process(f"{before}print('warming up'); print({json.dumps(found)!r})")


def test_answers_come_in_the_order_of_the_questions_and_each_is_printed():
    told = []
    fits, large, refused = (json.loads(json.dumps(result.as_json(QUESTION, one))) for one in (
        answer(temporaries=300), answer(temporaries=301), answer(temporaries=0, refused="no room")))
    found = jobs.run({"fits": _answers(fits, "import time; time.sleep(0.2); "), "large": _answers(large),
                      "refused": _answers(refused)}, told.append)
    assert list(found.items()) == [("fits", fits), ("large", large), ("refused", refused)]
    assert sorted(line.split("] ")[1].split(";")[0] for line in told) == [
        "fits: 500.0 ms a step, fits", "large: 500.0 ms a step, does not fit", "refused: does not fit"]
    assert [line.split("]")[0] for line in told] == ["[1 of 3", "[2 of 3", "[3 of 3"] and told[-1].endswith("done.")


def test_a_mistake_is_its_sentence_without_the_name_of_the_command():
    code = "import sys; sys.stderr.write('a line before\\nswitch-tf compile: No such topology: v9.\\n'); sys.exit(2)"
    assert jobs.run({"one": _process(code)}, lambda text: None) == {"one": {"mistake": "No such topology: v9."}}


def test_what_fails_otherwise_is_raised():
    with pytest.raises(RuntimeError, match="(?s)failed: .*ZeroDivisionError"):
        jobs.run({"one": _process("1 / 0")}, lambda text: None)
