"""Answers have a file in the cache, and several processes are asked at once; these answer without a compiler."""

import json
import sys

import pytest

from switch_tf.aot import answers
from tests.aot.made_up import answer


def test_another_question_or_other_flags_of_the_compiler_have_another_answer(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    first = answers.cache_file("a", "v5e:2x2")
    assert answers.cache_file("a", "v5e:2x2") == first != answers.cache_file("a", "v5e:2x4")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_async_all_to_all=true")
    assert answers.cache_file("a", "v5e:2x2") != first


def _process(code):
    return [sys.executable, "-S", "-c", code]


def _answers(found, before=""):
    return _process(f"{before}print('warming up'); print({json.dumps(found)!r})")


def test_answers_come_in_the_order_of_the_questions_and_each_is_printed(capsys):
    fits, large, refused = (json.loads(json.dumps(one)) for one in (
        answer(temporaries=300), answer(temporaries=301), answer(temporaries=0, refused="no room")))
    found = answers.ask({"fits": _answers(fits, "import time; time.sleep(0.2); "), "large": _answers(large),
                         "refused": _answers(refused)})
    assert list(found.items()) == [("fits", fits), ("large", large), ("refused", refused)]
    told = capsys.readouterr().err.splitlines()
    assert sorted(line.split("] ")[1].split(";")[0] for line in told) == [
        "fits: 500.0 ms a step, fits", "large: 500.0 ms a step, does not fit", "refused: does not fit"]
    assert [line.split("]")[0] for line in told] == ["[1 of 3", "[2 of 3", "[3 of 3"] and told[-1].endswith("done.")


def test_a_mistake_is_its_sentence_without_the_name_of_the_command():
    code = "import sys; sys.stderr.write('a line before\\nswitch-tf compile: No such topology: v9.\\n'); sys.exit(2)"
    assert answers.ask({"one": _process(code)}) == {"one": {"mistake": "No such topology: v9."}}


def test_what_fails_otherwise_is_raised():
    with pytest.raises(RuntimeError, match="(?s)failed: .*ZeroDivisionError"):
        answers.ask({"one": _process("1 / 0")})
