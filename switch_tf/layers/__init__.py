"""Keras layers of T5 and the Switch Transformer."""

from switch_tf.layers.attention import MultiHeadAttention, RelativePositionBias, SwitchSelfAttention
from switch_tf.layers.basic import Dropout, LogitsDense, RMSNorm, TokenEmbedding
from switch_tf.layers.feed_forward import ExpertFeedForward, FeedForward
from switch_tf.layers.moe import SwitchFeedForward
from switch_tf.layers.routing import Router

__all__ = ["Dropout", "ExpertFeedForward", "FeedForward", "LogitsDense", "MultiHeadAttention", "RMSNorm",
           "RelativePositionBias", "Router", "SwitchFeedForward", "SwitchSelfAttention",
           "TokenEmbedding"]
