"""Answers single requests in batches."""

import collections
import concurrent.futures
import threading
from collections.abc import Callable


class Batcher:
    """Answers requests in a thread. The requests that wait when a batch ends are the next batch.

    A single request is answered immediately, without waiting for others. Requests that are cancelled before their batch
    begins are skipped. `is_working`: bool, whether requests are accepted.

    Args:
        answer: Function of a list of requests to the list of their results. All requests get an exception it raises.
        batch_size: int. Largest number of requests in a batch.
        max_waiting: int. Largest number of waiting requests, see `has_room`.
    """

    def __init__(self, answer: Callable[[list], list], batch_size: int, max_waiting: int):
        self.max_waiting = max_waiting
        self.is_working = True
        self._answer, self._batch_size = answer, batch_size
        self._waiting = collections.deque()
        self._lock = threading.Lock()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "batcher")

    @property
    def num_waiting(self) -> int:
        """Number of requests that are in no batch yet."""
        return len(self._waiting)

    def has_room(self, count: int) -> bool:
        """Returns whether `count` more requests may wait."""
        with self._lock:
            if any(future.cancelled() for _, future in self._waiting):
                self._waiting = collections.deque(pair for pair in self._waiting if not pair[1].cancelled())
            return len(self._waiting) + count <= self.max_waiting

    def submit(self, requests: list) -> list[concurrent.futures.Future]:
        """Queues requests after `has_room` and before `stop`. Returns the futures of their results."""
        futures = [concurrent.futures.Future() for _ in requests]
        with self._lock:
            self._waiting.extend(zip(requests, futures, strict=True))
        self._thread.submit(self._answer_all)
        return futures

    def stop(self) -> None:
        """Accepts no more requests, and returns when the waiting ones are answered."""
        self.is_working = False
        self._thread.shutdown()

    def _answer_all(self):
        """Answers requests until none waits."""
        while self._waiting:
            batch = []
            with self._lock:
                while self._waiting and len(batch) < self._batch_size:
                    request, future = self._waiting.popleft()
                    if future.set_running_or_notify_cancel():
                        batch.append((request, future))
            if not batch:
                continue
            requests, futures = zip(*batch, strict=True)
            try:
                results = list(zip(futures, self._answer(list(requests)), strict=True))
            except BaseException as error:  # goes to those who wait, and the next batch is tried
                for future in futures:
                    future.set_exception(error)
            else:
                for future, result in results:
                    future.set_result(result)
