"""Sentences are cut for SentencePiece without loss."""

from switch_tf import sentencepiece_training


def test_lines_that_sentencepiece_would_leave_out_are_cut_between_words():
    text = "short\n\n" + "wörd " * 2000 + "\nlast"
    found = list(sentencepiece_training.sentences_of(text))
    assert found[0] == "short" and found[-1] == "last" and len(found) == 6
    assert " ".join(found[1:-1]).split() == ["wörd"] * 2000
    assert max(len(sentence.encode()) for sentence in found) <= 4000
    assert "".join(sentencepiece_training.sentences_of("ö" * 5000)) == "ö" * 5000
