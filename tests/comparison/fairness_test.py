import pytest

from switch_tf import SwitchConfig
from switch_tf.checkpoints import continuation
from switch_tf.comparison import fairness
from tests.comparison.conftest import DENSE, record

LENGTHS = {"inputs": 8, "targets": 4}


def config(**changes):
    return SwitchConfig(**{**DENSE, **changes})


def _configs(records):
    return {name: SwitchConfig(**continuation.model_fields(one)) for name, one in records.items()}


def _shares(records):
    return fairness.work_without_router(_configs(records), LENGTHS)[2]


def _remarks(records):
    reference, _, shares = fairness.work_without_router(_configs(records), LENGTHS)
    return fairness.remarks(records, shares, reference)


def test_work_of_a_token_by_hand():
    # Encoder: 2 layers of 4 products of 16 by 16, and of 2 of 16 by 32, for each of 8 tokens. Decoder: the same twice
    # over for attention, of which cross-attention's keys and values are made of the encoder's 8 tokens.
    encoder = 8 * 2 * (4 * 256 + 2 * 512)
    decoder = 4 * 2 * (4 * 256 + 2 * 256 + 2 * 512) + 8 * 2 * 2 * 256
    found = fairness.work(config(), LENGTHS)
    assert found["flops_per_token"] == 2 * (encoder + decoder) / 12
    assert found["router_flops_share"] == 0 and found["capacity_padding_share"] == 0
    sparse = fairness.work(config(num_experts=4, train_capacity_factor=1.25), LENGTHS)
    router = 2 * (8 + 4) * 16 * 4  # one layer of each stack
    assert sparse["flops_per_token"] == pytest.approx((2 * (encoder + decoder) + router) / 12)
    assert sparse["router_flops_share"] == pytest.approx(router / (2 * (encoder + decoder) + router))
    assert sparse["capacity_padding_share"] == pytest.approx(0.25 * 2 * 2 * 512 * 12 / (sparse["flops_per_token"] * 12))


def test_the_baseline_is_the_first_dense_one_or_the_first():
    assert fairness.work_without_router({"a": config(num_experts=4), "b": config(), "c": config()}, LENGTHS)[0] == "b"
    assert fairness.work_without_router({"a": config(num_experts=4), "b": config(num_experts=8)}, LENGTHS)[0] == "a"


def test_a_router_may_cost_what_it_costs_and_anything_else_two_per_cent():
    fairness.check_work({"dense": config(), "sparse": config(num_experts=64)}, LENGTHS)
    wide = {"dense": config(), "wide": config(d_ff=40)}
    with pytest.raises(ValueError, match=r"'wide' does [\d,]+ FLOPs a token .* and 'dense' does .*, \+10.0%; .*d_ff"):
        fairness.check_work(wide, LENGTHS)
    fairness.check_work(wide, LENGTHS, unequal_work=["wide"])
    with pytest.raises(ValueError, match="'top2' does"):
        fairness.check_work({"dense": config(), "top2": config(
            num_experts=4, routing_policy="top_n", num_selected_experts=2, decoder_routing_policy="switch")}, LENGTHS)


def test_models_optimizers_and_seeds_are_a_variants_own():
    other = record(num_experts=4, seed=3, changes={"Adafactor.learning_rate": "RsqrtDecay(base=2.0)"})
    fairness.check_records({"dense": record(), "sparse": other})


@pytest.mark.parametrize(("key", "value"), [("BATCH_SIZE", 8), ("TRAIN_STEPS", 50), ("StepSettings.clip_norm", 1.0),
                                            ("training data", {"facts": "c"}), ("Run.pack", True)])
def test_what_else_differs_is_refused_unless_it_is_named(key, value):
    records = {"dense": record(), "sparse": record(num_experts=4, changes={key: value})}
    with pytest.raises(ValueError, match=f"{key} is .* in 'dense' and .* in 'sparse'; .*may_differ=\\['{key}'\\]"):
        fairness.check_records(records)
    fairness.check_records(records, may_differ=[key])
    assert any(key in remark for remark in _remarks(records))


def test_a_name_that_nothing_has_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="may_differ names 'BATCHSIZE'.*Did you mean 'BATCH_SIZE'"):
        fairness.check_records({"a": record(), "b": record()}, may_differ=["BATCHSIZE"])


@pytest.mark.parametrize(("key", "value"), [("held-out data", {"facts": "c"}), ("vocabulary", ["t5"]),
                                            ("MIXTURE_OR_TASK_NAME", "other")])
def test_losses_of_other_tokens_are_not_compared(key, value):
    with pytest.raises(ValueError, match=f"{key} is .* in a and .* in b, so their losses are not of the same tokens"):
        fairness.check_losses({"a": record(), "b": record(changes={key: value})})
    fairness.check_losses({"a": record(), "b": record(changes={"BATCH_SIZE": 3})})


def test_unequal_work_comes_first_and_says_who_does_more():
    records = {"dense": record(), "wide": record(d_ff=40), "narrow": record(d_ff=24)}
    assert _remarks(records) == [
        "wide does 10.0% more work for a token than dense, without the router.",
        "narrow does 10.0% less work for a token than dense, without the router.",
        "SwitchConfig.d_ff is 32 in dense and 40 in wide.", "SwitchConfig.d_ff is 32 in dense and 24 in narrow."]
    shares = _shares(records)
    assert shares == pytest.approx({"dense": 0, "wide": 0.1, "narrow": -0.1})
    assert fairness.sentence_about_work(shares, "dense") == (
        "Not all variants do the same work for a token: wide does 10.0% more, narrow does 10.0% less than dense, "
        "without the router.")
    same = {"dense": record(), "sparse": record(num_experts=64)}
    assert _remarks(same) == []
    assert fairness.sentence_about_work(_shares(same), "dense").startswith("All variants do the")


def test_what_matters_comes_first_and_noise_is_left_out():
    rate = "Adafactor.learning_rate"
    other = record(seed=7, changes={
        "EVAL_PERIOD": 3, "LOG_PERIOD": 7, "CHECKPOINT_PERIOD": 9, "Run.keep_every": 5, "TRAIN_STEPS": 50,
        "INITIAL_CHECKPOINT": "runs/first",
        "BATCH_SIZE": 8, rate: "RsqrtDecay(base=2.0)", "training data": {"facts": "c"},
        "SwitchConfig.dropout_rate": 0.3, "StepSettings.clip_norm": 1.0, "SwitchConfig.jitter_noise": 0.0,
        "SwitchConfig.end_id": 3})
    told = _remarks({"a": record(), "b": other})
    assert [remark.split(" is ")[0].split(" differ ")[0] for remark in told] == [
        "SwitchConfig.dropout_rate", "INITIAL_CHECKPOINT", "training data", "learning rate", "BATCH_SIZE",
        "TRAIN_STEPS", "StepSettings.clip_norm", "EVAL_PERIOD"]
    assert told[1] == "INITIAL_CHECKPOINT is None in a and runs/first in b."
    assert "RsqrtDecay(base=2.0) in b." in told[3] and told[2] == "training data differ between a and b: facts."


def test_learning_rates_of_two_optimizers_are_told_beside_each_other():
    other = {name: value for name, value in record().items() if not name.startswith("Adafactor.")}
    other |= {"optimizer": "AdamW", "AdamW.learning_rate": 0.25}
    told = _remarks({"a": record(), "b": other})
    assert told[0] == "optimizer is Adafactor in a and AdamW in b." and told[1].endswith(" and 0.25 in b.")
    assert told[1].startswith("learning rate is ") and len(told) == 2
