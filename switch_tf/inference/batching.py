"""Answers single requests in batches."""

import collections
import concurrent.futures
import threading
from collections.abc import Callable


class Full(Exception):
    """The queue of waiting requests is full."""


class Stopped(Exception):
    """The batcher accepts no more requests."""


class Batcher:
    """Answers requests in a thread. The requests that wait when a batch ends are the next batch.

    A single request is answered immediately, without waiting for others. Requests that are cancelled before their batch
    begins are skipped.

    Args:
        answer: Function of a list of requests to the list of their results. All requests get an exception it raises.
        batch_size: int. Largest number of requests in a batch.
        max_waiting: int. Largest number of waiting requests.
        watch: Function that is called with the size of each batch, or None.
    """

    def __init__(self, answer: Callable[[list], list], batch_size: int, max_waiting: int,
                 watch: Callable[[int], None] | None = None):
        self.max_waiting = max_waiting
        self._answer, self._batch_size, self._watch = answer, batch_size, watch
        self._waiting = collections.deque()
        self._changed = threading.Condition()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of requests that are in no batch yet."""
        return len(self._waiting)

    @property
    def is_working(self) -> bool:
        """Whether requests are accepted and answered."""
        return self._thread.is_alive() and not self._is_stopped

    def submit(self, requests: list) -> list[concurrent.futures.Future]:
        """Queues all requests, or none, and returns the futures of their results.

        Raises:
            Full: there is no room for all of them.
            Stopped: `stop` was called.
        """
        futures = [concurrent.futures.Future() for _ in requests]
        with self._changed:
            if self._is_stopped:
                raise Stopped
            if not self._has_room(len(requests)):
                raise Full
            self._waiting.extend(zip(requests, futures, strict=True))
            self._changed.notify()
        return futures

    def stop(self) -> None:
        """Accepts no more requests, and returns when the waiting ones are answered."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._thread.join()

    def has_room(self, count: int) -> bool:
        """Returns whether `count` more requests may wait."""
        with self._changed:
            return self._has_room(count)

    def _has_room(self, count):
        if any(future.cancelled() for _, future in self._waiting):
            self._waiting = collections.deque(pair for pair in self._waiting if not pair[1].cancelled())
        return len(self._waiting) + count <= self.max_waiting

    def _run(self):
        while batch := self._next():
            requests, futures = zip(*batch, strict=True)
            try:
                if self._watch is not None:
                    self._watch(len(requests))
                results = self._answer(list(requests))
                if len(results) != len(requests):
                    raise RuntimeError(f"{len(requests)} requests have {len(results)} results.")
            except BaseException as error:  # goes to those who wait, and the next batch is tried
                for future in futures:
                    future.set_exception(error)
            else:
                for future, result in zip(futures, results, strict=True):
                    future.set_result(result)

    def _next(self):
        """Returns the next batch, which is empty after `stop`."""
        batch = []
        with self._changed:
            while not batch and (self._waiting or not self._is_stopped):
                self._changed.wait_for(lambda: self._waiting or self._is_stopped)
                while self._waiting and len(batch) < self._batch_size:
                    request, future = self._waiting.popleft()
                    if future.set_running_or_notify_cancel():
                        batch.append((request, future))
        return batch
