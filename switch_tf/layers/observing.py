"""Passes router statistics to an observer during training."""

from typing import Any

from switch_tf.metrics import RouterStats


class Observed:
    """Base class of layers and models that pass their router statistics to an observer. Precedes Keras' base class.

    Attributes:
        router_observer: object or None. Its method `update` takes a tuple of RouterStats and is traced with the call.
    """

    router_observer: Any = None

    @property
    def routers(self) -> dict[str, int]:
        """Number of experts by router name. Defined by subclasses."""
        raise NotImplementedError

    def observe(self, router_stats: tuple[RouterStats, ...], training: bool) -> None:
        """Passes a tuple of RouterStats, one per router, to the observer in training."""
        if training and self.router_observer is not None:
            self.router_observer.update(router_stats)
