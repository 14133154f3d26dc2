"""The vocabulary that a model brings along: the copy in its run folder, or the file of a converted or foreign one."""

import pathlib

from switch_tf.checkpoints import folders, run_config
from switch_tf.conversion import huggingface_vocabulary
from switch_tf.conversion.huggingface_vocabulary import Vocabulary
from switch_tf.data import stored_vocabularies
from switch_tf.data.stored_vocabularies import SENTENCEPIECE, Stored
from switch_tf.refusals import Refusal


def find(source: str | pathlib.Path, local: pathlib.Path | None = None) -> Vocabulary:
    """Finds the vocabulary of a run, of one of its checkpoints, or of weights of any other format.

    A vocabulary that cannot be read is a `reason` and not an error, because the weights are useful without it.

    Args:
        source: Path of the folder.
        local: Path of a local copy of it, if there is one.
    """
    folder = folders.run_folder_of(source)
    if not run_config.is_in(folder):
        return huggingface_vocabulary.find(local or source, source)
    try:
        return _of_run(folder)
    except Refusal as error:
        return Vocabulary(reason=str(error))


def _of_run(folder):
    stored, *others = {Stored.from_data(fields) for fields in run_config.read(folder).vocabularies.values()}
    if others:
        return Vocabulary(reason=f"{folder} has one for inputs and another for targets, and VOCABULARY replaces both.")
    choice = stored_vocabularies.choice_of(stored, folder)
    if choice is None:
        return Vocabulary(reason=f"no VOCABULARY selects {stored.name!r} of {folder}; train on its own task.")
    if stored.kind != SENTENCEPIECE:
        return Vocabulary(name=choice)
    return Vocabulary(content=stored_vocabularies.path_of(stored, folder).read_bytes())
