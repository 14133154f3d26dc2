"""Files that grow while a run is open, in a bucket, which cannot append: a local copy grows and is uploaded again."""

import contextlib
import pathlib
import tempfile
import threading
import time
from typing import Any

from switch_tf.refusals import Outage
from switch_tf.storage import places, whole_file

# Seconds between uploads: four requests a minute and file. Longer if uploads would take over a twentieth of the time.
PERIOD = 15.0
_LONGEST = 60.0
_SHARE = 20


class Mirror:
    """A local folder whose files appear in a folder of a bucket within a minute.

    Args:
        folder: Path of a folder in a bucket.

    Attributes:
        local: Path of the local folder. Its files may grow, and may be in folders.
    """

    def __init__(self, folder: Any):
        self._folder = places.at(folder)
        self._temporary = tempfile.TemporaryDirectory()
        self.local = pathlib.Path(self._temporary.name)
        self._sizes: dict[pathlib.Path, int] = {}  # what is in the bucket
        self._uploading, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._thread.start()

    def fetch(self, name: str) -> pathlib.Path:
        """Returns the local path of a file, with its contents in the bucket if it is there.

        Raises:
            OSError: It cannot be read. Nothing more is uploaded.
        """
        local = self.local / name
        try:
            if (self._folder / name).is_file():
                self._sizes[local] = local.write_bytes((self._folder / name).read_bytes())
        except BaseException:
            self._ended.set()
            raise
        return local

    def flush(self) -> None:
        """Uploads what has been written.

        Raises:
            OSError: A file cannot be written.
        Outage: The files no longer belong to this process.
        """
        with self._uploading:
            for name, file in places.files_in(self.local):
                if (size := file.stat().st_size) != self._sizes.get(file):
                    whole_file.put(self._folder / name, file.read_bytes())
                    self._sizes[file] = size

    def close(self) -> None:
        """Uploads what has been written, and removes the local folder.

        Raises:
            OSError: A file cannot be written.
        """
        self._ended.set()
        self._thread.join()
        try:
            self.flush()
        finally:
            self._temporary.cleanup()

    def _run(self):
        wait = PERIOD
        while not self._ended.wait(wait):
            started = time.monotonic()
            # Tried again; the next checkpoint flushes and reports it, also that the folder was lost.
            with contextlib.suppress(OSError, Outage):
                self.flush()
            wait = min(max(PERIOD, _SHARE * (time.monotonic() - started)), _LONGEST)
