"""Keras layers of T5 and the Switch Transformer."""

from switch_tf.layers.attention import MultiHeadAttention
from switch_tf.layers.dropout import Dropout
from switch_tf.layers.embedding import LogitsDense, TokenEmbedding
from switch_tf.layers.experts import ExpertFeedForward
from switch_tf.layers.feed_forward import FeedForward
from switch_tf.layers.moe import SwitchFeedForward
from switch_tf.layers.normalization import RMSNorm
from switch_tf.layers.position_bias import RelativePositionBias
from switch_tf.layers.routing import Router
from switch_tf.layers.switch_attention import SwitchSelfAttention

__all__ = ["Dropout", "ExpertFeedForward", "FeedForward", "LogitsDense", "MultiHeadAttention", "RMSNorm",
           "RelativePositionBias", "Router", "SwitchFeedForward", "SwitchSelfAttention",
           "TokenEmbedding"]
