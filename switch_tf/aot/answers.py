"""The compiler's answer to a question, from the cache if possible."""

import json
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from switch_tf.aot import answer_cache, estimate, picture, result
from switch_tf.storage import places


class Answer(NamedTuple):
    """An answer that is not written yet.

    `result`: JSON object of `result.as_json`; `cache_file`: file for the next time, None if the answer comes from it;
    `files`: path -> content of the programs and the picture that were asked for.
    """

    result: dict
    cache_file: pathlib.Path | None
    files: dict[pathlib.Path, str | bytes]

    def write(self, say: Callable[[str], None]) -> bool:
        """Writes all files; returns whether all but the cache file could be written. `say` prints why not."""
        if self.cache_file is not None:
            answer_cache.write(self.cache_file, json.dumps(self.result), say)
        return all(answer_cache.write(path, content, say) for path, content in self.files.items())


def get(make_question: Callable[[], estimate.Question], configuration: str, topology: str, is_full: bool,
        save: str | pathlib.Path, plot: str | pathlib.Path, say: Callable[[str], None]) -> Answer:
    """Returns the answer to a question, which is compiled unless it is cached and needs no other files.

    Args:
        make_question: Function to the question.
        configuration: Text on which the question depends, besides the topology and `is_full`.
        topology: Name of the pod.
        is_full: Whether all layers are compiled.
        save: Folder of the programs, or None.
        plot: Path of the picture, or None.
        say: Function that prints a line.

    Raises:
        Refusal: The question has a contradiction.
    """
    file = answer_cache.answer_file(configuration, topology, str(is_full))
    if file.exists() and save is None and plot is None:
        say(f"The compiler was asked before; its answer is {file}.")
        return Answer(json.loads(file.read_text()), None, {})
    answer, files = compile_question(make_question(), is_full, save, plot, say)
    return Answer(answer, file, files)


def compile_question(question: estimate.Question, is_full: bool, save: str | pathlib.Path, plot: str | pathlib.Path,
                     say: Callable[[str], None]) -> tuple[dict, dict]:
    """Compiles a question; returns the result and the files of an `Answer`. For the arguments see `get`."""
    files = {}

    def keep(name, text):
        if save is not None:
            files[places.at(save) / name] = text

    answer = estimate.make(question, is_full, say, keep)
    as_json = result.as_json(question, answer)
    if plot is not None and answer.schedule is not None:
        files[places.at(plot)] = picture.draw(answer.schedule, answer.parts, answer.compiled[-1], as_json["layers"])
    return as_json, files
