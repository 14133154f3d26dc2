"""Router statistics handed to an observer while a layer or a model is trained."""


class Observed:
    """A layer or model that hands the statistics of its routers to an observer; a base class before Keras'.

    `router_observer`: object with a method `update`, which takes a tuple of RouterStats and is traced with the call,
    or None. A subclass has `routers`, a dict from the name of each of its routers to its number of experts.
    """

    router_observer = None

    def observe(self, router_stats, training: bool) -> None:
        """Hands over a tuple of RouterStats, one for each router, in training."""
        if training and self.router_observer is not None:
            self.router_observer.update(router_stats)
