"""One load-balancing loss and one z-loss for all sparse layers of a stack, as Hugging Face's transformers has them."""

from keras import ops

from switch_tf import losses
from switch_tf.layers import Router
from switch_tf.metrics import Mean, RouterStats


class JoinedRouter(Router):
    """A router that leaves its load-balancing loss to `join`: its statistics hold a losses.Balance in place of it."""

    def _loss_of(self, balance):
        return balance


def join(router_stats: tuple[RouterStats, ...], is_omitted: bool) -> tuple[RouterStats, ...]:
    """Gives each router its share of the losses that a stack has as a whole, so that shares add up to them.

    As if the layers' tokens stood behind one another in one layer: the shares of tokens that chose an expert are
    averaged over layers before they are multiplied with probabilities, so that layers can even one another out.

    Args:
        router_stats: of each `JoinedRouter` of the stack.
        is_omitted: bool. There are no such losses.
    """
    balances = [stats.load_balancing_loss for stats in router_stats]
    if all(isinstance(balance, losses.Balance) for balance in balances):  # none is where a policy balances by itself
        fraction = sum(balance.fraction for balance in balances) / max(1, len(balances))
        balances = [balance._replace(fraction=fraction).mean for balance in balances]

    def share(mean):
        return Mean(ops.zeros_like(mean.total) if is_omitted else mean.total / len(router_stats), mean.weight)

    return tuple(stats._replace(load_balancing_loss=share(balance), router_z_loss=share(stats.router_z_loss))
                 for stats, balance in zip(router_stats, balances, strict=True))
