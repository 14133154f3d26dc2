"""The command line `switch-tf COMMAND`: one sentence for a mistake of the user, a traceback for a bug."""

import argparse
import errno
import importlib
import os
import re
import sys
import textwrap
from collections.abc import Sequence

from switch_tf import environment
from switch_tf.cli import paths
from switch_tf.configs import shipped_gin
from switch_tf.configs.choices import nearest
from switch_tf.hardware import host
from switch_tf.installation import quiet
from switch_tf.refusals import Refusal, first_line
from switch_tf.statuses import INTERRUPTED, OUTAGE, REFUSED
from switch_tf.storage import json_lines, places

COMMANDS = {
    "train": "pretrain or fine-tune from gin files, with evaluation between; resumes by itself",
    "compare": "dense against sparse: variants trained on the same batches in turns, or finished runs; table, plots",
    "eval": "the metrics of tasks on checkpoints of a run, with predictions; follows a run that is training",
    "export": "a trained model as a SavedModel, texts in and out, for TensorFlow alone",
    "serve": "a trained model over HTTP, and a page that shows which experts tokens go to",
    "infer": "what a trained model answers to texts, or how probable it finds given targets",
    "convert": "weights of Hugging Face in, with a gin file of their model, and out again",
    "upcycle": "a sparse model whose experts are copies of a dense model's layers, to train further",
    "average": "the mean of the weights of the last checkpoints of a run",
    "shrink": "a model with fewer experts: the most used ones of each layer, or merged ones",
    "verify-layout": "the same loss, gradients and weights under a layout as on one device",
    "compile": "ahead-of-time TPU compile of a run: does it fit, what does it send, how long may a step take",
    "inspect": "parameters, FLOPs and memory of a preset, gin file, run or checkpoint",
    "tasks": "all tasks and mixtures; examples of one, as text and as token ids",
    "vocabulary": "train a SentencePiece vocabulary on text files, for --gin.VOCABULARY",
    "cache": "tokenise a task once, in parallel, for --gin.USE_CACHED_TASKS=True; or store a teacher's predictions",
    "doctor": "is this machine set up right: versions, double wheels, accelerators, writable folders",
}

# Stands below the traceback of an exception that is no Refusal.
_REPORT = "This is a bug of switch_tf and not your mistake: please report it with this traceback and the command."


class _Parser(argparse.ArgumentParser):
    """A parser whose errors name the flag or macro that an unknown flag is probably meant to be."""

    def check_flags(self, words):
        """Refuses unknown flags before argparse complains about missing ones."""
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and not any(flag.startswith(name) for flag in self._option_string_actions):
                self.error(f"unrecognized arguments: {word}")

    def error(self, message):
        unknown = re.search(r"unrecognized arguments: (?:--)?([\w./-]+)", message)
        macro = unknown and unknown[1].upper()
        if unknown and unknown[1].endswith(".gin"):
            message += f". A gin file is given as --gin_file={unknown[1]}"
        elif macro == "MODEL_DIR" and "--run" in self._option_string_actions:
            message += ". The folder of a finished run is given as --run"
        elif unknown and macro not in shipped_gin.macros():
            message += f".{nearest(f'--{unknown[1]}', self._option_string_actions)}"
        elif macro:
            message += (f". {macro} is a macro of the gin files: --gin.{macro}=VALUE, where text needs quotes within "
                        "quotes, as in --gin.MODEL_DIR=\"'runs/x'\"")
        self.exit(REFUSED, f"{self.prog}: {message}\n")  # without argparse's usage, which hides the sentence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    A command is a module with `add_arguments(parser)`, `run(arguments) -> dict` and EXAMPLES, two command lines that
    end its `--help`. The dictionary is the JSON object of `--json`, and its `exit_status`, if any, the status of the
    process.

    Returns:
        0 for success, 1 if the command found a fault, and else one of `statuses`.

    Raises:
        Exception: there is a bug in switch_tf. A note asks to report it, and the status of the process is 1.
    """
    environment.compute_with_tensorflow()
    try:
        return _main(argv)
    except KeyboardInterrupt:  # early, or once more
        print("switch-tf: interrupted.", file=sys.stderr)
        return INTERRUPTED


def _main(argv):
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return refusal.exit_status
    host.skip_tpu_metadata_query()
    quiet.expect_tensorflow(prepares_devices=False)  # a path of a bucket imports it before the command does
    command = importlib.import_module(_module(arguments.command))
    result = {}
    try:
        result = command.run(arguments)
        if arguments.json:
            print(json_lines.dumps(result))
        sys.stdout.flush()
    except Refusal as refusal:
        print(f"switch-tf {arguments.command}: {first_line(refusal)}", file=sys.stderr)
        return refusal.exit_status
    except KeyboardInterrupt:
        print(f"switch-tf {arguments.command}: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except places.BucketError as error:
        print(f"switch-tf {arguments.command}: {error.filename} cannot be reached ({first_line(error.strerror)}); "
              "check its name, your rights and the network, then start the same command again.", file=sys.stderr)
        return REFUSED if error.errno == errno.EACCES else OUTAGE
    except Exception as error:
        error.add_note(_REPORT)
        raise
    return result.get("exit_status", 0)


def _module(command):
    return f"switch_tf.cli.{command.replace('-', '_')}"


def _parse(argv):
    parser = _Parser(prog="switch-tf", description="Switch Transformers in TensorFlow and Keras 3.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.error(f"there is no command {argv[0]!r}.{nearest(argv[0], COMMANDS)} The commands are "
                     f"{', '.join(COMMANDS)}.")
    chosen = next((word for word in argv if word in COMMANDS), None)
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=summary,
                                        formatter_class=argparse.RawDescriptionHelpFormatter)
        subparser.add_argument("--json", action="store_true",
                               help="print one JSON object as the last line of standard output, all else on stderr")
        if name == chosen:
            command = importlib.import_module(_module(name))
            command.add_arguments(subparser)
            notes = textwrap.fill(subparser.epilog or "", 100, break_on_hyphens=False, break_long_words=False)
            subparser.epilog = f"{notes}\n\nexamples:\n{textwrap.indent(command.EXAMPLES.strip(), '  ')}".strip()
    # argparse cannot know the names in `--gin.NAME=VALUE`, nor the flags of Apache Beam behind `--`.
    before, behind = (argv[:argv.index("--")], argv[argv.index("--") + 1:]) if "--" in argv else (argv, [])
    bindings = [word for word in before if word.startswith("--gin.")]
    words = [word for word in before if not word.startswith("--gin.")]
    if words[:1] == [chosen]:
        commands.choices[chosen].check_flags(words)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if behind and not hasattr(arguments, "beam_flags"):
        parser.error(f"{arguments.command} takes nothing behind --, but was given {behind[0]}")
    if behind:
        arguments.beam_flags = behind
    if bindings and not hasattr(arguments, "gin_file"):
        parser.error(f"{arguments.command} takes no gin bindings, but was given {bindings[0]}")
    try:
        paths.check(commands.choices[arguments.command], arguments)
    except Refusal as refusal:
        raise Refusal(f"switch-tf {arguments.command}: {refusal}") from refusal
    arguments.words = argv
    arguments.stream = sys.stderr if arguments.json else sys.stdout  # of texts for people
    arguments.gin_bindings = [word.removeprefix("--gin.") for word in bindings]
    if getattr(arguments, "backend", None) is not None:
        arguments.gin_bindings.append(f"Layout.backend={arguments.backend!r}")
    return arguments
