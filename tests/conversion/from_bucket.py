"""Converts a checkpoint where it is, in a bucket."""

import pathlib
import tempfile

from switch_tf.conversion import formats
from switch_tf.storage import places


def convert(folder, bucket, monkeypatch, output, config=None, **options):
    """Uploads a checkpoint and converts it from there, and checks that no file of it is copied to TMPDIR.

    Args:
        folder: Path of the checkpoint.
        bucket, monkeypatch: Fixtures.
        output: Path of the output.
        config, options: For `formats.convert`.

    Returns:
        Number of bytes of objects that were read.
    """
    place, temporary = places.at(bucket.new_folder()), set()
    places.upload(folder, place)

    class Watched(tempfile.TemporaryDirectory):
        def __exit__(self, *error):
            temporary.update(path.name for path in pathlib.Path(self.name).rglob("*"))
            super().__exit__(*error)

    before = bucket.control()["bytes_read"]
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryDirectory", Watched)
        formats.convert(place, output, formats.SWITCH_TF, config=config, **options)
    assert not temporary & {path.name for path in folder.rglob("*")}
    return bucket.control()["bytes_read"] - before
