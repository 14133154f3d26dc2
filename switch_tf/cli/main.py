"""The command line `switch-tf COMMAND`."""

import argparse
import contextlib
import errno
import importlib
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import switch_tf
from switch_tf import checks, environment
from switch_tf.cli.parser import Parser, option
from switch_tf.configs.choices import check_choice, nearest
from switch_tf.hardware import host
from switch_tf.installation import quiet
from switch_tf.refusals import Refusal, first_line
from switch_tf.statuses import INTERRUPTED, OUTAGE, REFUSED
from switch_tf.storage import json_lines, outputs, places

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

# Module -> commands. The rest have a module of their name.
_MODULES = {"answering": "infer serve export", "weights": "convert upcycle average shrink", "tasks": "vocabulary cache",
            "runs": "train compare eval", "compile": "verify_layout"}
_JSON = option("--json", "print one JSON object as the last line of standard output, all else on stderr")
_PATHS = ("FILE", "FOLDER", "PATH", "RUN", "CHECKPOINT")
# Below a bug's traceback.
_REPORT = "This is a bug of switch_tf and not your mistake: please report it with this traceback and the command."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    A command has NAME_ARGUMENTS, options and notes on them, `run_NAME(arguments)` and NAME_EXAMPLES, the end of its
    `--help`.
    `run_NAME` returns the JSON object of `--json`, or a tuple of it and a text to print. Its `exit_status` sets the
    status of the process.

    Returns:
        0 for success, 1 if the command found a fault, and else one of `statuses`.

    Raises:
        Exception: A bug, with a note that asks to report it.
    """
    environment.compute_with_tensorflow()
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # a second one, while the first is handled
        outputs.say("switch-tf: interrupted.")
        return INTERRUPTED


def parts_of(command: str) -> list[Any]:
    """Returns NAME_ARGUMENTS, `run_NAME` and NAME_EXAMPLES."""
    name = command.replace("-", "_")
    file = next((file for file, commands in _MODULES.items() if name in commands.split()), name)
    module = importlib.import_module(f"switch_tf.cli.{file}")
    return [getattr(module, part) for part in (
        f"{name.upper()}_ARGUMENTS", f"run_{name}", f"{name.upper()}_EXAMPLES")]


def _main(argv):
    name, result = " ".join(("switch-tf", *argv[:1])), {}
    try:
        arguments = _parse(argv)
        host.skip_tpu_metadata_query()
        quiet.expect_tensorflow(prepares_devices=False)  # a bucket's path imports it earlier
        with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
            result = arguments.run_command(arguments)
            if isinstance(result, tuple):
                result, text = result
                print(text)
        if arguments.json:
            print(json_lines.dumps(result))
        sys.stdout.flush()
    except Refusal as refusal:
        outputs.say(f"{name}: {first_line(refusal)}")
        return refusal.exit_status
    except KeyboardInterrupt:
        outputs.say(f"{name}: interrupted.")
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except places.BucketError as error:
        outputs.say(f"{name}: {error.filename} cannot be reached ({first_line(error.strerror)}); check its name, your "
                    "rights and the network, then start the same command again.")
        return REFUSED if error.errno == errno.EACCES else OUTAGE
    except Exception as error:
        error.add_note(_REPORT)
        raise
    return result.get("exit_status", 0)


def _parse(argv):
    if not argv or argv[0] not in COMMANDS:
        parser = Parser(prog="switch-tf", description="Switch Transformers in TensorFlow and Keras 3.")
        parser.add_argument("--version", action="version", version=f"switch-tf {switch_tf.__version__}")
        commands = parser.add_subparsers(required=True, metavar="COMMAND")
        for name, summary in COMMANDS.items():
            commands.add_parser(name, help=summary)
        if argv and not argv[0].startswith("-"):
            parser.error(f"there is no command {argv[0]!r}.{nearest(argv[0], COMMANDS)} The commands are "
                         f"{', '.join(COMMANDS)}.")
        parser.parse_known_args(argv)  # prints the help, or that the command is missing
        parser.error("the command comes first")
    name, *words = argv
    parser = Parser(prog=f"switch-tf {name}", description=COMMANDS[name],
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    declared, run, examples = parts_of(name)
    notes = [note for note in declared if isinstance(note, str)]
    actions = [(parser.add_argument(flag, **rest), checked) for flag, rest, checked in (
        _JSON, *(entry for entry in declared if entry not in notes))]
    notes = textwrap.fill(" ".join(notes), 100, break_on_hyphens=False, break_long_words=False)
    parser.epilog = f"{notes}\n\nexamples:\n{textwrap.indent(examples.strip(), '  ')}".strip()
    # argparse cannot know `--gin.NAME=VALUE`, nor Apache Beam's flags after `--`.
    end = [*words, "--"].index("--")
    words, behind = words[:end], words[end + 1:]
    bindings = [word for word in words if word.startswith("--gin.")]
    words = [word for word in words if word not in bindings]
    for word in words:  # before argparse complains about missing flags
        flag = word.partition("=")[0]
        if flag.startswith("--") and not any(known.startswith(flag) for known in parser._option_string_actions):
            parser.error(f"unrecognized arguments: {word}")
    arguments = parser.parse_intermixed_args(words)
    if getattr(arguments, "run", "") is None:
        if arguments.names:
            arguments.run, *arguments.names = arguments.names
        elif name != "export":
            parser.error(f"name the run folder, as in: switch-tf {name} runs/first")
    if behind and name != "cache":
        parser.error(f"the command {name} takes nothing behind --, but was given {behind[0]}")
    arguments.beam_flags = behind
    if bindings and not hasattr(arguments, "gin_file"):
        parser.error(f"the command {name} takes no gin bindings, but was given {bindings[0]}")
    for action, (one_of, goes_with, at_least) in actions:
        flag, given = (*action.option_strings, action.metavar)[0], getattr(arguments, action.dest)
        if given == action.default:
            continue
        if at_least is not None:
            checks.integer(flag, given, at_least)
        if one_of:
            check_choice(flag, given, one_of)
        if goes_with:
            name_of_other, value = re.match(r"--(\w+)[ =]?(\w*)", goes_with).groups()
            other = getattr(arguments, name_of_other, True)
            if not other or value not in ("", other):
                raise Refusal(f"{flag} goes with {goes_with.format(**vars(arguments))}")
        is_path = any(word.removesuffix("S") in _PATHS for word in str(action.metavar).split("|"))
        if is_path and (name, action.dest) != ("vocabulary", "input"):  # TensorFlow reads that one, also from buckets
            for path in given if isinstance(given, list) else [given]:
                checks.path(flag, path)  # pathlib would take a URL for a local folder
    arguments.command, arguments.run_command, arguments.words = name, run, argv
    arguments.stdout = sys.stdout  # kept: --json redirects prints
    arguments.gin_bindings = [word.removeprefix("--gin.") for word in bindings]
    if getattr(arguments, "backend", None) is not None:
        arguments.gin_bindings.append(f"Layout.backend={arguments.backend!r}")
    if hasattr(arguments, "gin_file"):
        from switch_tf.cli import options  # not lazily: `--help` of all commands needs no gin

        options.expand(arguments)
    return arguments
