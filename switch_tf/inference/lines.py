"""Answers a file's lines, rows or elements in order, and continues after a restart."""

import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from switch_tf import checks
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import json_lines, places
from switch_tf.storage.whole_file import Mirror, reading, write_whole, writing

# Number of a line, its record and its texts. A bad line's record has an `error`.
Line = tuple[int, dict[str, Any], tuple[str, ...]]


def read(examples: Iterable) -> Iterator[Line]:
    """Yields the lines of `data.TextFile.examples` or `data.examples_of_lines`. The first field is the input."""
    for number, example in enumerate(examples):
        if example.texts is None:
            shown = example.raw.decode("utf-8", errors="replace").removeprefix("\ufeff").rstrip("\r\n")
            error = f"{example.fault[:1].upper()}{example.fault[1:]}." if example.fault else "The line is empty."
            yield number, {"input": shown, "error": error}, ()
        else:
            yield number, {"input": example.texts[0]}, example.texts


def answers(lines: Iterable[Line], model: Any, has_targets: bool = False) -> Iterator[list[dict]]:
    """Answers lines in batches, or scores the second text of each if it `has_targets`.

    A `model` without a `batch_size` answers one line at a time.

    Yields:
        A dict for each line, with `input` and `error`, or `target` and `score`, or `output`, `score` and `others`, the
        further results of a beam. `cut` and `target_cut` count tokens beyond the model's length.
    """
    batch_size = model.batch_size or 1
    records, asked = [], []
    for number, record, texts in lines:
        records.append(record)
        try:
            if "error" not in record:
                inputs, target = model.read(texts[0]), None
                if inputs.num_cut:
                    record["cut"] = inputs.num_cut
                if has_targets:
                    target = model.read_target(texts[1])
                    record["target"] = texts[1]
                    if target.num_cut:
                        record["target_cut"] = target.num_cut
                asked.append((number, record, inputs, target))
        except Refusal as error:
            record["error"] = str(error)
        if len(asked) == batch_size or len(records) == 16 * batch_size:
            _answer(asked, model)
            yield records
            records, asked = [], []
    if records:
        _answer(asked, model)
        yield records


def _answer(asked, model):
    if not asked:
        return
    numbers, records, inputs, targets = zip(*asked, strict=True)
    ids = [text.ids for text in inputs]
    if targets[0]:
        for record, score in zip(records, model.score(ids, [text.ids for text in targets]), strict=True):
            record["score"] = score
        return
    for record, results in zip(records, model.answer(ids, list(numbers)), strict=True):
        best, *alternatives = ({"output": result.text, "score": result.score} for result in results)
        record |= best | ({"others": alternatives} if alternatives else {})


class Output:
    """A file of records. A later start with the same settings continues where it ends.

    `num_known`: Records that `after_what_is_there` found.

    Args:
        settings: JSON-able. Everything that the records depend on, kept in `<file>.settings.json`.
    """

    def __init__(self, path: str | pathlib.Path, settings: dict):
        self._path, self._mirror = places.at(path), None
        described = self._path.with_name(self._path.name + ".settings.json")
        self._local = self._path
        if not places.is_local(path):
            self._mirror = Mirror(self._path.parent)
            with reading(path):
                self._local = self._mirror.fetch(self._path.name)
        self.num_known = 0
        if self._local.exists() and self._local.stat().st_size:
            try:
                saved = json_lines.load(described)
            except places.BucketError as error:
                raise Refusal(f"{described} cannot be read ({first_line(error)}); try again.") from error
            except (OSError, ValueError):
                saved = None
            if not isinstance(saved, dict):
                raise Refusal(f"{self._path} exists and is no unfinished output of this command; name another file.")
            for name in settings:
                if saved.get(name) != settings[name]:
                    raise Refusal(f"{self._path} was begun with {name} {saved.get(name)!r}, and now it is "
                                  f"{settings[name]!r}; use the same, or name another file.")
            with writing(self._path):
                json_lines.mend_end(self._local)
        else:
            write_whole(described, json.dumps(settings, indent=1) + "\n")
        with writing(self._path):
            self._file = open(self._local, "ab")  # noqa: SIM115  closed by `close`

    def after_what_is_there(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Compares records with their lines, and returns the lines without a record."""
        lines = iter(lines)
        for number, record in enumerate(json_lines.lines(self._local, self._path), 1):
            try:
                known = json_lines.loads(record)["input"]
            except (ValueError, KeyError, TypeError):
                raise Refusal(f"Line {number} of {self._path} is no record of this command; name another "
                              "file.") from None
            line = next(lines, None)
            if not line or line[1]["input"] != known:
                actual = "it ends before" if not line else f"that is {checks.shown(line[1]['input'])}"
                raise Refusal(f"Line {number} of {self._path} answers {checks.shown(known)}, and of the input "
                              f"{actual}; give the same input, or name another file.")
            self.num_known = number
        return lines

    def write(self, records: list[dict]) -> None:
        """Appends and flushes records. A kill does not lose them, in a bucket after a minute."""
        with writing(self._path):
            self._file.write(format_lines(records).encode())
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        if self._mirror:
            with writing(self._path):
                self._mirror.close()


def format_lines(records: list[dict]) -> str:
    """Returns JSON lines. Escapes lone surrogates for UTF-8."""
    lines = "".join(json_lines.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return lines.encode(errors="backslashreplace").decode()
