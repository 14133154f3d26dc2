"""Checks that all variants of a seed train on the same batches, by hashes in a file beside the runs."""

import hashlib
import json
import pathlib

from switch_tf.refusals import Refusal
from switch_tf.storage import json_lines, places
from switch_tf.storage.whole_file import write_whole, writing


class SameBatches:
    """Hashes of the batches of a seed. The first variant at a step records the hash, and the others are compared.

    A run that continues after a kill is compared with its earlier batches, too.

    Args:
        path: Path of a file of JSON lines, which may have hashes already.
    """

    def __init__(self, path: str | pathlib.Path):
        self._path = places.at(path)
        self._known = {}
        self._new = []
        if self._path.exists():
            text = self._path.read_text(errors="replace")
            if not text.endswith("\n"):  # torn by a kill; the next variant at that step writes it again
                text = text[:text.rfind("\n") + 1]
                write_whole(self._path, text)
            for line in text.splitlines():
                try:
                    record = json.loads(line)
                    self._known[record["step"]] = record["variant"], record["hash"]
                except (ValueError, RecursionError, KeyError, TypeError):
                    continue  # not a record of a batch

    def look(self, variant: str, step: int, batches: dict) -> None:
        """Compares or records the batches after `step` of a variant.

        Args:
            variant: str. Name of the variant.
            step: int.
            batches: dict of <int32>[steps, batch, length].

        Raises:
            Refusal: another variant, or this one before, had another batch.
        """
        arrays = [(name.encode(), batches[name].numpy()) for name in sorted(batches)]
        for index in range(len(arrays[0][1])):
            digest = hashlib.blake2b(digest_size=8)
            for name, array in arrays:
                digest.update(name)
                digest.update(array[index].tobytes())
            self._check(variant, step + index, digest.hexdigest())

    def _check(self, variant, step, digest):
        if step not in self._known:
            self._known[step] = variant, digest
            self._new.append(step)
        elif self._known[step][1] != digest:
            raise Refusal(f"The batch after step {step} of {variant!r} is not the one that "
                          f"{self._known[step][0]!r} was given, so they cannot be compared: the data, or the "
                          "order in which they are read, changed. Start anew in another folder.")

    def write(self) -> None:
        """Appends new hashes to the file."""
        lines = ""
        for step in self._new:
            variant, digest = self._known[step]
            lines += json.dumps({"step": step, "variant": variant, "hash": digest}) + "\n"
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            json_lines.append_text(self._path, lines)
        self._new.clear()
