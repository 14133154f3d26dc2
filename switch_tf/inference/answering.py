"""Answers to a whole input, a file or standard input, written to a file or standard output."""

import contextlib
import sys
from collections.abc import Sequence

from tqdm import tqdm

from switch_tf import data
from switch_tf.inference import lines
from switch_tf.inference.text_model import TextModel


def answer(model: TextModel, source: str, form: str, fields: Sequence[str | int], output: str, settings: dict,
           has_targets: bool, title: str) -> dict[str, int]:
    """Answers the lines of an input that the output does not hold yet, and shows the progress.

    Args:
        model: TextModel.
        source: Path of a file, or "-" for standard input.
        form, fields: Form and fields of the input, see `input_fields`.
        output: Path of a file, or "-" for standard output.
        settings: Everything that the answers depend on besides `fields` and `has_targets`, see `lines.Output`.
        has_targets: Whether the likelihoods of targets are wanted instead of predictions.
        title: Beginning of the progress bar.

    Returns:
        Numbers of `lines`, of `errors` and of lines that were `cut`.

    Raises:
        Refusal: The input cannot be read, or the output holds other answers or cannot be written.
    """
    settings = {**settings, "fields": fields if form != "lines" else None, "score": has_targets}
    with contextlib.ExitStack() as stack:
        if source == "-":
            examples, total = data.examples_of_lines(sys.stdin.buffer, form, fields), None
        else:
            file = data.TextFile(source, fields, form)
            examples, total = file.examples(), file.num_lines()
        records = stack.enter_context(contextlib.closing(
            lines.Printed() if output == "-" else lines.Output(output, settings)))
        remaining = records.after_what_is_there(lines.read(examples))
        if records.num_known:
            print(f"Going on after the {records.num_known} lines that {output} holds.", file=sys.stderr)
        progress = stack.enter_context(tqdm(total=total, initial=records.num_known, desc=title, unit=" lines",
                                            file=sys.stderr, dynamic_ncols=True, disable=None))
        return lines.answer_all(remaining, records, model, has_targets, progress)
