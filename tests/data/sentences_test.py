"""Sentences of text files are sampled with the same probability."""

from switch_tf.data import example_files

LINES = [f"line {number}: a few words of plain text, number {number * 37}" for number in range(150)]


def test_of_many_sentences_some_are_drawn(monkeypatch, capsys, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("\n".join(LINES))
    monkeypatch.setattr(example_files, "MAX_SENTENCES", 40)
    chosen, num_texts = example_files.sample_sentences([str(file)], ["text"])
    assert num_texts == 150 and len(chosen) == 40 and set(chosen) <= set(LINES)
    assert max(map(LINES.index, chosen)) > 100
    assert "40 of 150 sentences are learned from." in capsys.readouterr().err
