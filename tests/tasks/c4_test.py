"""C4 and mC4 are read from tiny data sets that their real TFDS builders write."""

from unittest import mock

import pytest
import seqio
import tensorflow_datasets as tfds

from switch_tf import data
from switch_tf.refusals import Refusal
from switch_tf.tasks import c4, mc4, prepared_tfds, preprocessors, vocabularies  # noqa: F401  (c4 registers)

LENGTHS = {"inputs": 64, "targets": 20}


def prepare(name, texts_by_split, data_dir):
    """Writes a data set as its builder would, without the downloads."""
    builder = tfds.builder(name, data_dir=data_dir)
    other_features = dict.fromkeys(("url", "content-type", "content-length", "timestamp"), "")
    examples = {
        split: [(i, {"text": text, **other_features}) for i, text in enumerate(texts)]
        for split, texts in texts_by_split.items()
    }
    skip = tfds.download.ComputeStatsMode.SKIP
    config = tfds.download.DownloadConfig(compute_stats=skip, try_download_gcs=False)
    with mock.patch.object(type(builder), "_split_generators", lambda *args, **kwargs: examples):
        builder.download_and_prepare(download_config=config)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    tfds.disable_progress_bar()
    folder = str(tmp_path_factory.mktemp("tfds"))
    english = {"train": [f"a{i} " * 100 for i in range(30)], "validation": [f"b{i} " * 5 for i in range(5)]}
    prepare("c4/en:3.1.0", english, folder)
    multilingual = {}
    for language in ("en", "sw", "zh-Latn"):
        pages = 32 if language == "en" else 1
        multilingual[language] = [f"{language} " * 20] * pages
        multilingual[f"{language}-validation"] = [f"{language} " * 20]
    prepare("c4/multilingual:3.1.0", multilingual, folder)
    return folder


@pytest.fixture
def read_from(data_dir):
    """Points the sources of tasks to the tiny data for the time of one test."""
    loaders = []

    def point(tasks):
        for task in tasks:
            task.source.tfds_dataset.override_data_dir(data_dir)
            loaders.append(task.source.tfds_dataset)

    yield point
    for loader in loaders:
        loader.override_data_dir(None)


def register_with_bytes(task):
    """Registers a copy of a task whose vocabulary needs no network, returns its name."""
    name = f"{task.name}_with_bytes"
    if name not in seqio.TaskRegistry.names():
        features = preprocessors.output_features(vocabularies.byte())
        seqio.TaskRegistry.add_provider(name, task.replace(name=name, output_features=features, shuffle_buffer_size=16))
    return name


def get_dataset(name, batch_size, **options):
    return data.get_dataset(data.DatasetDescription(name, LENGTHS, batch_size, **options))


def read_text(name, split, **options):
    """Returns what is left of the text in the inputs of the first batches of a split."""
    batches = get_dataset(name, 4, split=split, **options).take(20).as_numpy_iterator()
    rows = [row for batch in batches for row in batch["encoder_input_tokens"].tolist()]
    return "".join(vocabularies.byte().decode([token for token in row if token < 259]) for row in rows)


def test_c4_makes_batches_of_span_corruption(read_from):
    task = seqio.get_mixture_or_task("c4_span_corruption")
    read_from([task])
    batch = next(iter(get_dataset(register_with_bytes(task), 4)))
    assert {name: tuple(tokens.shape) for name, tokens in batch.items()} == {
        "encoder_input_tokens": (4, 64),
        "decoder_target_tokens": (4, 20),
        "decoder_input_tokens": (4, 20),
        "decoder_loss_weights": (4, 20),
    }
    assert (batch["decoder_target_tokens"].numpy()[:, 0] == 358).all()  # the first sentinel


def test_c4_splits_do_not_mix(read_from):
    task = seqio.get_mixture_or_task("c4_span_corruption")
    read_from([task])
    name = register_with_bytes(task)
    train, validation = (read_text(name, split) for split in ("train", "validation"))
    assert "a" in train and "b" not in train
    assert "b" in validation and "a" not in validation


def test_the_same_seed_reads_c4_in_the_same_order(read_from):
    task = seqio.get_mixture_or_task("c4_span_corruption")
    read_from([task])
    name = register_with_bytes(task)

    def first_inputs(seed):
        batch = next(iter(get_dataset(name, 8, seed=seed)))
        return batch["encoder_input_tokens"].numpy().tolist()

    assert first_inputs(1) == first_inputs(1)


def test_mc4_has_a_task_for_every_language():
    mixture = seqio.get_mixture_or_task("mc4_span_corruption")
    names = {task.name for task in mixture.tasks}
    assert len(names) == 107  # 101 languages, and 6 of them in the Latin alphabet too
    assert {"mc4_span_corruption.en", "mc4_span_corruption.zh_Latn"} <= names


def test_mc4_draws_small_languages_more_than_their_share(read_from):
    mixture = seqio.get_mixture_or_task("mc4_span_corruption")
    read_from(mixture.tasks)
    rates = {task.name: mixture.get_rate(task) for task in mixture.tasks if task.name.endswith((".en", ".sw"))}
    # English has 32 documents, the others 1: 32 ** 0.3 = 2 ** 1.5
    assert rates["mc4_span_corruption.en"] == pytest.approx(2**1.5)
    assert rates["mc4_span_corruption.sw"] == pytest.approx(1.0)


def test_mc4_languages_can_be_mixed_by_hand(read_from):
    if "two_languages" not in seqio.MixtureRegistry.names():
        mc4.add_mixture("two_languages", ["en", "zh-Latn"], vocabularies.byte())
    mixture = seqio.get_mixture_or_task("two_languages")
    read_from(mixture.tasks)
    text = read_text("two_languages", "validation", pack=True)
    assert "en en" in text and "zh-Latn zh-Latn" in text


def test_data_that_are_not_prepared_are_refused_without_a_download(tmp_path):
    source = prepared_tfds.PreparedTfdsSource("c4/en:3.1.0", {"train": "train"})
    source.tfds_dataset.override_data_dir(str(tmp_path))
    with pytest.raises(Refusal, match=r"c4/en:3\.1\.0 is not prepared: no split train in .*TFDS_DATA_DIR"):
        _ = source.splits
