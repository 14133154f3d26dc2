"""Every loss formula against numbers worked out by hand and against numpy in float64."""

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import losses
from switch_tf.ops import indexing


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def log_normalizer(logits):
    return (logits - log_softmax(logits))[..., 0]


# Hand-worked values.


def test_cross_entropy_of_two_real_targets_and_one_padding():
    # Probabilities 1/4, 1/2, 1/4, so every normaliser is 4. The targets' are 1/2 and 1/4: ln 2 + ln 4 = 3 ln 2.
    logits = np.log([[[1.0, 2.0, 1.0]] * 3]).astype("float32")
    loss, z_loss, accuracy = losses.cross_entropy(logits, [[1, 2, 0]], [[1, 1, 0]], z_loss_weight=0.5)
    np.testing.assert_allclose(loss.total, 3 * np.log(2), rtol=1e-6)
    assert loss.weight == z_loss.weight == accuracy.weight == 2
    np.testing.assert_allclose(loss.value, 1.5 * np.log(2), rtol=1e-6)
    # 0.5 * (ln 4)^2 for each of the two
    np.testing.assert_allclose(z_loss.total, np.log(4) ** 2, rtol=1e-6)
    # The argmax is token 1: right for the first target, wrong for the second.
    assert accuracy.value == 0.5


def test_label_smoothing_spreads_its_share_over_the_whole_vocabulary():
    # Smoothed target for 0.3 over 3 words: 0.8 on the target, 0.1 on the others. With probabilities 1/2, 1/4, 1/4:
    # 0.8 ln 2 + 0.2 ln 4 = 1.2 ln 2; the entropy of the smoothed target stays in.
    logits = np.log([[[2.0, 1.0, 1.0]]]).astype("float32")
    loss, _, _ = losses.cross_entropy(logits, [[0]], [[1]], label_smoothing=0.3)
    np.testing.assert_allclose(loss.value, 1.2 * np.log(2), rtol=1e-6)


def test_load_balancing_loss_by_hand():
    # Choices 0, 0, 1: f = (2/3, 1/3); P = (0.9 + 0.6 + 0.3, 0.1 + 0.4 + 0.7) / 3 = (0.6, 0.4).
    # 2 * (2/3 * 0.6 + 1/3 * 0.4) = 2 * 1.6 / 3
    probs = np.array([[[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]]], "float32")
    np.testing.assert_allclose(losses.load_balancing_loss(probs, [[0, 0, 1]]), 3.2 / 3, rtol=1e-6)
    # Without the second token: f = (1/2, 1/2), P = (0.6, 0.4), 2 * 0.5 * (0.6 + 0.4) = 1
    mask = [[True, False, True]]
    np.testing.assert_allclose(losses.load_balancing_loss(probs, [[0, 0, 1]], mask), 1.0, rtol=1e-6)
    # Mesh TensorFlow: f and P over all three tokens, times the share of real ones: 3.2 / 3 * 2 / 3
    np.testing.assert_allclose(
        losses.load_balancing_loss(probs, [[0, 0, 1]], mask, semantics="mtf"), 6.4 / 9, rtol=1e-6)


def test_groups_count_by_their_real_tokens():
    # Group 0, one real token: f P = (1, 0) (0.8, 0.2), loss 1.6. Group 1, three: f = (1/3, 2/3), P = (0.4, 0.6),
    # 2 * (0.4 + 1.2) / 3 = 3.2 / 3. Group 2: nothing but padding. (1 * 1.6 + 3 * 3.2 / 3) / 4 = 4.8 / 4
    probs = np.array([[[0.8, 0.2]] * 3, [[0.6, 0.4], [0.3, 0.7], [0.3, 0.7]], [[1.0, 0.0]] * 3], "float32")
    mask = [[True, False, False], [True] * 3, [False] * 3]
    mean = losses.balance(probs, [[0, 1, 1], [0, 1, 1], [0, 0, 0]], mask).mean
    np.testing.assert_allclose(mean.value, 1.2, rtol=1e-6)
    assert mean.weight == 4


def test_a_small_group_weighs_little():
    # 32 experts; in three groups of 512 real tokens each expert is chosen, with certainty, by 16: loss 1. The 4 real
    # tokens of a fourth can only go to 4 of them, as evenly as that is: 32 * 4 * (1/4)^2 = 8. The mean by tokens is
    # (3 * 512 * 1 + 4 * 8) / 1540; the plain mean of groups, Lingvo's rule, would be 11 / 4.
    index = np.tile(np.arange(512) % 32, (4, 1))
    mask = np.arange(512) < np.array([[512], [512], [512], [4]])
    loss = losses.load_balancing_loss(np.eye(32, dtype="float32")[index], index, mask)
    np.testing.assert_allclose(loss, 1568 / 1540, rtol=1e-6)
    assert loss < 1.02 < 11 / 4


def test_router_z_loss_by_hand():
    # Normalisers 4, 2 and e^10; the third token is padding: ((ln 4)^2 + (ln 2)^2) / 2 = 2.5 (ln 2)^2
    logits = np.array([[[np.log(3.0), 0.0], [0.0, 0.0], [10.0, -90.0]]], "float32")
    mask = [[True, True, False]]
    np.testing.assert_allclose(losses.router_z_loss(logits, mask), 2.5 * np.log(2) ** 2, rtol=1e-6)
    np.testing.assert_allclose(losses.router_z_loss(logits), (5 * np.log(2) ** 2 + 100) / 3, rtol=1e-6)


# Invariants.


@pytest.mark.parametrize("num_padding", [0, 1, 5, 50])
@pytest.mark.parametrize("num_experts", [1, 2, 8])
def test_load_balancing_loss_is_1_at_balance_however_much_padding(num_experts, num_padding):
    probs = np.full((1, num_experts + num_padding, num_experts), 1 / num_experts, "float32")
    index = np.concatenate([np.arange(num_experts), np.zeros(num_padding)])[None].astype("int32")
    mask = (np.arange(num_experts + num_padding) < num_experts)[None]
    np.testing.assert_allclose(losses.load_balancing_loss(probs, index, mask), 1.0, rtol=1e-6)


def test_load_balancing_loss_of_a_collapsed_router_is_the_number_of_experts():
    probs = np.eye(8, dtype="float32")[np.zeros((2, 5), int)]
    np.testing.assert_allclose(losses.load_balancing_loss(probs, np.zeros((2, 5), "int32")), 8.0)


def test_padding_does_not_matter_at_all():
    rng = np.random.RandomState(0)
    probs, other = (rng.dirichlet([1, 1, 1], (2, 6)).astype("float32") for _ in range(2))
    index, other_index = probs.argmax(-1), other.argmax(-1)
    mask = rng.rand(2, 6) < 0.6
    mixed, mixed_index = np.where(mask[..., None], probs, other), np.where(mask, index, other_index)
    assert losses.load_balancing_loss(probs, index, mask) == losses.load_balancing_loss(mixed, mixed_index, mask)
    assert losses.router_z_loss(np.log(probs) + 1, mask) == losses.router_z_loss(np.log(mixed) + 1, mask)
    logits = rng.randn(2, 6, 7).astype("float32")
    targets = rng.randint(1, 7, (2, 6))
    expected = losses.cross_entropy(logits, targets, mask)
    changed = losses.cross_entropy(np.where(mask[..., None], logits, 5.0), np.where(mask, targets, 0), mask)
    for mine, theirs in zip(expected, changed, strict=True):
        assert mine.total == theirs.total and mine.weight == theirs.weight == mask.sum()


@pytest.mark.parametrize("semantics", ["t5x", "hf"])
def test_where_padding_is_routed_the_mask_does_not_matter(semantics):
    # Choices 0, 0, 1 and P = (0.6, 0.4) as above, for any mask: 2 * (2/3 * 0.6 + 1/3 * 0.4)
    probs = np.array([[[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]]], "float32")
    for mask in (None, [[True, False, True]], [[False] * 3]):
        loss = losses.load_balancing_loss(probs, [[0, 0, 1]], mask, semantics)
        np.testing.assert_allclose(loss, 3.2 / 3, rtol=1e-6)


def test_a_batch_of_padding_has_loss_0():
    probs = np.full((1, 3, 2), 0.5, "float32")
    nothing = np.zeros((1, 3), bool)
    assert losses.load_balancing_loss(probs, np.zeros((1, 3), "int32"), nothing) == 0
    assert losses.router_z_loss(probs, nothing) == 0
    assert all(mean.value == 0 for mean in losses.cross_entropy(probs, np.zeros((1, 3), "int32"), nothing))


def test_the_share_of_tokens_has_no_gradient_and_the_probabilities_have():
    # d loss / d P[token, e] = num_experts * f_e / real tokens, with f = (2/3, 1/3): (4/9, 2/9) where real, else 0.
    probs = tf.constant([[[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.5, 0.5]]])
    with tf.GradientTape() as tape:
        tape.watch(probs)
        loss = losses.load_balancing_loss(probs, [[0, 0, 1, 0]], [[True, True, True, False]])
    np.testing.assert_allclose(tape.gradient(loss, probs), [[[4 / 9, 2 / 9]] * 3 + [[0, 0]]], rtol=1e-6)


# Equivalence.


@pytest.fixture(params=[False, True], ids=["by index", "by product"])
def by_product(request, monkeypatch):
    """Both ways to find a target's logit: one device's, and that of layouts and TPUs."""
    monkeypatch.setattr(indexing, "prefers_products", lambda: request.param)


def test_of_equal_logits_the_first_is_the_answer(by_product):
    # Constant logits answer 0 everywhere, which is right for 1 target in 8. Ties elsewhere: 2 before 5.
    targets = np.arange(8)[None]
    constant = np.full((1, 8, 8), 0.5, "float32")
    assert losses.cross_entropy(constant, targets, np.ones((1, 8)))[2].value == 1 / 8
    tied = np.zeros((1, 2, 8), "float32")
    tied[..., [2, 5]] = 1.0
    assert losses.cross_entropy(tied, [[2, 5]], [[1, 1]])[2].value == 1 / 2


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_is_numpys_in_float64(by_product, label_smoothing):
    rng = np.random.RandomState(1)
    logits = (10 * rng.randn(3, 7, 50)).astype("float32")
    targets = rng.randint(0, 50, (3, 7))
    weights = (targets > 10).astype("float32")
    loss, z_loss, accuracy = losses.cross_entropy(logits, targets, weights, 1e-2, label_smoothing)
    smoothed = (1 - label_smoothing) * np.eye(50)[targets] + label_smoothing / 50
    expected = -(smoothed * log_softmax(logits)).sum(-1)
    np.testing.assert_allclose(loss.total, (expected * weights).sum(), rtol=1e-5)
    np.testing.assert_allclose(z_loss.total, 1e-2 * (log_normalizer(logits) ** 2 * weights).sum(), rtol=1e-5)
    np.testing.assert_allclose(accuracy.total, ((logits.argmax(-1) == targets) * weights).sum())
    assert loss.weight == weights.sum() < 21


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_the_gradient_of_cross_entropy_is_probability_minus_target(by_product, label_smoothing):
    logits = tf.constant(np.random.RandomState(2).randn(2, 3, 4).astype("float32"))
    targets, weights = np.array([[0, 1, 2], [3, 0, 0]]), np.array([[1, 1, 1], [1, 0, 0]], "float32")
    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss, z_loss, _ = losses.cross_entropy(logits, targets, weights, 0.1, label_smoothing)
        total = loss.total + z_loss.total
    probs = np.exp(log_softmax(logits.numpy()))
    smoothed = (1 - label_smoothing) * np.eye(4)[targets] + label_smoothing / 4
    # The z-loss adds weight * 2 lse * probability.
    expected = probs - smoothed + 0.1 * 2 * log_normalizer(logits.numpy())[..., None] * probs
    np.testing.assert_allclose(tape.gradient(total, logits), expected * weights[..., None], atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_soft_cross_entropy_and_its_gradient_are_those_of_its_definition(temperature):
    """The gradient is T * (student's probability - teacher's), which 1 / T^2 of the loss would lack (Hinton et al.)."""
    rng = np.random.RandomState(4)
    logits, teacher = tf.constant(rng.randn(2, 3, 5).astype("float32")), rng.randn(2, 3, 5).astype("float32")
    weights = np.array([[1, 1, 0], [1, 0, 0]])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = losses.soft_cross_entropy(logits, teacher, weights, temperature)
    student_probs, probs = (np.exp(log_softmax(values / temperature)) for values in (logits.numpy(), teacher))
    expected = -(probs * np.log(student_probs)).sum(-1) * temperature ** 2
    np.testing.assert_allclose(loss.total, (expected * weights).sum(), rtol=1e-5)
    assert loss.weight == 3
    np.testing.assert_allclose(tape.gradient(loss.total, logits),
                               temperature * (student_probs - probs) * weights[..., None], atol=1e-6)


def _coarse_loss(logits, probs, token_ids, weights, temperature):
    """The definition in float64, with one outcome for all tokens but `token_ids`."""
    student = np.exp(log_softmax(logits / temperature))
    kept = np.zeros(probs.shape, bool)
    np.put_along_axis(kept, token_ids, True, -1)
    total = -np.sum(np.where(kept, probs * np.log(student), 0), -1)
    total -= np.where(kept, 0, probs).sum(-1) * np.log(np.where(kept, 0, student).sum(-1))
    return temperature ** 2 * np.sum(total * weights)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_coarse_soft_cross_entropy_and_its_gradient_are_those_of_its_definition(by_product, temperature):
    """The gradient is compared with central differences of the definition, in float64."""
    rng = np.random.RandomState(4)
    values, teacher = rng.randn(2, 3, 7), 3 * rng.randn(2, 3, 7)
    weights, probs = np.array([[1, 1, 0], [1, 0, 0]]), np.exp(log_softmax(teacher / temperature))
    logits = tf.constant(values.astype("float32"))
    with tf.GradientTape() as tape:
        tape.watch(logits)
        predictions = losses.most_probable(tf.constant(teacher.astype("float32")), 3, temperature)
        loss = losses.coarse_soft_cross_entropy(logits, predictions, weights, temperature)
    largest = np.argsort(-teacher, axis=-1)[..., :3]
    np.testing.assert_array_equal(predictions.token_ids, largest)
    np.testing.assert_allclose(predictions.log_rest, np.log(1 - np.take_along_axis(probs, largest, -1).sum(-1)),
                               rtol=1e-4)
    np.testing.assert_allclose(loss.total, _coarse_loss(values, probs, largest, weights, temperature), rtol=1e-5)
    assert loss.weight == 3
    steps = 1e-5 * np.eye(values.size).reshape(-1, *values.shape)
    differences = [_coarse_loss(values + step, probs, largest, weights, temperature)
                   - _coarse_loss(values - step, probs, largest, weights, temperature) for step in steps]
    np.testing.assert_allclose(tape.gradient(loss.total, logits), np.reshape(differences, values.shape) / 2e-5,
                               atol=2e-6)


def test_with_the_whole_vocabulary_the_coarse_loss_is_the_soft_one_and_its_gradient_finite(by_product):
    rng = np.random.RandomState(5)
    logits, teacher = (tf.constant(rng.randn(2, 3, 5).astype("float32")) for _ in range(2))
    weights, found = np.ones((2, 3)), []
    predictions = losses.most_probable(teacher, 5, 2.0)
    for loss_of, target in ((losses.soft_cross_entropy, teacher), (losses.coarse_soft_cross_entropy, predictions)):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = loss_of(logits, target, weights, 2.0)
        found.append((loss.total, tape.gradient(loss.total, logits)))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-6)


def test_a_student_that_is_sure_of_the_wrong_tokens_is_drawn_back(by_product):
    """Its rest has the probability e^-200, which float32 cannot hold; the teacher's is a half.

    The teacher has 1/4 for each of the tokens 0 and 1, the student nearly 1 for token 0: the gradient of the loss is
    the student's minus the teacher's probability, 1 - 1/4, 0 - 1/4 and, shared equally by the others, -1/2 / 2.
    """
    logits = tf.constant([[[200.0, 0.0, 0.0, 0.0]]])
    predictions = losses.Predictions(np.array([[[0, 1]]], "int32"), np.log([[[0.25, 0.25]]]), np.log([[0.5]]))
    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = losses.coarse_soft_cross_entropy(logits, predictions, [[1]])
    np.testing.assert_allclose(loss.total, 0.25 * 200 + 0.5 * (200 - np.log(2)), rtol=1e-6)
    np.testing.assert_allclose(tape.gradient(loss.total, logits), [[[0.75, -0.25, -0.25, -0.25]]], atol=1e-6)


def test_means_of_parts_merge_to_the_whole():
    rng = np.random.RandomState(3)
    probs = rng.dirichlet([1, 1, 1], (4, 6)).astype("float32")
    index, mask = probs.argmax(-1), rng.rand(4, 6) < 0.5
    for semantics in ("switch_tf", "mtf"):
        whole, first, second = (
            losses.balance(probs[rows], index[rows], mask[rows], semantics).mean
            for rows in (slice(None), slice(0, 1), slice(1, None)))
        np.testing.assert_allclose(first.merge(second).value, whole.value, rtol=1e-6)
    first, second = (losses.router_z_mean(np.log(probs[rows]), mask[rows]) for rows in (slice(0, 1), slice(1, None)))
    np.testing.assert_allclose(first.merge(second).value, losses.router_z_loss(np.log(probs), mask), atol=1e-7)


# Dtype.


def test_losses_are_float32_whatever_comes_in():
    # 256 + 1 is 256 in bfloat16: sums in it would lose the tail. Here: 512 tokens, ln 2 each.
    logits = tf.zeros((1, 512, 2), tf.bfloat16)
    loss, z_loss, accuracy = losses.cross_entropy(logits, np.zeros((1, 512), "int32"), np.ones((1, 512), "float32"))
    np.testing.assert_allclose(loss.total, 512 * np.log(2), rtol=1e-6)
    half = tf.fill((1, 512, 2), tf.constant(0.5, tf.bfloat16))
    balance = losses.balance(half, np.zeros((1, 512), "int32")).mean
    for mean in (loss, z_loss, accuracy, balance, losses.router_z_mean(half)):
        assert mean.total.dtype == mean.weight.dtype == tf.float32
    assert balance.weight == 512


def test_large_logits_do_not_overflow(by_product):
    loss, z_loss, _ = losses.cross_entropy(np.array([[[1e4, -1e4]]], "float32"), [[1]], [[1.0]], z_loss_weight=1.0)
    assert loss.value == 2e4 and z_loss.value == 1e8


# Refusals.


def test_unknown_semantics_name_the_nearest():
    with pytest.raises(ValueError, match=r"semantics must be one of .* not 'mft'\. Did you mean 'mtf'\?"):
        losses.load_balancing_loss(np.ones((1, 1, 1), "float32"), [[0]], semantics="mft")
