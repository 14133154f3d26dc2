"""Text files as a source: every example once an epoch, in an order of its own, shared out, held out, resumed."""

import gzip
import json

import pytest
import seqio
import tensorflow as tf

from switch_tf import data, refusals
from switch_tf.data import example_files
from switch_tf.data.task_catalog import source_fingerprint
from switch_tf.tasks import text_source
from switch_tf.tasks.text_source import TextFilesSource

LINES = [f"line {number}" for number in range(60)]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Three files of 20 lines, one of them packed, in pieces of about four lines."""
    monkeypatch.setattr(example_files, "PIECE", 30)
    for index, name in enumerate(("a.txt", "b.txt", "c.txt.gz")):
        content = "".join(f"{line}\n" for line in LINES[20 * index:20 * index + 20]).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    return str(tmp_path / "*.txt*")


def _texts(source, split="train", epochs=1, **options):
    dataset = source.get_dataset(split, **options).repeat(epochs)
    return [example["text"].decode() for example in dataset.as_numpy_iterator()]


def _source(files, validation_files=None, **options):
    return TextFilesSource({"text": "text"}, files, validation_files or files, **options)


def test_an_epoch_is_a_new_order_of_all_examples_across_files(files):
    found = _texts(_source(files), epochs=2, seed=1)
    first, second = found[:60], found[60:]
    assert sorted(first) == sorted(second) == sorted(LINES)
    assert first != second and first != LINES
    assert {LINES.index(line) // 20 for line in first[:12]} == {0, 1, 2}


def test_the_seed_decides_the_order(files):
    first, again, other = (_texts(_source(files), epochs=2, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_each_piece_has_an_order_of_its_own_in_each_epoch_and_with_each_seed(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {number}\n" for number in range(20)))
    orders = []
    for seed in (1, 2):
        found = _texts(_source(str(tmp_path / "*.txt")), epochs=2, seed=seed)
        orders += [tuple(text[2:] for text in epoch if text.startswith(name))
                   for epoch in (found[:40], found[40:]) for name in ("a", "b")]
    assert len(set(orders)) == 2 * 2 * 2 and all(len(set(order)) == 20 for order in orders)


def test_without_shuffling_examples_come_in_the_order_of_the_files(files):
    assert _texts(_source(files), shuffle=False) == LINES


# Fewer and more than pieces.
@pytest.mark.parametrize("num_shards", [2, pytest.param(13, marks=pytest.mark.slow)])
def test_shards_divide_the_examples(files, num_shards):
    shards = [_texts(_source(files), seed=3, shard_info=seqio.ShardInfo(index, num_shards))
              for index in range(num_shards)]
    assert sorted(sum(shards, [])) == sorted(LINES)
    assert max(map(len, shards)) < 60


def test_the_held_out_share_is_the_same_wherever_an_example_stands(files, tmp_path):
    held_out = _texts(TextFilesSource({"text": "text"}, files, held_out_share=0.3), "validation", shuffle=False)
    assert 8 <= len(held_out) <= 28  # 18 expected of 60, standard deviation 3.5
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "all.txt").write_text("\n".join(reversed(LINES * 2)))
    moved = TextFilesSource({"text": "text"}, str(tmp_path / "again" / "all.txt"), held_out_share=0.3)
    assert set(_texts(moved, "validation")) == set(held_out)
    assert set(_texts(moved)) == set(LINES) - set(held_out)


def test_fields_become_features_and_the_first_has_the_prefix(tmp_path):
    (tmp_path / "a.csv").write_text('question,answer\n"1, or 2?",2\n')
    source = TextFilesSource({"inputs": "question", "targets": "answer"}, str(tmp_path / "a.csv"),
                             str(tmp_path / "a.csv"), prefix="ask: ")
    [example] = source.get_dataset().as_numpy_iterator()
    assert example == {"inputs": b"ask: 1, or 2?", "targets": b"2"}


def test_reading_goes_on_where_it_was_saved(files, tmp_path):
    def iterator():
        return iter(_source(files).get_dataset("train", seed=5).repeat())

    def take(count):
        return [next(reading)["text"].numpy() for _ in range(count)]

    for before in (0, 7, 75):
        reading = iterator()
        take(before)
        path = tf.train.Checkpoint(iterator=reading).write(str(tmp_path / "position"))
        expected = take(60)
        reading = iterator()
        tf.train.Checkpoint(iterator=reading).read(path).assert_consumed()
        assert take(60) == expected


def test_files_are_known_by_name_and_content_and_by_how_they_are_read(files, tmp_path):
    def known(**options):
        source = TextFilesSource({"text": "text"}, files, **options)
        seqio.TaskRegistry.add("known", source=source, output_features={})
        try:
            return source_fingerprint("known", "train")
        finally:
            seqio.TaskRegistry.remove("known")

    before = known()
    assert set(before) == {"known", "known: a.txt", "known: b.txt", "known: c.txt.gz"}
    assert known(max_bad_examples=5) == before
    assert known(held_out_share=0.1)["known"] != before["known"] != known(prefix="a")["known"]
    (tmp_path / "b.txt").write_text("other\n")
    assert [name for name, value in known().items() if value != before[name]] == ["known: b.txt"]


# What cannot be used.


@pytest.fixture
def bad(tmp_path):
    """A path of which the lines 2 and 4 are no objects."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n2\n{"text": "three"}\n4\n')
    return str(path)


def test_small_files_are_looked_through_before_an_example_is_handed_out(bad):
    with pytest.raises(data.BadData, match=r"a.jsonl, line 2: it must be an object such as .*, not 2\. Mend it, or"):
        _source(bad).get_dataset()


@pytest.mark.parametrize(("allowed", "line"), [(0, 2), (1, 4)])
def test_one_bad_example_too_many_ends_the_reading_of_large_files(bad, monkeypatch, allowed, line):
    monkeypatch.setattr(text_source, "LOOKED_THROUGH", 0)
    dataset = _source(bad, max_bad_examples=allowed).get_dataset(shuffle=False)
    with pytest.raises(tf.errors.OpError) as raised:
        list(dataset)
    assert refusals.sentence_about_data(raised.value) == (
        f"{bad}, line {line}: it must be an object such as {{\"text\": \"...\"}}, not {line}. Mend it, or raise "
        f"max_bad_examples, which is {allowed}.")


def test_as_many_as_are_allowed_are_left_out_each_told_once(bad, capsys):
    assert sorted(_texts(_source(bad, max_bad_examples=2), epochs=2)) == ["one", "one", "three", "three"]
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(": it")[0] for line in told] == [f"Left out: {bad}, line {number}" for number in (2, 4)]


@pytest.mark.parametrize(("options", "message"), [
    ({"held_out_share": 0}, r"held_out_share must be a number in \(0, 1\), not 0"),
    ({"max_bad_examples": -1}, "max_bad_examples must be an integer of at least 0, not -1"),
    ({"prefix": 5}, "PREFIX must be text, not 5"),
])
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TextFilesSource({"text": "text"}, "a.txt", **options)


def test_one_array_of_json_is_trained_on_whole_or_not_at_all(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": line} for line in LINES], indent=2))
    assert _texts(_source(str(tmp_path / "a.json")), shuffle=False) == LINES
    assert sorted(_texts(_source(str(tmp_path / "a.json")), seed=1)) == sorted(LINES)
    for content, message in (('{\n"text": "a"\n}\n{"text": "b"}\n', "a JSON object begins here and goes on in the"),
                             ('[{"text": "a"},\n{"text": "b"},\n{"text": "c"}\n', "the array has no closing bracket"),
                             ('[{"text": "a"}\n{"text": "b"}]', "a comma or a closing bracket is missing")):
        (tmp_path / "b.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            _texts(_source(str(tmp_path / "b.json"), max_bad_examples=100), shuffle=False)
