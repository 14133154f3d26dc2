"""Requests that come one by one, answered in batches."""

import collections
import concurrent.futures
import threading
from collections.abc import Callable


class Full(Exception):
    """More requests than may wait."""


class Stopped(Exception):
    """No more requests are taken."""


class Batcher:
    """Answers requests in a thread of its own: whatever waits, when the last batch is done, is the next batch.

    A request that comes alone is answered at once, alone; nothing waits for company. What is cancelled before its turn
    is left out.

    Args:
        answer: function of a list of requests to the list of their results. What it raises, each of them gets.
        batch_size: int, requests that are answered at a time, at most.
        max_waiting: int, requests that may wait.
        watch: function of each batch's size before it is answered, or None.
    """

    def __init__(self, answer: Callable[[list], list], batch_size: int, max_waiting: int, watch=None):
        self.max_waiting = max_waiting
        self._answer, self._batch_size, self._watch = answer, batch_size, watch
        self._waiting = collections.deque()
        self._changed = threading.Condition()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests that no batch has taken yet."""
        return len(self._waiting)

    @property
    def is_working(self) -> bool:
        """Whether requests are taken and answered."""
        return self._thread.is_alive() and not self._is_stopped

    def submit(self, requests: list) -> list[concurrent.futures.Future]:
        """The results to come of requests, of all or of none.

        Raises:
            Full: not all of them may wait.
            Stopped: after `stop`.
        """
        futures = [concurrent.futures.Future() for _ in requests]
        with self._changed:
            if self._is_stopped:
                raise Stopped
            self._leave_out_cancelled()
            if len(self._waiting) + len(requests) > self.max_waiting:
                raise Full
            self._waiting.extend(zip(requests, futures, strict=True))
            self._changed.notify()
        return futures

    def stop(self) -> None:
        """Takes no more requests, and returns when those that wait are answered."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._thread.join()

    def _leave_out_cancelled(self):
        if any(future.cancelled() for _, future in self._waiting):
            self._waiting = collections.deque(one for one in self._waiting if not one[1].cancelled())

    def _run(self):
        while batch := self._next():
            requests, futures = zip(*batch, strict=True)
            try:
                if self._watch is not None:
                    self._watch(len(requests))
                results = self._answer(list(requests))
                if len(results) != len(requests):
                    raise RuntimeError(f"{len(requests)} requests have {len(results)} results.")
            except BaseException as error:  # whatever it is, those who wait hear of it, and the next batch is tried
                for future in futures:
                    future.set_exception(error)
            else:
                for future, result in zip(futures, results, strict=True):
                    future.set_result(result)

    def _next(self):
        """The next batch; empty after `stop`."""
        batch = []
        with self._changed:
            while not batch and (self._waiting or not self._is_stopped):
                self._changed.wait_for(lambda: self._waiting or self._is_stopped)
                while self._waiting and len(batch) < self._batch_size:
                    request, future = self._waiting.popleft()
                    if future.set_running_or_notify_cancel():
                        batch.append((request, future))
        return batch
