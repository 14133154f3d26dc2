"""Models with fewer experts: groups by hand, kernels, routers and losses."""

import numpy as np
import pytest

from switch_tf.surgery import shrinking


@pytest.fixture(scope="module")
def sparse(fresh_model):
    return fresh_model()


def _layer(model):
    return model.decoder.layers[1].mlp


ROUTERS = ("encoder/layers_1", "decoder/layers_1")


def test_kept_experts_and_their_columns_keep_every_bit(sparse):
    groups = dict.fromkeys(ROUTERS, [[0], [3]])
    smaller = shrinking.shrink(sparse, groups, dict.fromkeys(ROUTERS, np.array([0.6, 0.1, 0.0, 0.3])))
    assert smaller.config.num_experts == 2
    old, new = _layer(sparse), _layer(smaller)
    np.testing.assert_array_equal(new.experts.wo.numpy(), old.experts.wo.numpy()[[0, 3]])
    np.testing.assert_array_equal(new.experts.input_kernels[0].numpy(), old.experts.input_kernels[0].numpy()[[0, 3]])
    np.testing.assert_array_equal(new.router.kernel.numpy(), old.router.kernel.numpy()[:, [0, 3]])
    np.testing.assert_array_equal(smaller.token_embedder.embedding.numpy(), sparse.token_embedder.embedding.numpy())


def test_merged_experts_and_their_columns_are_means_by_use(sparse):
    groups = {ROUTERS[0]: [[0, 1], [2, 3]], ROUTERS[1]: [[0, 2, 3], [1]]}
    use = {ROUTERS[0]: np.array([0.0, 0.0, 0.5, 0.5]), ROUTERS[1]: np.array([0.3, 0.5, 0.1, 0.2])}
    smaller = shrinking.shrink(sparse, groups, use)
    old, new = _layer(sparse), _layer(smaller)
    wo, router = old.experts.wo.numpy(), old.router.kernel.numpy()
    np.testing.assert_allclose(new.experts.wo.numpy()[0], 0.5 * wo[0] + wo[2] / 6 + wo[3] / 3, rtol=1e-5, atol=1e-6)
    expected = 0.5 * router[:, 0] + router[:, 2] / 6 + router[:, 3] / 3
    np.testing.assert_allclose(new.router.kernel.numpy()[:, 0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(new.experts.wo.numpy()[1], wo[1])
    # Experts that nobody used count alike.
    encoder = [model.encoder.layers[1].mlp.experts.wo.numpy() for model in (sparse, smaller)]
    np.testing.assert_allclose(encoder[1][0], (encoder[0][0] + encoder[0][1]) / 2, rtol=1e-6, atol=1e-7)


def test_copies_of_an_expert_merge_into_it(fresh_model):
    model = fresh_model()
    for mlp in (_layer(model), model.encoder.layers[1].mlp):
        for kernel in (*mlp.experts.input_kernels, mlp.experts.wo):
            weights = kernel.numpy()
            weights[2] = weights[0]
            kernel.assign(weights)
    use = dict.fromkeys(ROUTERS, np.full(4, 0.25))
    groups = shrinking.groups_of(model, 3, use, is_merged=True)
    assert groups == dict.fromkeys(ROUTERS, [[0, 2], [1], [3]])
    np.testing.assert_array_equal(_layer(shrinking.shrink(model, groups, use)).experts.wo.numpy(),
                                  _layer(model).experts.wo.numpy()[[0, 1, 3]])


def test_one_expert_is_left(sparse):
    smaller = shrinking.shrink(sparse, dict.fromkeys(ROUTERS, [[2]]), dict.fromkeys(ROUTERS, np.full(4, 0.25)))
    features = {"encoder_input_tokens": np.array([[3, 4, 5]]), "decoder_input_tokens": np.array([[0, 7]])}
    assert smaller.config.num_experts == 1 and np.isfinite(smaller.forward(features)[0]).all()


def test_experts_of_attention_shrink_too(fresh_model):
    model = fresh_model(expert_sublayers="feed_forward_and_attention")
    use = dict.fromkeys(model.config.sparse_layer_names, np.array([0.4, 0.3, 0.2, 0.1]))
    smaller = shrinking.shrink(model, shrinking.groups_of(model, 2, use, is_merged=False), use)
    assert len(use) == 6
    np.testing.assert_array_equal(smaller.encoder.layers[1].attention.query_experts.experts.wo.numpy(),
                                  model.encoder.layers[1].attention.query_experts.experts.wo.numpy()[:2])


def test_the_table_names_losses_and_groups():
    text = shrinking.describe({
        "from": "run", "output": "out", "num_experts": {"before": 3, "after": 2},
        "num_parameters": {"before": 3000, "after": 2000}, "loss": {"before": 1.0, "after": 1.25},
        "layers": {"encoder/layers_1": {"use": [0.5, 0.25, 0.25], "groups": [[0, 2], [1]]}}})
    assert text == ("3,000 parameters of run became 2,000 in out.\n"
                    "Held-out loss: 1.0000 with 3 experts a layer, 1.2500 with 2.\n"
                    "  encoder/layers_1  0+2 (75 %), 1 (25 %)")


def test_the_most_used_experts_stay_in_their_order():
    assert shrinking.most_used(np.array([0.1, 0.4, 0.2, 0.3]), 2) == [[1], [3]]
    assert shrinking.most_used(np.array([0.25, 0.25, 0.25, 0.25]), 3) == [[0], [1], [2]]


def test_the_most_similar_experts_are_joined_whatever_their_length():
    kernel = np.array([[1, 0, 0], [0, 1, 0], [5, 0.1, 0], [0, 0, 1]], "float32")
    assert shrinking.most_similar([kernel], 3) == [[0, 2], [1], [3]]
    assert shrinking.most_similar([kernel, 0.1 * kernel], 3) == [[0, 2], [1], [3]]
    assert shrinking.most_similar([kernel], 1) == [[0, 1, 2, 3]]


def test_equal_experts_and_experts_of_zeros_are_grouped_too():
    assert shrinking.most_similar([np.ones((4, 2, 3), "float32")], 2)[0][0] == 0
    groups = shrinking.most_similar([np.zeros((3, 2), "float32")], 2)
    assert sorted(sum(groups, [])) == [0, 1, 2] and len(groups) == 2
