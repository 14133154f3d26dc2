"""Trains SentencePiece vocabularies: `python -m switch_tf.sentencepiece_training SENTENCES OUTPUT NUM_PIECES`.

A program of its own besides a function, because nothing can interrupt SentencePiece while it trains, and it tells how
far it is on standard error only. Needs no TensorFlow.
"""

import io
import string
import sys
import tempfile
from collections.abc import Iterable, Iterator

# As good as none: of a character that stands in no text. Without any, SentencePiece says so on standard error whenever
# it loads the model.
_RULES = "FFFF\tFFFD\n"

# SentencePiece leaves out sentences of more than 4192 bytes, without a word.
_LONGEST = 4000  # bytes


def train(
    sentences: Iterable[str], num_pieces: int, is_quiet: bool = True, keeps_whitespace: bool = False
) -> bytes:
    """Returns a serialised unigram model, the same bytes whenever the sentences are the same.

    Args:
        sentences: texts to learn the pieces from.
        num_pieces: int. Size of the vocabulary without sentinels: padding 0, end of sequence 1, unknown 2.
        is_quiet: bool. Write nothing to standard error.
        keeps_whitespace: bool. Text is encoded as it is, with every space and newline, as source code needs it; else
            it is normalised (NFKC), and spaces and newlines become one space.

    Raises:
        RuntimeError: SentencePiece's, for example where the text has too few different pieces.
    """
    if not keeps_whitespace:
        return _train(sentences, num_pieces, is_quiet)
    from sentencepiece import sentencepiece_model_pb2

    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        rules.write(_RULES)
        rules.flush()
        # A newline is in no sentence and becomes its byte.
        model = sentencepiece_model_pb2.ModelProto.FromString(_train(
            sentences, num_pieces, is_quiet, remove_extra_whitespaces=False, add_dummy_prefix=False,
            allow_whitespace_only_pieces=True, normalization_rule_tsv=rules.name))
    model.normalizer_spec.normalization_rule_tsv = ""  # the rules are in it, compiled
    return model.SerializeToString(deterministic=True)


def _train(sentences, num_pieces, is_quiet, **options):
    import sentencepiece

    model = io.BytesIO()  # a file name would be written into the model
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="unigram",
        vocab_size=num_pieces,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        pad_piece="<pad>", eos_piece="</s>", unk_piece="<unk>",
        # Without these two even a question mark was unknown.
        byte_fallback=True,
        required_chars="".join(c for c in string.printable if c.isprintable() and c != " "),
        character_coverage=0.9995,
        seed_sentencepiece_size=100_000,
        num_threads=1,  # the pieces depend on it
        minloglevel=2 if is_quiet else 0,
        **options,
    )  # fmt: skip
    return model.getvalue()


def sentences_of(text: str) -> Iterator[str]:
    """The lines of a text; one that is too long for SentencePiece in parts, cut between words where there are any."""
    for line in text.splitlines():
        while len(line.encode()) > _LONGEST:
            start = line.encode()[:_LONGEST].decode(errors="ignore")
            start = start[:start.rfind(" ")] if start.rfind(" ") > 0 else start
            yield start
            line = line[len(start):].strip()
        if line.strip():
            yield line


if __name__ == "__main__":
    _source, _output, _num_pieces = sys.argv[1:]
    with open(_source, encoding="utf-8", newline="\n") as _lines:
        _model = train((_line.rstrip("\n") for _line in _lines), int(_num_pieces), is_quiet=False)
    with open(_output, "wb") as _file:
        _file.write(_model)
