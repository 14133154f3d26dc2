"""`switch-tf infer`: predictions of a trained model for texts, or the likelihoods of given targets."""

import argparse
import contextlib
import sys

from etils import epy
from tqdm import tqdm

from switch_tf.checkpoints.run_folder import select_one
from switch_tf.cli import options
from switch_tf.refusals import Refusal
from switch_tf.storage import lock, places

with epy.lazy_imports():  # which import TensorFlow, so arguments are checked first
    from switch_tf import data
    from switch_tf.inference import lines

EXAMPLES = r"""
switch-tf infer --run runs/first --input lines.txt --output answers.jsonl
switch-tf infer --run runs/first --interactive
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the run, its checkpoint, the files, the sampler and the gin arguments."""
    options.add_decoding_arguments(parser)
    parser.add_argument("--input", metavar="FILE",
                        help="a file of any kind that training reads (.txt, .jsonl, .json, .tsv, .csv, each also as "
                             ".gz), or lines of text, or JSON lines with --field; - for standard input")
    parser.add_argument("--output", default="-", metavar="FILE",
                        help="JSON lines, gone on with where it ends; - (default) for standard output")
    parser.add_argument("--field", metavar="NAME",
                        help="key or column of the text, or the column's number in a table without a header (default: "
                             "as in training)")
    parser.add_argument("--score", action="store_true",
                        help="the log-likelihood of given targets, in --target_field")
    parser.add_argument("--target_field", metavar="NAME", help="see --score (default: as in training)")
    parser.add_argument("--interactive", action="store_true", help="answer what is typed, line by line")
    parser.add_argument("--batch_size", at_least=1, default=32,
                        help="lines at a time (default 32)")


def run(arguments: argparse.Namespace) -> dict:
    """Answers the input; returns the numbers of lines and errors."""
    _check(arguments)
    folder = options.folder_of(arguments)
    checkpoint = select_one(folder, arguments.step)
    with contextlib.nullcontext() if arguments.output == "-" else lock.held(arguments.output):
        _, model, identity = options.load_text_model(
            arguments, folder, checkpoint, None if arguments.interactive else arguments.batch_size)
        if arguments.interactive:
            return {"lines": lines.converse(model, sys.stdin.buffer)}
        settings = {"run": str(folder.resolve()), **identity, "sampler": str(model.sampler)}
        counts = _answer(arguments, model, settings)
    print(f"{counts['lines']} lines answered, {counts['errors']} of them with an error, {counts['cut']} cut to "
          f"{model.inputs_length} tokens.", file=sys.stderr)
    return {"run": str(folder), "step": identity["step"], "output": arguments.output, **counts}


def _check(arguments):
    """Refuses arguments that do not go together."""
    file_arguments = (arguments.input, arguments.output != "-", arguments.field, arguments.score)
    if arguments.interactive and any(file_arguments):
        raise Refusal("--interactive answers what is typed; leave out --input, --output and --score, and --field.")
    if not arguments.interactive and not arguments.input:
        raise Refusal("Give --input, a file of lines or - for standard input, or --interactive.")
    if arguments.input not in (None, "-") and not places.at(arguments.input).is_file():
        raise Refusal(f"--input must be a file, or - for standard input; {arguments.input!r} is none.")
    output = places.at(arguments.output)
    if arguments.output != "-" and (
            output.exists() and not output.is_file() or places.is_local(output) and not output.parent.is_dir()):
        raise Refusal(f"--output must be a file in a folder that is there, or - for standard output, not "
                      f"{arguments.output!r}.")
    if arguments.input not in (None, "-") and places.at(arguments.input).resolve() == output.resolve():
        raise Refusal("--output must be another file than --input.")
    options.check_decoding(arguments)
    if arguments.target_field and not arguments.score:
        raise Refusal("--target_field goes with --score; without it targets are not read.")
    if arguments.score and arguments.sampler != "greedy":
        raise Refusal("--score decodes nothing; leave out --sampler.")


def _answer(arguments, model, settings):
    """Answers the lines of the input that the output does not hold yet, and shows the progress."""
    from_input = arguments.input == "-"
    form = None if from_input else data.kind_of(arguments.input)
    if form in (None, "lines"):  # without an ending, chosen fields are those of JSON objects
        form = "json" if arguments.field or arguments.score else "lines"
    fields = lines.choose_fields(arguments.field, arguments.target_field, arguments.score, model.features.fields, form)
    settings = {**settings, "fields": fields if form != "lines" else None, "score": arguments.score}
    counts = {"lines": 0, "errors": 0, "cut": 0}
    with contextlib.ExitStack() as stack:
        if from_input:
            examples, total = data.examples_of_lines(sys.stdin.buffer, form, fields), None
        else:
            file = data.TextFile(arguments.input, fields, form)
            examples, total = file.examples(), file.num_lines()
        remaining, num_known, output = lines.read(examples), 0, None
        if arguments.output != "-":
            output = stack.enter_context(contextlib.closing(lines.Output(arguments.output, settings)))
            remaining, num_known = output.after_what_is_there(remaining), output.num_known
            if num_known:
                print(f"Going on after the {num_known} lines that {arguments.output} holds.", file=sys.stderr)
        progress = stack.enter_context(tqdm(total=total, initial=num_known, desc=f"Step {settings['step']}",
                                            unit=" lines", file=sys.stderr, dynamic_ncols=True, disable=None))
        for records in lines.answers(remaining, model, arguments.score):
            if output:
                output.write(records)
            else:
                print(lines.as_lines(records), end="", file=arguments.stdout, flush=True)
            progress.update(len(records))
            counts["lines"] += len(records)
            counts["errors"] += sum("error" in record for record in records)
            counts["cut"] += sum("cut" in record for record in records)
    return counts
