"""Changes between two starts of a run that are allowed, printed or refused. No model is built."""

import dataclasses
import json

import keras
import pytest

from switch_tf import SwitchConfig
from switch_tf.checkpoints import continuation
from switch_tf.configs.run import Run, StepSettings
from switch_tf.evaluation.objectives import Objective
from switch_tf.optim.adafactor import Adafactor
from switch_tf.optim.schedules import RsqrtDecay

CONFIG = SwitchConfig(num_experts=4)
RUN = Run(model_dir="run", mixture_or_task_name="task", task_feature_lengths={"inputs": 32, "targets": 16},
          train_steps=6, batch_size=4)
FILES = {"task: a.txt": "10 bytes, 0a", "task: b.txt": "12 bytes, 0b"}


def _record(config=CONFIG, run=RUN, settings=None, dtype="float32", optimizer=None, files=FILES, held_out=FILES,
            vocabulary=("bytes",), objective=None):
    return continuation.record(config, run, settings or StepSettings(), dtype, optimizer or Adafactor(0.01),
                               objective or Objective(), files, held_out, list(vocabulary), list(vocabulary))


def _changed(part, **changes):
    return dataclasses.replace(part, **changes)


def test_a_record_is_the_same_when_it_comes_back_from_a_file():
    record = _record(optimizer=Adafactor(RsqrtDecay(1.0, 100)))
    assert json.loads(json.dumps(record)) == record
    assert record["Adafactor.learning_rate"] == "RsqrtDecay(base=1.0, warmup_steps=100)"
    assert continuation.check(record, _record(optimizer=Adafactor(RsqrtDecay(1.0, 100))), "step_1") == ([], False)


class Other(Objective):
    def __init__(self, share):
        self.share = share

    def get_config(self):
        return {"share": self.share}


def test_another_objective_is_refused_and_another_argument_of_it_told():
    with pytest.raises(ValueError, match="another model or optimizer: objective was 'Objective' and is 'Other'"):
        continuation.check(_record(), _record(objective=Other(0.5)), "step_1")
    lines, _ = continuation.check(_record(objective=Other(0.5)), _record(objective=Other(0.25)), "step_1")
    assert lines == ["Changed since step_1: Other.share was 0.5 and is 0.25."]


def test_what_a_run_started_from_is_recorded_and_says_nothing_of_whether_it_may_go_on():
    record, moved = _record(), _record(run=_changed(RUN, initial_checkpoint="runs/first"))
    assert (record["INITIAL_CHECKPOINT"], moved["INITIAL_CHECKPOINT"]) == (None, "runs/first")
    assert continuation.check(record, moved, "step_1") == ([], False)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SwitchConfig)])
def test_every_field_of_a_model_is_recorded_but_what_changes_no_number(field):
    assert (f"SwitchConfig.{field}" in _record()) == (field not in ("dispatch", "remat"))


@pytest.mark.parametrize(("changes", "message"), [
    ({"config": _changed(CONFIG, num_encoder_layers=4)}, "SwitchConfig.num_encoder_layers was 6 and is 4"),
    ({"config": _changed(CONFIG, num_experts=8, d_ff=32)},
     "SwitchConfig.d_ff was 2048 and is 32; SwitchConfig.num_experts was 4 and is 8"),
    ({"config": _changed(CONFIG, layer_norm_epsilon=1e-5)}, "SwitchConfig.layer_norm_epsilon was 1e-06 and is 1e-05"),
    ({"optimizer": keras.optimizers.AdamW()}, "optimizer was 'Adafactor' and is 'AdamW'"),
    ({"vocabulary": ("pieces",)}, r"vocabulary was \['bytes'\] and is \['pieces'\]"),
])
def test_another_model_is_refused_with_both_values(changes, message):
    with pytest.raises(ValueError, match=rf"run/step_1 is of another model or optimizer: {message}\. Start it with"):
        continuation.check(_record(), _record(**changes), "run/step_1", restart_changed_data=True)


@pytest.mark.parametrize(("changes", "message"), [
    ({"run": _changed(RUN, batch_size=8)}, "BATCH_SIZE was 4 and is 8"),
    ({"run": _changed(RUN, task_feature_lengths={"inputs": 32, "targets": 8})},
     "TASK_FEATURE_LENGTHS was {'inputs': 32, 'targets': 16} and is {'inputs': 32, 'targets': 8}"),
    ({"run": _changed(RUN, mixture_or_task_name="other")}, "MIXTURE_OR_TASK_NAME was 'task' and is 'other'"),
    ({"run": _changed(RUN, pack=True)}, "Run.pack was False and is True"),
    ({"settings": StepSettings(steps_per_call=2)}, "StepSettings.steps_per_call was 1 and is 2"),
    ({"files": {**FILES, "task: b.txt": "12 bytes, ff"}},
     "the training data, task: b.txt, was 12 bytes, 0b and is 12 bytes, ff"),
    ({"files": {"task: b.txt": "12 bytes, 0b"}},
     "the training data, task: a.txt, was 10 bytes, 0a and is not there"),
    ({"files": {}}, "the training data, task: a.txt and 1 more, was 10 bytes, 0a and is not there"),
])
def test_other_data_are_refused_or_start_anew_on_request(changes, message):
    with pytest.raises(ValueError) as raised:
        continuation.check(_record(), _record(**changes), "step_1")
    assert message in str(raised.value) and "--gin.Run.restart_changed_data=True" in str(raised.value)
    lines, is_anew = continuation.check(_record(), _record(**changes), "step_1", restart_changed_data=True)
    assert is_anew and lines == [f"The data are others, so they are read from their beginning: {message}."]
    # The next checkpoint holds the new record: the same command then goes on where it stopped.
    again = _record(**changes)
    assert continuation.check(again, again, "step_2", restart_changed_data=True) == ([], False)


@pytest.mark.parametrize(("changes", "message"), [
    ({"run": _changed(RUN, seed=1)}, "SEED was 0 and is 1"),
    ({"run": _changed(RUN, eval_batches=1, eval_period=10)}, "EVAL_PERIOD was 1000 and is 10; Run.eval_batches was"),
    ({"config": _changed(CONFIG, dropout_rate=0.3)}, "SwitchConfig.dropout_rate was 0.1 and is 0.3"),
    ({"settings": StepSettings(clip_norm=1.0)}, "StepSettings.clip_norm was None and is 1.0"),
    ({"optimizer": Adafactor(RsqrtDecay())}, "rate was 0.01 and is 'RsqrtDecay(base=1.0, warmup_steps=10000)'"),
    ({"dtype": "mixed_bfloat16"}, "SwitchTransformer.dtype was 'float32' and is 'mixed_bfloat16'"),
    ({"held_out": {}}, "the held-out data, task: a.txt and 1 more"),
])
def test_what_may_change_is_told(changes, message):
    [line], is_anew = continuation.check(_record(), _record(**changes), "step_1")
    assert line.startswith("Changed since step_1: ") and message in line and not is_anew


@pytest.mark.parametrize("changes", [
    {"run": _changed(RUN, model_dir="moved", restart_changed_data=True)},
    {"config": _changed(CONFIG, dispatch="index", remat=True)},
    {"settings": StepSettings(num_microbatches=2, use_xla=True)}])
def test_what_changes_no_number_is_not_spoken_of(changes):
    assert continuation.check(_record(), _record(**changes), "step_1") == ([], False)


def test_a_name_that_another_version_lacks_is_no_difference():
    older = {name: value for name, value in _record().items() if name != "SwitchConfig.d_ff"}
    assert continuation.check({**older, "SwitchConfig.gone": 1}, _record(), "step_1") == ([], False)


def test_a_checkpoint_without_a_record_is_told_and_goes_on():
    [line], is_anew = continuation.check({}, _record(), "step_1")
    assert "only its variables are compared" in line and not is_anew
    assert continuation.check({}, _record(), "step_1", restart_changed_data=True)[1]


def test_weights_to_start_from_need_the_same_model_and_vocabulary_alone():
    other_data = _record(run=_changed(RUN, batch_size=8), optimizer=keras.optimizers.AdamW(), files={})
    continuation.check_weights(other_data, _record(), "step_1")
    continuation.check_weights({}, _record(), "step_1")
    with pytest.raises(ValueError, match="num_encoder_layers was 6 and is 4. .* or another INITIAL_CHECKPOINT"):
        continuation.check_weights(_record(), _record(_changed(CONFIG, num_encoder_layers=4)), "step_1")
    with pytest.raises(ValueError, match=r"vocabulary was \['bytes'\] and is \['pieces'\]. Use .* the VOCABULARY that"):
        continuation.check_weights(_record(), _record(vocabulary=("pieces",)), "step_1")


def test_matching_weights_may_be_of_another_model_but_not_of_another_vocabulary():
    deeper = _record(_changed(CONFIG, num_encoder_layers=4))
    continuation.check_weights(deeper, _record(), "step_1", initial_variables="matching")
    with pytest.raises(ValueError, match="vocabulary was"):
        continuation.check_weights(deeper, _record(vocabulary=("pieces",)), "step_1", initial_variables="matching")


def test_the_model_of_a_record_comes_back_and_an_unknown_field_is_refused():
    assert SwitchConfig(**continuation.model_fields(_record())) == CONFIG
    with pytest.raises(ValueError, match="is of a model with 'wings', which this SwitchConfig does not have"):
        continuation.model_fields({**_record(), "SwitchConfig.wings": 2})


def test_vocabularies_are_told_in_words_where_there_are_any():
    words = "'own.model' (pieces; the copy of the run is x/vocabulary/inputs.model)", "'bytes' (bytes)"
    told = f"VOCABULARY was {words[0]} and is {words[1]}"
    for refuse in (lambda: continuation.check(_record(), _record(vocabulary=("pieces",)), "step_1", False, words),
                   lambda: continuation.check_weights(_record(), _record(vocabulary=("pieces",)), "step_1", words)):
        with pytest.raises(ValueError) as raised:
            refuse()
        assert told in str(raised.value)


def test_a_vocabulary_that_was_moved_is_the_same():
    moved = _record(run=_changed(RUN, vocabulary="elsewhere.model"))
    assert continuation.check(_record(), moved, "step_1") == ([], False)


def test_a_schedule_that_cannot_be_saved_is_known_by_its_kind():
    class Constant(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1

    assert _record(optimizer=Adafactor(Constant()))["Adafactor.learning_rate"] == "Constant"


def test_weights_alone_of_a_model_with_listed_sparse_layers_start_a_run_of_it():
    config = _changed(CONFIG, encoder_sparse_indices=(1, 3))
    continuation.check_weights(continuation.record_of(config), _record(config), "step_1")
