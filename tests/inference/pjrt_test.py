"""Texts are answered by the pjrt back end as by one device of TensorFlow: ids are equal, scores to rounding."""

import concurrent.futures
import functools
import zlib

import numpy as np
import pytest

from switch_tf import SwitchConfig, SwitchTransformer, data, decoding
from switch_tf.inference.text_model import TextModel
from switch_tf.partitioning.backends.pjrt import PjrtProgram
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.tasks import vocabularies
from tests.inference.server_test import LOOK, PREDICT, ask, is_answer, served

BYTES = vocabularies.byte()
TEXTS = ["ab <extra_id_0> c", "d", "a rather long text that is cut somewhere", "the fourth", "and one more"]
TARGETS = ["ab", "a target that is cut", "c", "d e", "f"]
CONFIG = SwitchConfig(vocab_size=384, d_model=16, d_ff=24, d_kv=4, num_heads=4, num_encoder_layers=1,
                      num_decoder_layers=1, encoder_sparse_step=1, decoder_sparse_step=1, num_experts=4,
                      min_expert_capacity=1, dropout_rate=0.0, jitter_noise=0.0, logits_via_embedding=False,
                      scale_decoder_outputs=False)
SAMPLERS = {"greedy": decoding.Greedy(), "sample": decoding.Sample(top_k=40, top_p=0.95, seed=3),
            "beam": decoding.Beam(num_beams=3, num_results=2)}
LAYOUTS = {"one": ("single", "data=1"), "several": ("expert_model", "data=4,model=2")}
ROUNDING = {"float32": 1e-5, "float64": 1e-12}


def _set_weights(model):
    for variable in model.variables:
        noise = np.random.RandomState(zlib.crc32(variable.path.partition("/")[2].encode())).randn(*variable.shape)
        variable.assign(1 + noise / 5 if variable.path.endswith("scale") else noise / variable.shape[0]**0.5)


@pytest.fixture(scope="module")
def make(make_partitioner):
    """A function to a TextModel of the same weights on one device of TensorFlow, or on one or several of PJRT."""

    @functools.cache
    def model_of(where, dtype):
        partitioner = Partitioner() if where == "plain" else make_partitioner(*LAYOUTS[where], backend="pjrt")
        model = SwitchTransformer(CONFIG, dtype=dtype)
        partitioner.build(model)
        _set_weights(model)
        return model, partitioner

    def make_text_model(where, dtype="float64", sampler="greedy", batch_size=5):
        model, partitioner = model_of(where, dtype)
        return TextModel(model, data.Reading(BYTES, BYTES), 20, 6, SAMPLERS[sampler], batch_size, partitioner)

    return make_text_model


def _answers(text_model):
    """Returns ids and scores of all results of each text."""
    answers = text_model.answer([text_model.read(text).ids for text in TEXTS], range(3, 3 + len(TEXTS)))
    return ([[one.ids for one in results] for results in answers],
            [[one.score for one in results] for results in answers])


@pytest.mark.parametrize("sampler", [
    pytest.param(name, marks=() if name == "greedy" else pytest.mark.slow) for name in SAMPLERS])
@pytest.mark.parametrize("where, dtype", [
    ("one", "float64"), pytest.param("one", "float32", marks=pytest.mark.slow),
    pytest.param("several", "float64", marks=pytest.mark.slow),
    pytest.param("several", "float32", marks=pytest.mark.exhaustive)])
def test_answers_are_those_of_one_tensorflow_device(where, dtype, sampler, make):
    (ids, scores), (expected_ids, expected_scores) = (
        _answers(make(place, dtype, sampler)) for place in (where, "plain"))
    assert ids == expected_ids and len({tuple(one) for results in ids for one in results}) >= len(TEXTS)
    np.testing.assert_allclose(scores, expected_scores, rtol=ROUNDING[dtype])


@pytest.mark.parametrize("where, dtype", [
    ("one", "float64"), pytest.param("one", "float32", marks=pytest.mark.slow),
    pytest.param("several", "float64", marks=pytest.mark.slow)])
def test_targets_score_as_on_one_tensorflow_device(where, dtype, make):
    scores, expected = (
        model.score([model.read(text).ids for text in TEXTS], [model.read_target(text).ids for text in TARGETS])
        for model in (make(where, dtype), make("plain", dtype)))
    np.testing.assert_allclose(scores, expected, rtol=ROUNDING[dtype])


@pytest.mark.parametrize("where", ["one", pytest.param("several", marks=pytest.mark.slow)])
def test_tokens_take_the_experts_that_they_take_on_one_tensorflow_device(where, make):
    routes, expected = (model.routes(model.read(TEXTS[0]).ids, [5, 9, 1])
                        for model in (make(where), make("plain", batch_size=None)))
    assert routes == expected and len(routes["layers"]) == 2


def test_a_batch_has_as_many_rows_as_the_mesh_divides(make):
    assert [make("several", batch_size=size).batch_size for size in (None, 1, 4, 5)] == [4, 4, 4, 8]
    assert [make("one", batch_size=size).batch_size for size in (None, 5)] == [1, 5]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["one", "several"])
def test_a_warm_server_compiles_nothing_and_answers_requests_at_once(where, make, monkeypatch):
    plain, model = make("plain", "float32"), make(where, "float32", batch_size=8)
    expected = [results[0] for results in plain.answer([plain.read(text).ids for text in TEXTS], range(len(TEXTS)))]
    routes = make("plain", "float32", batch_size=None).routes(plain.read(TEXTS[0]).ids, expected[0].ids)
    with served(model, batch_size=8) as (server, port):
        model.warm_up()
        monkeypatch.setattr(PjrtProgram, "build", lambda program, specs: pytest.fail("A program is compiled."))
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, port, PREDICT, {"instances": [text]}) for text in TEXTS * 3]
            looked = [pool.submit(ask, port, LOOK, {"instance": TEXTS[0]}) for _ in range(3)]
            for future, one in zip(asked, expected * 3, strict=True):
                status, found, _ = future.result()
                assert status == 200 and is_answer(found["predictions"][0], one)
            for future in looked:
                status, found, _ = future.result()
                assert status == 200 and is_answer(found["prediction"], expected[0])
                assert found["routes"] == routes
