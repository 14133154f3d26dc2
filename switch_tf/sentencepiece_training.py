"""Trains SentencePiece vocabularies: `python -m switch_tf.sentencepiece_training NUM_PIECES < SENTENCES > MODEL`.

A process of its own: SentencePiece cannot be interrupted, and reports its progress only on standard error.
"""

import contextlib
import io
import os
import re
import string
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from etils import epy

from switch_tf.refusals import Refusal
from switch_tf.storage import places, whole_file

with epy.lazy_imports():  # not needed to check arguments
    import sentencepiece
    import tqdm
    from sentencepiece import sentencepiece_model_pb2

# A rule for a character in no text. Without any, SentencePiece prints a warning at each load.
_RULES = "FFFF\tFFFD\n"

# SentencePiece silently leaves out sentences of over 4192 bytes.
_LONGEST = 4000

_TOO_HIGH = re.compile(r"Vocabulary size (?:is )?too high \(\d+\).*?<= (\d+)")
_TOO_LOW = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
_EM_STEP = re.compile(r"EM sub_iter=\d+ size=(\d+)")


def train(
    sentences: Iterable[str], num_pieces: int, is_quiet: bool = True, keeps_whitespace: bool = False
) -> bytes:
    """Returns a serialised unigram model, with the same bytes for the same sentences.

    Args:
        num_pieces: Size of the vocabulary without sentinels. Padding is 0, the end of sequence 1, unknown 2.
        is_quiet: Whether standard error stays empty.
        keeps_whitespace: Whether every space and newline is encoded, as source code needs. Otherwise text is normalised
            (NFKC), and spaces and newlines become one space.

    Raises:
        RuntimeError: SentencePiece cannot train, for example on a text with too few pieces.
    """
    model = io.BytesIO()  # a file's name would enter the model
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        if keeps_whitespace:
            rules = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".tsv"))
            rules.write(_RULES)
            rules.flush()
            # No sentence has a newline, so a newline is encoded as its byte.
            options = {"remove_extra_whitespaces": False, "add_dummy_prefix": False,
                       "allow_whitespace_only_pieces": True, "normalization_rule_tsv": rules.name}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="unigram",
            vocab_size=num_pieces,
            pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
            pad_piece="<pad>", eos_piece="</s>", unk_piece="<unk>",
            # Without these, even a question mark was unknown.
            byte_fallback=True,
            required_chars="".join(c for c in string.printable if c.isprintable() and c != " "),
            character_coverage=0.9995,
            seed_sentencepiece_size=100_000,
            num_threads=1,  # the pieces depend on it
            minloglevel=2 if is_quiet else 0,
            **options,
        )  # fmt: skip
    if not keeps_whitespace:
        return model.getvalue()
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    proto.normalizer_spec.normalization_rule_tsv = ""  # the model has the compiled rules
    return proto.SerializeToString(deterministic=True)


def check_output(output: str) -> None:
    """Refuses an `--output` that exists or is not writable."""
    folder = os.path.dirname(output) or "."
    if places.at(output).is_dir() or not os.path.basename(output):
        raise Refusal(f"--output must be a file, not {output!r}.")
    if places.at(output).exists():
        raise Refusal(f"--output {output!r} is there already, and models may have been trained with it; choose "
                      "another name, or remove it.")
    if places.is_local(output) and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise Refusal(f"--output {output!r} cannot be written, because {folder!r} is no folder that can be written to.")


def train_file(sentences: Sequence[str], num_pieces: int, output: str) -> None:
    """Trains a vocabulary in a process that Ctrl-C ends, and shows its progress.

    Args:
        num_pieces: Size of the vocabulary without sentinels.
        output: The model appears when complete.
    """
    beside = os.path.dirname(output) or "." if places.is_local(output) else None
    with tempfile.TemporaryFile(dir=beside) as source, tempfile.TemporaryFile(dir=beside) as model:
        source.writelines(f"{sentence}\n".encode() for sentence in sentences)
        source.seek(0)
        command = [sys.executable, "-m", "switch_tf.sentencepiece_training", str(num_pieces)]
        with subprocess.Popen(command, stdin=source, stdout=model, stderr=subprocess.PIPE, text=True,
                              errors="replace") as child:
            try:
                log = _show_progress(child.stderr, num_pieces)
            except BaseException:
                child.kill()
                raise
        if child.returncode:
            raise Refusal(_failure(log, num_pieces, child.returncode))
        model.seek(0)
        whole_file.put(output, model.read())


def _show_progress(lines, num_pieces):
    """Returns the last lines of the log."""
    log, first = deque(maxlen=40), None
    with tqdm.tqdm(desc=f"training {num_pieces} pieces", bar_format="{desc} [{elapsed}]") as progress:
        for line in lines:
            log.append(line)
            if step := _EM_STEP.search(line):
                first = first or int(step[1])
                progress.set_description_str(f"training {num_pieces} pieces, {int(step[1]):,} of {first:,} candidates "
                                             "left")
    return log


def _failure(log, num_pieces, status):
    text = "".join(log)
    if limit := _TOO_HIGH.search(text):
        return f"--size must be at most {limit[1]} for this text, which has no more pieces, not {num_pieces}."
    if limit := _TOO_LOW.search(text):
        return (f"--size must be more than {limit[1]} for this text, because every byte and its frequent characters "
                f"need a piece each, not {num_pieces}.")
    if status < 0:
        return f"SentencePiece was ended by signal {-status}, mostly for want of memory; use fewer --input files."
    last = next((line.strip() for line in reversed(log) if line.strip()), "no reason is given")
    return f"SentencePiece cannot train {num_pieces} pieces on this text: {last}."


def characters_per_token(model: str, sentences: Sequence[str]) -> float:
    """Returns the mean characters per piece over about 1000 sentences. `model` is a file."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=places.at(model).read_bytes())
    some = sentences[::max(1, len(sentences) // 1000)]
    return sum(map(len, some)) / sum(len(pieces.encode(sentence)) for sentence in some)


def describe(result: dict) -> str:
    """Returns the text of a result of `switch-tf vocabulary`."""
    return "\n".join((
        f"{result['num_texts']:,} texts, {result['num_sentences']:,} sentences; {result['num_pieces']:,} pieces, "
        f"{result['characters_per_token']:.2f} characters a token; with sentinels {result['num_ids']:,} ids.",
        f"Written: {result['output']}",
        f"Use it:  --gin.VOCABULARY=\"'{result['output']}'\" --gin.SwitchConfig.vocab_size={result['vocab_size']}"))


def sentences_of(text: str) -> Iterator[str]:
    """Yields the lines of a text. Cuts lines too long for SentencePiece, if possible between words."""
    for line in text.splitlines():
        while len(line.encode()) > _LONGEST:
            start = line.encode()[:_LONGEST].decode(errors="ignore")
            start = start[:start.rfind(" ")] if start.rfind(" ") > 0 else start
            yield start
            line = line[len(start):].strip()
        if line.strip():
            yield line


if __name__ == "__main__":
    _lines = (_line.decode().rstrip("\n") for _line in sys.stdin.buffer)
    sys.stdout.buffer.write(train(_lines, int(sys.argv[1]), is_quiet=False))
