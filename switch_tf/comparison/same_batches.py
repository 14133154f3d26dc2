"""Whether all variants of a seed are given the same batches: a hash of every batch's tokens, kept beside the runs."""

import hashlib
import json
import pathlib

from switch_tf.refusals import Refusal
from switch_tf.storage.whole_file import write_whole, writing


class SameBatches:
    """Hashes of the batches of one seed, written by whoever is at a step first, and held against all others.

    A run that goes on after a kill is held against what it was given before, too.

    Args:
        path: of a file of JSON lines; what it holds already counts.
    """

    def __init__(self, path):
        self._path = pathlib.Path(path)
        self._known = {}
        self._new = []
        if self._path.exists():
            text = self._path.read_text(errors="replace")
            if not text.endswith("\n"):  # torn by a kill; the next one who is there writes it again
                text = text[:text.rfind("\n") + 1]
                write_whole(self._path, text)
            for line in text.splitlines():
                try:
                    record = json.loads(line)
                    self._known[record["step"]] = record["variant"], record["hash"]
                except (ValueError, RecursionError, KeyError, TypeError):
                    continue  # no record of a batch

    def look(self, variant: str, step: int, batches: dict) -> None:
        """Takes up what a variant trains on after `step`: dict of <int32>[steps, batch, length].

        Raises:
            Refusal: it is not what another one, or the same one before, was given.
        """
        arrays = [(name.encode(), batches[name].numpy()) for name in sorted(batches)]
        for index in range(len(arrays[0][1])):
            digest = hashlib.blake2b(digest_size=8)
            for name, array in arrays:
                digest.update(name)
                digest.update(array[index].tobytes())
            self._check(variant, step + index, digest.hexdigest())

    def _check(self, variant, step, found):
        if step not in self._known:
            self._known[step] = variant, found
            self._new.append(step)
        elif self._known[step][1] != found:
            raise Refusal(f"The batch after step {step} of {variant!r} is not the one that "
                          f"{self._known[step][0]!r} was given, so they cannot be compared: the data, or the "
                          "order in which they are read, changed. Start anew in another folder.")

    def write(self) -> None:
        """Puts down what is new."""
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a") as file:
                for step in self._new:
                    variant, digest = self._known[step]
                    file.write(json.dumps({"step": step, "variant": variant, "hash": digest}) + "\n")
        self._new.clear()
