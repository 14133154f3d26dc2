"""Converts a checkpoint in a bucket and sees which of its files were copied to be read."""

import importlib

from switch_tf.conversion import converting, formats
from switch_tf.storage import places


def convert(folder, bucket, monkeypatch, reader, output, config, **options):
    """Uploads a checkpoint and converts it from there.

    Args:
        folder: Path of the checkpoint.
        bucket, monkeypatch: Fixtures.
        reader: Full name of the function that reads it.
        output: Path of the output.
        config, options: For `converting.convert`.

    Returns:
        Names of the files that the reader was given, in order.
    """
    place = places.at(bucket.new_folder())
    places.upload(folder, place)
    module, _, name = reader.rpartition(".")
    copied, read = [], getattr(importlib.import_module(module), name)

    def read_and_list(local, config):
        copied.extend(path.name for path in local.iterdir())
        return read(local, config)

    monkeypatch.setattr(reader, read_and_list)
    converting.convert(place, output, formats.SWITCH_TF, config=config, **options)
    return sorted(copied)
