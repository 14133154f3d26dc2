import numpy as np
import pytest

from switch_tf.conversion.weight_source import Rule, Rules

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


def link_all(rules, shapes):
    return rules.link(of_shapes(shapes))


def refusal(their_shapes=THEIR_SHAPES, shapes=SHAPES, rules=RULES):
    with pytest.raises(ValueError) as error:
        rules.check(link_all(rules, shapes), of_shapes(their_shapes), "give another one")
    return str(error.value)


def test_names_and_shapes_by_hand():
    links = link_all(RULES, SHAPES)
    assert {name: link.their_shape for link in links for name in link.theirs} == THEIR_SHAPES
    RULES.check(links, of_shapes({**THEIR_SHAPES, "3.unused": (7,)}), "give another one")


def test_merge_and_transpose_by_hand():
    # ours[m, h, d] with one head of two: [[1, 2]], [[3, 4]] for m = 0, 1; theirs[h d, m] = [[1, 3], [2, 4]].
    (link,) = link_all(RULES, {"layers_0/query": (2, 1, 2)})
    theirs = np.array([[1, 3], [2, 4]])
    np.testing.assert_array_equal(link.to_ours({"0.q": theirs}.get), [[[1, 2]], [[3, 4]]])


def test_experts_are_stacked_one_at_a_time():
    (link,) = link_all(RULES, {"layers_0/experts": (2, 1, 3)})
    asked = []

    def read(name, index):
        asked.append(name)
        return np.array({"0.0.w": [[1], [2], [3]], "0.1.w": [[4], [5], [6]]}[name])

    np.testing.assert_array_equal(link.to_ours(read), [[[1, 2, 3]], [[4, 5, 6]]])
    assert asked == ["0.0.w", "0.1.w"]


@pytest.mark.parametrize("name", SHAPES)
def test_there_and_back(name):
    weight = np.random.RandomState(0).standard_normal(SHAPES[name])
    (link,) = link_all(RULES, {name: SHAPES[name]})
    theirs = dict(link.to_theirs(weight))
    assert {name: tensor.shape for name, tensor in theirs.items()} == dict.fromkeys(link.theirs, link.their_shape)
    np.testing.assert_array_equal(link.to_ours(theirs.get), weight)


def test_templates_match_from_end_to_end():
    for name in ("layers_0/query/more", "more/layers_0/query", "layers_01/query", "layers_/query"):
        assert f"No rule knows the weight '{name}'" in refusal(shapes={name: (2, 3, 4)})


def test_dots_of_a_template_are_dots():
    assert "No rule knows the checkpoint's tensor '0xq'" in refusal({**THEIR_SHAPES, "0xq": (12, 2)})


def test_a_name_that_two_rules_know():
    rules = Rules([Rule("<i>", "a.<i>"), Rule("", "a.0")])
    assert refusal({"a.0": (1,)}, {"0": (1,)}, rules).startswith(
        "2 rules know the checkpoint's tensor 'a.0': 'a.<i>' and 'a.0'; exactly one must")
    rules = Rules([Rule("<i>", "a.<i>"), Rule("0", "b")])
    assert refusal({}, {"0": (1,)}, rules).startswith("2 rules know the weight '0': 'a.<i>' and 'b'")


def test_two_weights_that_ask_for_one_tensor():
    rules = Rules([Rule("a", "x"), Rule("b", "x")])
    assert refusal({"x": (1,)}, {"a": (1,), "b": (1,)}, rules).startswith("The weights 'a' and 'b' both ask for 'x'")


def test_a_missing_tensor():
    their_shapes = {name: shape for name, shape in THEIR_SHAPES.items() if name != "12.1.w"}
    assert refusal(their_shapes).startswith(
        "The checkpoint lacks '12.1.w' of shape (1, 3), which holds the weight 'layers_12/experts'")


def test_a_tensor_without_a_place():
    assert refusal({**THEIR_SHAPES, "12.2.w": (1, 3)}).startswith(
        "The checkpoint holds '12.2.w', for which a model of this configuration has no place")


def test_a_wrong_shape_is_named_with_both():
    assert refusal({**THEIR_SHAPES, "0.q": (2, 12)}) == (
        "The checkpoint's '0.q' has shape (2, 12), but its configuration asks for (12, 2) (the weight 'layers_0/query' "
        "of shape (2, 3, 4)); give another one.")
