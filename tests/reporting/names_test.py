from switch_tf.reporting import report


def test_layers_are_found_in_names_and_ordered_as_in_the_model():
    layers = ["encoder/layers_3/attention/query", "encoder/layers_3/attention/key_value", "encoder/layers_3",
              "encoder/layers_11", "decoder/layers_1"]
    written = [report.router(layer, name) for layer in reversed(layers) for name in ("expert_load", "dead_experts")]
    assert report.sparse_layers(["step", "train/loss", *written]) == layers


def test_a_share_is_told_from_a_metric_of_the_same_name():
    """seqio's accuracy goes to 100; it is in the way of the share of right tokens, which then has another name."""
    assert report.find_shares(["eval/a/accuracy", "eval/a/loss"]) == {"eval/a/accuracy"}
    assert report.find_shares(["eval/a/accuracy", "eval/a/token_accuracy", "eval/b/f1"]) == {"eval/a/token_accuracy"}
    assert report.find_shares(["train/model_flops_utilization", "train/accuracy"]) == {
        "train/model_flops_utilization", "train/accuracy"}
    assert (report.shown(0.6421, True), report.shown(18.75, False)) == ("64.2%", "18.7500")
