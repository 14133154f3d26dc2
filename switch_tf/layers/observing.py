"""Passes router statistics to an observer during training."""


class Observed:
    """Base class of layers and models that pass their router statistics to an observer. Precedes Keras' base class.

    Subclasses define `routers`, a dict from the name of each router to its number of experts.

    Attributes:
        router_observer: object or None. Its method `update` takes a tuple of RouterStats and is traced with the call.
    """

    router_observer = None

    def observe(self, router_stats, training: bool) -> None:
        """Passes a tuple of RouterStats, one per router, to the observer in training."""
        if training and self.router_observer is not None:
            self.router_observer.update(router_stats)
