"""Requests are answered once each, by batches of what waits, whatever befalls their neighbours."""

import threading

import pytest

from switch_tf.inference.server import Batcher


class Answers:
    """Doubles numbers; waits for `go`, and notes its batches."""

    def __init__(self):
        self.go, self.began = threading.Event(), threading.Semaphore(0)
        self.batches = []

    def __call__(self, requests):
        self.batches.append(requests)
        self.began.release()
        assert self.go.wait(10)
        if "bad" in requests:
            raise ValueError("no number")
        return [2 * request for request in requests]


@pytest.fixture
def answers():
    return Answers()


@pytest.fixture
def batcher(answers):
    batcher = Batcher(answers, batch_size=3, max_waiting=5)
    yield batcher
    answers.go.set()
    batcher.stop()


def held(batcher, answers):
    """A request that is being answered until `answers.go`."""
    (future,) = batcher.submit([0])
    assert answers.began.acquire(timeout=10)
    return future


def test_what_waits_is_the_next_batch_in_order(batcher, answers):
    first = held(batcher, answers)
    others = [batcher.submit([number])[0] for number in (1, 2)] + batcher.submit([3, 4])
    assert batcher.num_waiting == 4
    answers.go.set()
    assert [future.result(10) for future in (first, *others)] == [0, 2, 4, 6, 8]
    assert answers.batches == [[0], [1, 2, 3], [4]]


def test_there_is_room_for_as_many_as_may_wait(batcher, answers):
    held(batcher, answers)
    batcher.submit([1, 2, 3])
    assert batcher.num_waiting == 3 and batcher.has_room(2) and not batcher.has_room(3)
    batcher.submit([4, 5])
    assert not batcher.has_room(1)


def test_what_is_cancelled_makes_room_and_is_not_answered(batcher, answers):
    held(batcher, answers)
    gone = batcher.submit([1, 2, 3, 4, 5])
    for future in gone[:4]:
        assert future.cancel()
    assert batcher.has_room(4) and not batcher.has_room(5)
    new = batcher.submit([6, 7, 8, 9])
    answers.go.set()
    assert [future.result(10) for future in (gone[4], *new)] == [10, 12, 14, 16, 18]
    assert answers.batches == [[0], [5, 6, 7], [8, 9]]


def test_what_is_cancelled_between_two_batches_is_left_out(batcher, answers):
    held(batcher, answers)
    gone, kept = batcher.submit([1, 2])
    gone.cancel()
    answers.go.set()
    assert kept.result(10) == 4
    assert answers.batches == [[0], [2]]


def test_an_error_is_of_its_batch_alone(batcher, answers):
    held(batcher, answers)
    bad = batcher.submit([1, "bad", 2])
    (good,) = batcher.submit([3])
    answers.go.set()
    for future in bad:
        with pytest.raises(ValueError, match="no number"):
            future.result(10)
    assert good.result(10) == 6 and batcher.is_working


def test_too_few_results_are_nobodys():
    batcher = Batcher(lambda requests: [], 3, 5)
    with pytest.raises(ValueError, match="argument 2 is shorter than argument 1"):
        batcher.submit([1])[0].result(10)
    batcher.stop()


def test_stopping_answers_what_waits_and_takes_no_more(batcher, answers):
    held(batcher, answers)
    waiting = batcher.submit([1, 2, 3, 4])
    stopping = threading.Thread(target=batcher.stop)
    stopping.start()
    while batcher.is_working:
        pass
    answers.go.set()
    stopping.join(10)
    assert [future.result(0) for future in waiting] == [2, 4, 6, 8]


def test_many_threads_get_their_own_results():
    batcher = Batcher(lambda requests: [2 * request for request in requests], 7, 10_000)
    found = {}

    def ask(thread):
        found[thread] = [future.result(10) for number in range(20)
                         for future in batcher.submit([thread * 1000 + number, thread])]

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == {thread: [one for number in range(20) for one in (2 * (thread * 1000 + number), 2 * thread)]
                     for thread in range(32)}
    batcher.stop()
