"""Few inputs get programs of their shape, made beside the work: with the same answers, whenever they are there."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from switch_tf import data, decoding
from switch_tf.inference.text_model import FewRows, TextModel
from switch_tf.tasks import vocabularies

BYTES = vocabularies.byte()
TEXTS = ["ab <extra_id_0> c", "d", "a rather long text that is cut somewhere", "the fourth", "and one more"]


@pytest.fixture
def model(make_model):
    return make_model(vocab_size=384, logits_via_embedding=False, scale_decoder_outputs=False)


def program_of(few_rows, rows, length):
    """What is found once it is made."""
    end = time.monotonic() + 60
    while (found := few_rows.program(rows, length)) is None and time.monotonic() < end:
        time.sleep(0.01)
    return found


def test_shapes_are_few():
    few_rows = FewRows(lambda inputs, rows: (inputs, rows), 100, 8)
    found = {program_of(few_rows, rows, length)[0] for rows in (1, 2, 3, 4) for length in (1, 32, 33, 64, 65, 100)}
    assert found == {(rows, length) for rows in (1, 4) for length in (32, 64, 100)}
    assert few_rows.program(5, 1) is None and few_rows.program(32, 100) is None


def test_it_is_asked_for_and_there_later():
    started, go_on = threading.Event(), threading.Event()

    def decode(inputs, rows):
        started.set()
        assert go_on.wait(60)
        return inputs + rows

    few_rows = FewRows(decode, 64, 4)
    assert few_rows.program(2, 3) is None and started.wait(60)
    assert few_rows.program(2, 3) is None and few_rows.program(1, 3) is None  # one at a time
    go_on.set()
    shape, program = program_of(few_rows, 2, 3)
    assert shape == (4, 32)
    found = program(np.ones(shape, "int32"), np.arange(4, dtype="int32")[:, None])
    np.testing.assert_array_equal(found[:, 0], [1, 2, 3, 4])


@pytest.mark.slow  # the process imports TensorFlow
def test_a_process_that_ends_meanwhile_ends_well():
    """One that is asked by a daemon, as a server's thread is."""
    source = """
import threading
from switch_tf.inference.text_model import FewRows

started = threading.Event()

def decode(inputs, rows):
    started.set()
    for _ in range(300):
        inputs = inputs + rows
    print("traced")
    return inputs

asked = threading.Thread(target=FewRows(decode, 64, 4).program, args=(1, 3), daemon=True)
asked.start()
asked.join()
started.wait()
"""
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert found.returncode == 0 and found.stdout == "traced\n", found.stderr


@pytest.mark.parametrize("sampler, dispatch, rows", [
    ("greedy", "auto", 4), (decoding.Beam(num_beams=2), "auto", 4), ("beam", "auto", 1),
    (decoding.Beam(num_beams=16), "auto", 0), ("greedy", "ragged", 0)])
def test_there_are_none_for_what_xla_does_not_decode(make_model, sampler, dispatch, rows):
    """Four texts of four beams are too many rows: to fill two texts up to four would only double the work."""
    model = make_model(vocab_size=384, dispatch=dispatch)
    few_rows = TextModel(model, data.Reading(BYTES, BYTES), 20, 6, sampler, batch_size=None)._few_rows
    few_rows._decode = lambda inputs, rows: (inputs, rows)
    assert few_rows.program(rows + 1, 5) is None and few_rows._maker is None
    assert rows == 0 or program_of(few_rows, rows, 5)[0] == (rows, 20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_that_cannot_be_made_is_not_tried_again():
    tried = []

    def decode(inputs, rows):
        tried.append(inputs.shape)
        raise MemoryError

    few_rows = FewRows(decode, 64, 4)
    for _ in range(3):
        assert few_rows.program(1, 3) is None
        few_rows._maker.join()
    assert tried == [(1, 32)]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["greedy", decoding.Sample(seed=3), decoding.Beam(num_beams=2)])
def test_answers_are_the_same_before_and_after(model, sampler):
    text_model = TextModel(model, data.Reading(BYTES, BYTES), 20, 6, sampler, batch_size=None)
    inputs = [text_model.read(text).ids for text in TEXTS]
    sizes = (1, 3, 5)
    before = [TextModel(model, data.Reading(BYTES, BYTES), 20, 6, sampler, batch_size=5).answer(
        inputs[:size], list(range(size))) for size in sizes]
    for size in sizes[:2]:
        assert program_of(text_model._few_rows, size, 20)[0] == (1 if size == 1 else 4, 20)
    for size, expected in zip(sizes, before, strict=True):
        found = text_model.answer(inputs[:size], list(range(size)))
        assert [[answer.text for answer in answers] for answers in found] == [
            [answer.text for answer in answers] for answers in expected]
        assert [answers[0].score for answers in found] == pytest.approx(
            [answers[0].score for answers in expected], rel=1e-5)
