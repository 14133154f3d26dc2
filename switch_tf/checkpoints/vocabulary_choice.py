"""The VOCABULARY of a run: its own, or from the run that it starts from."""

from switch_tf.checkpoints import folders, run_config
from switch_tf.configs import names
from switch_tf.configs.run import Run
from switch_tf.data import vocabularies
from switch_tf.refusals import Refusal
from switch_tf.storage import outputs, places


def choose(run: Run) -> str | None:
    """Returns the VOCABULARY of a run: its own choice, or else from the run that it starts from."""
    is_resumed = bool(folders.steps(folders.checkpoints_of(run.model_dir)))
    if run.vocabulary is not None:
        folder = places.at(run.model_dir)
        if is_resumed and "://" not in run.vocabulary and run.vocabulary not in names.vocabularies() \
                and not places.at(run.vocabulary).exists() and run_config.is_in(folder):
            for stored in map(vocabularies.Stored.from_data, run_config.read(folder).vocabularies.values()):
                if stored.name == run.vocabulary and stored.file:
                    raise Refusal(f"VOCABULARY {run.vocabulary!r} is not there any more; this run keeps a copy of it: "
                                  f"--gin.VOCABULARY=\"'{folder / stored.file}'\".")
        return run.vocabulary
    if run.initial_checkpoint is None:
        return None
    # A resumed run has its own copy, and its source may be gone.
    folder = folders.run_folder_of(run.model_dir if is_resumed else run.initial_checkpoint)
    if not run_config.is_in(folder):
        return None
    task_vocabularies = vocabularies.text_vocabularies_of(run.mixture_or_task_name)
    try:
        copies = set(map(vocabularies.Stored.from_data, run_config.read(folder).vocabularies.values()))
        if len(copies) != 1 or not task_vocabularies:  # or the task takes no other
            return None
        (stored,) = copies
        if all(vocabularies.name_of(vocabulary) == stored.name for vocabulary in task_vocabularies):
            return None  # by name, because reading it may need the network
        choice = vocabularies.choice_of(stored, folder)
    except Refusal as error:
        outputs.say(f"The vocabulary that {folder} keeps is not used: {error}")
        return None
    if choice is not None:
        outputs.say(f"VOCABULARY is that of {folder}: {choice}.")
    return choice
