"""Router losses computed over all sparse layers of a stack at once, as in Hugging Face's transformers."""

from typing import Any

from keras import ops

from switch_tf import losses
from switch_tf.layers import Router
from switch_tf.metrics import Mean, RouterStats


class JoinedRouter(Router):
    """A router that reports a losses.Balance instead of its load-balancing loss, for `join`."""

    def _loss_of(self, balance):
        return balance


def join(router_stats: tuple[RouterStats, ...], is_omitted: bool) -> tuple[RouterStats, ...]:
    """Computes the router losses of a whole stack and splits them evenly between its routers.

    Tokens of all layers count as tokens of one layer. The fraction of tokens that chose an expert is averaged over
    layers before it is multiplied by probabilities, so layers can balance one another.

    Args:
        router_stats: RouterStats of each `JoinedRouter` of the stack.
        is_omitted: bool. Whether both losses are 0.
    """
    balances: list[Any] = [stats.load_balancing_loss for stats in router_stats]
    if all(isinstance(balance, losses.Balance) for balance in balances):  # not for policies that balance themselves
        fraction = sum(balance.fraction for balance in balances) / max(1, len(balances))
        balances = [balance._replace(fraction=fraction).mean for balance in balances]

    def share(mean):
        return Mean(ops.zeros_like(mean.total) if is_omitted else mean.total / len(router_stats), mean.weight)

    return tuple(stats._replace(load_balancing_loss=share(balance), router_z_loss=share(stats.router_z_loss))
                 for stats, balance in zip(router_stats, balances, strict=True))
