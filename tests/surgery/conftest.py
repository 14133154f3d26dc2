"""The seqio task of the tests of training."""

from tests.training.conftest import sentences_task

__all__ = ["sentences_task"]
