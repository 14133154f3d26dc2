"""`switch-tf vocabulary`: text files in, a SentencePiece model of one's own out."""

import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import deque

from switch_tf import checks, sentencepiece_training
from switch_tf.cli import outputs, quiet
from switch_tf.refusals import Refusal

# Of more sentences so many are drawn, all with the same chance: pieces hardly change, time and memory do.
MOST_SENTENCES = 1_000_000
# Rows of an embedding are a multiple of it, so that they fill the tiles of an accelerator and are easy to split.
_ROWS = 128
_TOO_HIGH = re.compile(r"Vocabulary size (?:is )?too high \(\d+\).*?<= (\d+)")
_TOO_LOW = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
_EM_STEP = re.compile(r"EM sub_iter=\d+ size=(\d+)")

EXAMPLES = r"""
switch-tf vocabulary --input texts.txt --size 8000 --output mine.model
switch-tf vocabulary --input pairs.jsonl --field inputs targets --size 8000 --output mine.model
"""


def add_arguments(parser) -> None:
    """Declares what is read, how many pieces are made of it, and where they go."""
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE",
                        help="files or globs: .txt (a text a line), .jsonl, .json, .tsv, .csv, each also as .gz")
    parser.add_argument("--size", type=int, required=True, metavar="N",
                        help="pieces, without the 100 sentinels that every task adds")
    parser.add_argument("--output", required=True, metavar="FILE", help="the SentencePiece model to be written")
    parser.add_argument("--field", nargs="+", default=["text"], metavar="NAME",
                        help="keys or columns to read, numbers in tables without a header (default: text)")


def run(arguments) -> dict:
    """Trains a vocabulary; how large it is and what the model needs is the JSON object."""
    _check(arguments)
    with outputs.locked(arguments.output):
        quiet.import_tensorflow()
        fields = [int(name) if name.isdigit() else name for name in arguments.field]
        sentences, num_texts = _read(arguments.input, fields)
        _train(sentences, arguments.size, arguments.output)
    num_ids = arguments.size + _num_sentinels()
    result = {
        "output": arguments.output, "num_texts": num_texts, "num_sentences": len(sentences),
        "num_pieces": arguments.size, "num_ids": num_ids, "vocab_size": -(-num_ids // _ROWS) * _ROWS,
        "characters_per_token": _characters_per_token(arguments.output, sentences),
    }
    print(_describe(result), file=sys.stderr if arguments.json else sys.stdout)
    return result


def _check(arguments):
    """What can be known to be wrong before anything is read."""
    folder, output = os.path.dirname(arguments.output) or ".", arguments.output
    try:
        checks.integer("--size", arguments.size, at_least=1)
        if os.path.isdir(output) or not os.path.basename(output):
            raise ValueError(f"--output must be a file on this machine, not {output!r}.")
        if os.path.exists(output):
            raise ValueError(f"--output {output!r} is there already, and models may have been trained with it; choose "
                             "another name, or remove it.")
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise ValueError(f"--output {output!r} cannot be written, because {folder!r} is no folder that can be "
                             "written to.")
    except ValueError as error:
        raise Refusal(str(error)) from error


def _num_sentinels():
    from switch_tf import data

    return data.NUM_SENTINELS


def _read(patterns, fields):
    """Sentences of all files, drawn at random where there are too many, and of how many texts they are."""
    import tqdm

    from switch_tf import data

    chosen, drawn, num_texts, seen = [], random.Random(0), 0, 0
    try:
        files = [data.TextFile(name, fields) for name in data.find_files("--input", patterns)]
        with tqdm.tqdm(desc=f"reading {len(files)} file{'s' * (len(files) > 1)}", unit=" texts",
                       mininterval=0.5) as progress:
            for texts, bad in itertools.chain.from_iterable(file.all() for file in files):
                if bad:
                    raise data.BadData(bad[0])
                num_texts += len(texts)
                progress.update(len(texts))
                for sentence in itertools.chain.from_iterable(map(
                        sentencepiece_training.sentences_of, itertools.chain.from_iterable(texts))):
                    seen += 1
                    if len(chosen) < MOST_SENTENCES:
                        chosen.append(sentence)
                    elif (place := drawn.randrange(seen)) < MOST_SENTENCES:
                        chosen[place] = sentence
    except ValueError as error:
        raise Refusal(str(error)) from error
    if not chosen:
        raise Refusal(f"There is no text in {', '.join(patterns)}.")
    if seen > len(chosen):
        print(f"{len(chosen):,} of {seen:,} sentences are learned from.", file=sys.stderr)
    return chosen, num_texts


def _train(sentences, num_pieces, output):
    """Writes the model at once, when it is done; a process of its own trains it, so that Ctrl-C ends it."""
    folder = os.path.dirname(output) or "."
    with tempfile.TemporaryDirectory(prefix=".vocabulary", dir=folder) as temporary:
        source, model = os.path.join(temporary, "sentences"), os.path.join(temporary, "model")
        with open(source, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{sentence}\n" for sentence in sentences)
        command = [sys.executable, "-m", "switch_tf.sentencepiece_training", source, model, str(num_pieces)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as child:
            try:
                said = _relay(child.stderr, num_pieces)
            except BaseException:
                child.kill()
                raise
        if child.returncode:
            raise Refusal(_failure(said, num_pieces, child.returncode))
        os.replace(model, output)


def _relay(lines, num_pieces):
    """Shows how far the training is; returns the last lines that it wrote."""
    import tqdm

    said, first = deque(maxlen=40), None
    with tqdm.tqdm(desc=f"training {num_pieces} pieces", bar_format="{desc} [{elapsed}]") as progress:
        for line in lines:
            said.append(line)
            if step := _EM_STEP.search(line):
                first = first or int(step[1])
                progress.set_description_str(f"training {num_pieces} pieces, {int(step[1]):,} of {first:,} candidates "
                                             "left")
    return said


def _failure(said, num_pieces, status):
    text = "".join(said)
    if found := _TOO_HIGH.search(text):
        return f"--size must be at most {found[1]} for this text, which has no more pieces, not {num_pieces}."
    if found := _TOO_LOW.search(text):
        return (f"--size must be more than {found[1]} for this text, because every byte and its frequent characters "
                f"need a piece each, not {num_pieces}.")
    if status < 0:
        return f"SentencePiece was ended by signal {-status}, mostly for want of memory; use fewer --input files."
    last = next((line.strip() for line in reversed(said) if line.strip()), "no reason is given")
    return f"SentencePiece cannot train {num_pieces} pieces on this text: {last}."


def _characters_per_token(model, sentences):
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=model)
    some = sentences[::max(1, len(sentences) // 1000)]
    return sum(map(len, some)) / sum(len(pieces.encode(sentence)) for sentence in some)


def _describe(result):
    return "\n".join((
        f"{result['num_texts']:,} texts, {result['num_sentences']:,} sentences; {result['num_pieces']:,} pieces, "
        f"{result['characters_per_token']:.2f} characters a token; with sentinels {result['num_ids']:,} ids.",
        f"Written: {result['output']}",
        f"Use it:  --gin.VOCABULARY=\"'{result['output']}'\" --gin.SwitchConfig.vocab_size={result['vocab_size']}"))
