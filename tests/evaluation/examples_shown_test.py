from switch_tf.evaluation.split_evaluator import describe_examples


def test_gaps_are_filled_by_model_and_truth_side_by_side():
    shown = [
        ("The <extra_id_0> sat on <extra_id_1> mat. </s>", "<extra_id_0> cat <extra_id_1> the </s>",
         "<extra_id_0> dog <extra_id_0> again <extra_id_1> a red"),
        ("<extra_id_0> a <extra_id_1> b <extra_id_2> c <extra_id_3> d", "<extra_id_0> 1 <extra_id_2> 3", "")]
    assert describe_examples(shown).splitlines() == [
        "Held-out text and what the model fills in: [model | truth]",
        "1. The [dog | cat] sat on [a red | the] mat.", "2. [ | 1] a [ | ] b [ | 3] c ..."]


def test_long_texts_are_cut_and_wrapped_and_examples_without_gaps_stand_below_each_other():
    text = describe_examples([("word " * 80, "numpy </s>", "jax")])
    lines = text.splitlines()
    assert lines[0] == "Held-out examples:" and lines[-2:] == ["   model: jax", "   truth: numpy"]
    assert text.count("word") == 60 and "word..." in text and max(map(len, lines)) < 120
