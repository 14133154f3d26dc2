"""Closed-book question answering (arXiv 2002.08910): questions without a text that contains the answer.

`natural_questions`, `web_questions`, `trivia_qa`, and `closed_book_qa`, the mixture of the three. The model is trained
on one answer and evaluated against all of them. As in that paper, the last tenth of the training questions is for
validation, cut where ORQA (arXiv 1906.00300) cut it, and the published development or test set is the test set.

The Switch paper fine-tunes models that were pretrained by plain span corruption, without the salient span masking of
arXiv 2002.08909, and so there is no task that masks salient spans.
"""

from collections.abc import Callable

import seqio

from switch_tf.tasks import text_to_text
from switch_tf.tasks.t5_parts import metrics, postprocessors

# Training examples.
SIZES = {"natural_questions": 79168, "web_questions": 3417, "trivia_qa": 78785}


def question_to_answer(prefix: str, find_answers: Callable) -> Callable:
    """Returns a preprocessor of examples with a "question".

    Args:
        prefix: str. Beginning of the inputs.
        find_answers: Function from an example to the answer to train on and the list of all answers.
    """

    @seqio.map_over_dataset
    def convert(example):
        target, answers = find_answers(example)
        return {"inputs": prefix + example["question"], "targets": target, "answers": answers}

    return text_to_text.plain(convert)


def _add_task(name, tfds_name, step, metric, test):
    size = SIZES[name]
    text_to_text.add_task(
        name,
        tfds_name,
        [step],
        metric_fns=[metric],
        postprocess_fn=postprocessors.qa,
        splits={"train": f"train[:{size}]", "validation": f"train[{size}:]", "test": test},
    )


_add_task(
    "natural_questions",
    "natural_questions_open:1.0.0",
    question_to_answer("nq question: ", lambda example: (example["answer"][0], example["answer"])),
    metrics.squad,
    test="validation",
)
_add_task(
    "web_questions",
    "web_questions:1.0.0",
    question_to_answer("wq question: ", lambda example: (example["answers"][0], example["answers"])),
    metrics.squad,
    test="test",
)
_add_task(
    "trivia_qa",
    "trivia_qa/unfiltered.nocontext:1.1.0",
    question_to_answer(
        "trivia_qa question: ", lambda example: (example["answer"]["value"], example["answer"]["aliases"])
    ),
    metrics.trivia_qa,
    test="validation",  # the answers of the test set are not public
)

text_to_text.add_mixture("closed_book_qa", SIZES)
