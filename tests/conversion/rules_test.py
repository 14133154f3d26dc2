import numpy as np
import pytest

from switch_tf.conversion.weight_source import Rule, Rules
from tests.conversion.shared import refusal

RULES = Rules(
    [
        Rule("layers_<i>/query", "<i>.q", merge=1, transpose=True),
        Rule("layers_<i>/out", "<i>.o", merge=0),
        Rule("layers_<i>/experts", "<i>.<e>.w", transpose=True, stack="e"),
        Rule("", "<i>.unused"),
    ])
SHAPES = {"layers_0/query": (2, 3, 4), "layers_0/out": (3, 4, 2), "layers_12/experts": (2, 3, 1)}
THEIR_SHAPES = {"0.q": (12, 2), "0.o": (12, 2), "12.0.w": (1, 3), "12.1.w": (1, 3)}


def of_shapes(shapes):
    return {name: np.empty(shape) for name, shape in shapes.items()}


def link_all(shapes, rules=RULES):
    return rules.link(of_shapes(shapes))


def check(their_shapes=THEIR_SHAPES, shapes=SHAPES, rules=RULES):
    rules.check(link_all(shapes, rules), of_shapes(their_shapes), "give another one")


def test_names_and_shapes_by_hand():
    assert {name: link.their_shape for link in link_all(SHAPES) for name in link.theirs} == THEIR_SHAPES
    check({**THEIR_SHAPES, "3.unused": (7,)})


def test_merge_and_transpose_by_hand():
    # ours[m, h, d] with one head of two: [[1, 2]], [[3, 4]] for m = 0, 1; theirs[h d, m] = [[1, 3], [2, 4]].
    (link,) = link_all({"layers_0/query": (2, 1, 2)})
    theirs = np.array([[1, 3], [2, 4]])
    np.testing.assert_array_equal(link.to_ours({"0.q": theirs}.get), [[[1, 2]], [[3, 4]]])


def test_experts_are_stacked_one_at_a_time():
    (link,) = link_all({"layers_0/experts": (2, 1, 3)})
    asked = []

    def read(name, index):
        asked.append(name)
        return np.array({"0.0.w": [[1], [2], [3]], "0.1.w": [[4], [5], [6]]}[name])

    np.testing.assert_array_equal(link.to_ours(read), [[[1, 2, 3]], [[4, 5, 6]]])
    assert asked == ["0.0.w", "0.1.w"]


@pytest.mark.parametrize("name", SHAPES)
def test_there_and_back(name):
    weight = np.random.RandomState(0).standard_normal(SHAPES[name])
    (link,) = link_all({name: SHAPES[name]})
    theirs = dict(link.to_theirs(weight))
    assert {name: tensor.shape for name, tensor in theirs.items()} == dict.fromkeys(link.theirs, link.their_shape)
    np.testing.assert_array_equal(link.to_ours(theirs.get), weight)


ONE = {"0": (1,)}


@pytest.mark.parametrize(("arguments", "message"), [
    # Templates match from end to end, and their dots are dots.
    *((({}, {name: (2, 3, 4)}), f"No rule knows the weight '{name}'") for name in (
        "layers_0/query/more", "more/layers_0/query", "layers_01/query", "layers_/query")),
    (({**THEIR_SHAPES, "0xq": (12, 2)},), "No rule knows the checkpoint's tensor '0xq'"),
    (({"a.0": (1,)}, ONE, Rules([Rule("<i>", "a.<i>"), Rule("", "a.0")])),
     "2 rules know the checkpoint's tensor 'a.0': 'a.<i>' and 'a.0'; exactly one must"),
    (({}, ONE, Rules([Rule("<i>", "a.<i>"), Rule("0", "b")])), "2 rules know the weight '0': 'a.<i>' and 'b'"),
    (({"x": (1,)}, {"a": (1,), "b": (1,)}, Rules([Rule("a", "x"), Rule("b", "x")])),
     "The weights 'a' and 'b' both ask for 'x'"),
    (({name: THEIR_SHAPES[name] for name in ("0.q", "0.o", "12.0.w")},),
     "The checkpoint lacks '12.1.w' of shape (1, 3), which holds the weight 'layers_12/experts'"),
    (({**THEIR_SHAPES, "12.2.w": (1, 3)},),
     "The checkpoint holds '12.2.w', for which a model of this configuration has no place"),
    (({**THEIR_SHAPES, "0.q": (2, 12)},),
     "The checkpoint's '0.q' has shape (2, 12), but its configuration asks for (12, 2) (the weight 'layers_0/query' "
     "of shape (2, 3, 4)); give another one.")])
def test_other_names_and_shapes_are_refused(arguments, message):
    assert refusal(check, *arguments).startswith(message)
