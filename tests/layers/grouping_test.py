"""How many groups a batch has, and how many slots an expert has for each."""

import math

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import partitioning
from switch_tf.configs.semantics import Grouping
from switch_tf.layers import SwitchFeedForward, grouping
from switch_tf.layers.grouping import Groups, check_batch, global_groups, plan_groups


def sized(group_size, multiple, semantics="switch_tf"):
    """A Grouping of sizes alone."""
    return Grouping(8, group_size, multiple, semantics=semantics)


def naive_groups(num_tokens, group_size, multiple):
    """The first number of groups that fits, by trying all."""
    for count in range(multiple, num_tokens + 1, multiple):
        if num_tokens % count == 0 and num_tokens // count <= group_size:
            return Groups(count, num_tokens // count)
    return None


# Hand-worked values.


@pytest.mark.parametrize("num_tokens, group_size, multiple, expected, semantics", [(*row, "switch_tf")[:5] for row in [
    (4096, 4096, 1, (1, 4096)),
    (8192, 4096, 1, (2, 4096)),
    # Not one group of 2047, as where the number of groups is rounded down: 2047 = 23 * 89.
    (2047, 1024, 1, (23, 89)),
    (6144, 4096, 1, (2, 3072)),
    (6144, 4096, 8, (8, 768)),
    # 6000 / 8 = 750 = 2 * 375 tokens
    (6000, 500, 8, (16, 375)),
    (6100, 4096, 4, (4, 1525)),
    (6100, 4096, 8, None),
    (7, 4, 1, (7, 1)),
    # Mesh TensorFlow lets groups exceed their size: 2047 // 1024 = 1 group; 3000 // 1024 = 2, and 4 of 750 divide.
    (2047, 1024, 1, (1, 2047), "mtf"),
    (3000, 1024, 4, (4, 750), "mtf"),
]])
def test_groups(num_tokens, group_size, multiple, expected, semantics):
    assert global_groups(num_tokens, sized(group_size, multiple, semantics)) == expected


# tokens, factor, experts, minimum, slots; and the semantics if they are not ours
CAPACITIES = [
    # 1000 * 1.25 / 64 = 19.5 down
    (1000, 1.25, 64, 4, 19),
    (1024, 1.0, 8, 4, 128),
    (1024, 2.0, 8, 4, 256),
    # 8 * 1.25 / 8 = 1.25: the minimum
    (8, 1.25, 8, 4, 4),
    (8, 1.25, 8, 1, 1),
    # No more slots than the group has tokens, the minimum notwithstanding.
    (3, 1.25, 8, 4, 3),
    (16, 2.0, 1, 4, 16),
    # Exactly 110 and 23; in binary 1.15 * 100 / 5 is 22.999...
    (1000, 1.1, 10, 4, 110),
    (100, 1.15, 5, 1, 23),
    (4096, 1.25, 2048, 1, 2),
    # As integers go: 2^20 * 1.25 * 100 would not fit into 32 bits.
    (2**20, 1.25, 2, 4, 655360),
    # In binary 1.15 * 100 is 114.999..., which Mesh TensorFlow divides by 5 and cuts to 22, and T5X rounds to 23. In
    # T5X, 1.15 * 50 = 57.499... slots are 57, and halves are rounded to even: 2.5 to 2, 3.5 to 4.
    (100, 1.15, 5, 1, 22, "mtf"), (100, 1.15, 5, 1, 23, "t5x"), (50, 1.15, 1, 1, 57, "t5x"),
    (10, 1.25, 5, 1, 2, "t5x"), (10, 1.0, 4, 1, 2, "t5x"), (14, 1.0, 4, 1, 4, "t5x"), (15, 1.0, 4, 1, 4, "t5x"),
    (1000, 1.25, 64, 1, 19, "mtf"), (1000, 1.25, 64, 1, 20, "t5x"),
    # trunc(2 * 1.25 / 4) = 0 slots, then the minimum, although a group has 2 tokens
    (2, 1.25, 4, 4, 4, "mtf"), (2, 1.25, 4, 4, 2),
]


@pytest.mark.parametrize("tokens, factor, num_experts, minimum, expected, semantics", [
    (*row, "switch_tf")[:6] for row in CAPACITIES])
def test_capacity_of_a_known_and_an_unknown_number_of_tokens(tokens, factor, num_experts, minimum, expected, semantics):
    sizes = Grouping(num_experts, train_capacity_factor=factor, min_expert_capacity=minimum, semantics=semantics)
    assert grouping.expert_capacity(tokens, sizes, training=True) == expected
    capacity = grouping.expert_capacity(tf.constant(tokens), sizes, training=True)
    assert capacity.dtype == tf.int32 and int(capacity) == expected


def test_evaluation_fills_up_to_the_multiple():
    # 6100 tokens are filled up to 6104 = 8 * 763.
    assert plan_groups((100, 61), sized(4096, 8), training=False) == (8, 763)
    # 3 tokens up to 8, one for each group
    assert plan_groups((1, 3), sized(4096, 8), training=False) == (8, 1)
    assert plan_groups((0, 3), sized(4096, 8), training=False) == (8, 1)
    # Nothing to fill
    assert plan_groups((96, 61), sized(4096, 8), training=False) == (8, 732)


def test_parts_share_the_groups_of_the_whole_batch():
    # 6100 tokens in 4 groups of 1525: 2 for each half. A half alone would be cut into 1 group of 3050.
    with partitioning.part_of_batch(2, 1):
        assert plan_groups((50, 61), sized(4096, 4), training=True) == (2, 1525)
        assert plan_groups((50, 61), sized(4096, 4), training=False) == (2, 1525)
    assert plan_groups((50, 61), sized(4096, 1), training=True) == (1, 3050)


# (sequences, length) -> that of the completed batch, for 8 experts, by the rule of Flaxformer's _maybe_pad: of
# 3 * 16 = 48 and 8 * 13 = 104 tokens, the fewer.
COMPLETED = {(3, 13): (3, 16), (13, 3): (16, 3), (2, 4): (2, 4), (6, 7): (6, 8), (7, 6): (8, 6), (1, 5): (1, 8),
             (5, 1): (8, 1), (4, 5): (4, 6), (1, 18): (1, 24)}  # 6 more columns are fewer tokens than 3 more rows


@pytest.mark.parametrize("shape", COMPLETED)
def test_flaxformer_completes_a_batch_by_rows_or_columns(shape):
    flaxformer = Grouping(8, 4096, 1, semantics="t5x")
    expected = COMPLETED[shape]
    groups, _, completed = grouping.plan(flaxformer, shape, training=False)
    assert completed == expected and groups == Groups(8, math.prod(expected) // 8)
    unknown = grouping.plan(flaxformer, tuple(map(tf.constant, shape)), training=False)
    assert tuple(map(int, unknown.shape)) == expected and tuple(map(int, unknown.groups)) == tuple(groups)
    # Two parts of a batch of twice as many sequences are completed alike, to 4 groups each.
    with partitioning.part_of_batch(2, 1):
        part = grouping.plan(flaxformer, shape, training=False)
    assert part.shape[0] * part.shape[1] % 4 == 0 and part.groups.count == 4


def test_the_number_of_groups_is_a_multiple_of_the_experts_in_flaxformer():
    assert Grouping(8, 4096, 1, semantics="t5x").groups_multiple == 8
    assert Grouping(8, 4096, 16, semantics="t5x").groups_multiple == 16  # two replicas of the experts
    assert Grouping(8, 4096, 12, semantics="t5x").groups_multiple == 24
    assert Grouping(8, 4096, 12).groups_multiple == Grouping(8, 4096, 12, semantics="mtf").groups_multiple == 12
    with pytest.raises(ValueError, match=r"multiple of 8 divides 12 tokens .* Use a batch of 8 sequences\.$"):
        check_batch(4, 3, Grouping(8, 4096, 1, semantics="t5x"))


# Invariants and equivalence.


def test_groups_are_the_fewest_that_fit():
    for num_tokens in range(1, 200):
        for group_size in (1, 5, 64, 1000):
            for multiple in (1, 2, 6, 8):
                groups = global_groups(num_tokens, sized(group_size, multiple))
                assert groups == naive_groups(num_tokens, group_size, multiple)
                assert (groups is None) == (num_tokens % multiple != 0)


def test_an_unknown_batch_gives_the_same_groups():
    @tf.function(input_signature=[tf.TensorSpec([None, None, 1])], reduce_retracing=True)
    def dynamic(x):
        shape = tf.shape(x)
        return [tf.stack(grouping.plan_groups((shape[0], shape[1]), sized(group_size, multiple), training))
                for group_size, multiple in ((1024, 1), (7, 1), (64, 8)) for training in (False, True)]

    for batch, length in [(1, 1), (3, 5), (8, 64), (100, 61), (23, 89), (16, 33), (0, 4)]:
        expected = [plan_groups((batch, length), sized(group_size, multiple), training=False)
                    for group_size, multiple in ((1024, 1), (7, 1), (64, 8)) for _ in range(2)]
        np.testing.assert_array_equal(dynamic(np.zeros((batch, length, 1), "float32")), expected)


def test_xla_computes_the_groups_of_an_unknown_batch_of_flaxformer():
    layer = SwitchFeedForward(4, 16, semantics="t5x", num_groups_multiple=4, group_size=64)
    layer.build((None, None, 8))
    compiled = tf.function(layer, jit_compile=True, input_signature=[tf.TensorSpec([None, 6, 8])])
    for batch in (4, 3):
        x = np.ones((batch, 6, 8), "float32")
        np.testing.assert_allclose(compiled(x), layer(x), atol=1e-5)


def test_one_pass_and_parts_have_the_same_groups():
    for num_parts in (2, 4, 8):
        whole = plan_groups((16, 12), sized(10, 8), training=True)
        with partitioning.part_of_batch(num_parts, 0):
            part = plan_groups((16 // num_parts, 12), sized(10, 8), training=True)
        assert (part.count * num_parts, part.size) == whole


# Refusals.


def test_a_batch_that_cannot_be_cut_is_refused_with_batches_that_can():
    message = (
        r"^No number of groups that is a multiple of 8 divides 6100 tokens \(100 sequences of 61\) into groups of at "
        r"most 4096\. Use a batch of 96 or 104 sequences, or num_groups_multiple=4\.$")
    with pytest.raises(ValueError, match=message):
        check_batch(100, 61, sized(4096, 8))
    with pytest.raises(ValueError, match=message):
        plan_groups((100, 61), sized(4096, 8), training=True)
    # What the sentence offers works: 96 * 61 = 8 * 732, 104 * 61 = 8 * 793, 6100 = 4 * 1525.
    for batch, multiple, expected in ((96, 8, (8, 732)), (104, 8, (8, 793)), (100, 4, (4, 1525))):
        check_batch(batch, 61, sized(4096, multiple))
        assert plan_groups((batch, 61), sized(4096, multiple), training=True) == expected


def test_a_part_is_refused_with_the_whole_batch_in_the_sentence():
    with partitioning.part_of_batch(2, 0), pytest.raises(ValueError, match=r"6100 tokens \(100 sequences of 61\)"):
        plan_groups((50, 61), sized(4096, 8), training=True)


@pytest.mark.parametrize("batch, length, multiple", [(3, 5, 8), (1, 1, 8), (7, 6, 4), (10, 15, 12), (5, 114, 64)])
def test_what_a_refusal_offers_always_works(batch, length, multiple):
    with pytest.raises(ValueError) as error:
        check_batch(batch, length, sized(64, multiple))
    sentence = str(error.value).split("Use a batch of ")[1]
    batches = [int(word) for word in sentence.split(" sequences")[0].split(" or ")]
    for offered in batches:
        assert offered > 0
        check_batch(offered, length, sized(64, multiple))
    # They are the nearest: nothing between them can be cut.
    for between in range(max([b for b in batches if b < batch], default=0) + 1, max(batches)):
        assert between * length % multiple
    offered_multiple = int(sentence.split("num_groups_multiple=")[1].rstrip("."))
    assert offered_multiple == math.gcd(batch * length, multiple)
    check_batch(batch, length, sized(64, offered_multiple))


def test_parts_that_would_cut_a_group_are_refused():
    # 6100 tokens in 2 groups of 3050 cannot be cut into 4 parts.
    message = r"A batch routed in 2 groups cannot be cut into 4 parts of whole groups \(.*\)\. Set num_groups_multiple"
    with pytest.raises(ValueError, match=message):
        check_batch(100, 61, sized(4096, 1), num_parts=4)
    with partitioning.part_of_batch(4, 0), pytest.raises(ValueError, match=message):
        plan_groups((25, 61), sized(4096, 1), training=True)


def test_an_unknown_batch_cannot_be_cut_into_parts():
    @tf.function(input_signature=[tf.TensorSpec([None, 6])])
    def plan(x):
        with partitioning.part_of_batch(2, 0):
            return grouping.plan_groups((tf.shape(x)[0], 6), sized(4, 1), training=True)

    with pytest.raises(ValueError, match="The batch size must be known while tracing where a batch is cut into parts"):
        plan(np.zeros((2, 6), "float32"))
