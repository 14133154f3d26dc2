import pytest

from switch_tf.comparison import Comparison

VARIANTS = {"dense": ["a.gin", "X=1"], "sparse": ["b.gin"]}


def test_a_run_is_its_own_files_then_the_common_ones_and_the_command_line_counts_last():
    comparison = Comparison("runs/x", VARIANTS, common=["c.gin", "X=0"], seeds=[3, 5])
    files, bindings = comparison.words("dense", 5, ["X=2"])
    assert files == ["a.gin", "c.gin"]
    assert bindings == ["X=0", "X=1", "X=2", "MODEL_DIR='runs/x/dense/seed_5'", "SEED=5"]
    assert comparison.seeds == (3, 5)


@pytest.mark.parametrize(("changes", "message"), [
    ({"variants": {"dense": ["a.gin"]}}, "at least two variants"),
    ({"variants": [["a.gin"]]}, "at least two variants"),
    ({"variants": {"dense": "a.gin", "sparse": []}}, "must be a list of gin files and bindings, not 'a.gin'"),
    ({"variants": {"../dense": [], "sparse": []}}, "becomes a folder"),
    ({"variants": {5: [], "sparse": []}}, "becomes a folder"),
    ({"common": ["d_ff"]}, "neither a gin file"),
    ({"common": [5]}, "must be a list of gin files and bindings"),
    ({"common": ["SEED = 3"]}, "each run gets its own SEED"),
    ({"variants": {"dense": ["MODEL_DIR='x'"], "sparse": []}}, "each run gets its own MODEL_DIR"),
    ({"seeds": ()}, "a list of different integers"),
    ({"seeds": (1, 1)}, "a list of different integers"),
    ({"seeds": (1, -1)}, "Comparison.seeds must be an integer of at least 0, not -1"),
    ({"seeds": [[1]]}, "Comparison.seeds must be an integer of at least 0"),
    ({"seeds": {}}, "Comparison.seeds must be an integer of at least 0"),
    ({"turn": 0}, "Comparison.turn must be an integer of at least 1, not 0"),
    ({"model_dir": "s3://bucket/x"}, "must be a path of this machine or of a bucket"),
    ({"model_dir": ""}, "Comparison.model_dir must be text"),
    ({"may_differ": "SEED"}, "Comparison.may_differ must be a list of names"),
    ({"unequal_work": ["other"]}, "the variants are dense, sparse"),
    ({"trained_first": ["other"]}, "Comparison.trained_first names 'other', and the variants are dense, sparse"),
    ({"trained_first": ["dense", "sparse"]}, "names every variant"),
    ({"variants": {"dense": [], "sparse": ["TEACHER='{dense}'"]}}, "'dense' has to be in Comparison.trained_first"),
    ({"variants": {"a": ["TEACHER='{b}'"], "b": [], "c": []}, "trained_first": ["a", "b"]}, "'a' must not"),
])
def test_mistakes(changes, message):
    with pytest.raises(ValueError, match=message):
        Comparison(**{"model_dir": "runs/x", "variants": VARIANTS, **changes})


def test_a_variant_names_the_folder_of_one_that_is_trained_first():
    comparison = Comparison("runs/x", {"dense": ["a.gin"], "student": ["a.gin", "TEACHER='{teacher}'", "X={'{b}': 1}"],
                                       "teacher": ["b.gin"]}, ["c.gin"], (0, 3), trained_first=["teacher"])
    assert "TEACHER='runs/x/teacher/seed_3'" in comparison.words("student", 3)[1]
    assert "X={'{b}': 1}" in comparison.words("student", 3)[1]
