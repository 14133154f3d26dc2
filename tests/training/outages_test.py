"""Failures of disks, buckets and networks have another exit status than mistakes of the user."""

import errno
import gzip
import zlib

import pytest
import tensorflow as tf

from switch_tf import statuses
from switch_tf.checkpoints.folders import BrokenCheckpoint
from switch_tf.comparison.description import naming
from switch_tf.data.example_files import BadData, TextFile, UnreachableData
from switch_tf.refusals import Outage, Refusal
from switch_tf.training import stopping
from switch_tf.training.train_step import Divergence


def refusal(cause=None, kind=Refusal):
    try:
        raise kind("A sentence.") from cause
    except Refusal as error:
        return error


def op_error(name, text="text"):
    return getattr(tf.errors, name)(None, None, text)


def of_text_source(error):
    """Returns an error as TensorFlow passes it on from a function of a dataset."""

    def call():
        raise error

    function = tf.data.Dataset.range(1).map(lambda _: tf.py_function(call, [], tf.int64))
    with pytest.raises(tf.errors.OpError) as raised:
        next(iter(function))
    return raised.value


@pytest.mark.parametrize(("cause", "at_start", "later"), [
    (None, 2, 2),
    (ValueError("text"), 2, 2),
    (OSError(errno.EACCES, "text"), 2, 4),
    (OSError(errno.ENOSPC, "text"), 4, 4),
    (gzip.BadGzipFile("text"), 2, 2),
    (op_error("UnavailableError"), 4, 4),
    (op_error("NotFoundError"), 2, 4),
    (op_error("UnknownError", "Input/output error"), 2, 4),
    (op_error("OutOfRangeError", "File too large"), 2, 4),
    (op_error("DataLossError"), 2, 2),
    (BrokenCheckpoint("text"), 2, 3),
])
def test_the_status_depends_on_the_cause_and_on_whether_the_run_has_begun(cause, at_start, later):
    error = refusal(refusal(cause))
    with pytest.raises(Refusal), stopping.at_start():
        raise error
    assert error.exit_status == at_start
    error = refusal(refusal(cause))
    stopping.classify(error)
    assert error.exit_status == later


def test_the_error_of_a_bucket_counts_for_more_than_the_os_error_made_of_it():
    os_error = OSError(errno.EIO, "text")
    os_error.__cause__ = op_error("InvalidArgumentError")
    error = refusal(os_error)
    stopping.classify(error)
    assert error.exit_status == statuses.REFUSED


@pytest.mark.parametrize(("error", "status"), [
    (BadData("a.txt, line 1: it is empty."), 2), (UnreachableData("a.txt cannot be read: Stale file handle."), 4),
    (ValueError("a bug of a task"), 2)])
def test_what_a_source_of_text_raises_is_known_behind_tensorflow(error, status):
    error = refusal(of_text_source(error))
    stopping.classify(error)
    assert error.exit_status == status


@pytest.mark.parametrize(("failure", "kind"), [
    (OSError(errno.EIO, "Input/output error"), UnreachableData), (gzip.BadGzipFile("Not a gzipped file"), BadData),
    (zlib.error("invalid block"), BadData)])
def test_a_file_that_cannot_be_read_is_not_a_damaged_one(tmp_path, failure, kind):
    (tmp_path / "a.txt").write_text("text\n")
    file = TextFile(str(tmp_path / "a.txt"), ["text"])
    with pytest.raises(BadData) as raised, file._opened():
        raise failure
    assert type(raised.value) is kind


@pytest.mark.parametrize(("kind", "status"), [(Divergence, 3), (Outage, 4), (Refusal, 2)])
def test_the_status_stays_when_a_comparison_names_the_variant(kind, status):
    with pytest.raises(Refusal, match="dense: A sentence.") as raised, naming("dense"):
        raise kind("A sentence.")
    stopping.classify(raised.value)
    assert raised.value.exit_status == status
