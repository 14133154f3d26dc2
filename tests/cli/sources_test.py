"""What modules define is read from their sources, and nothing that a module may have is said to be missing."""

import importlib

import pytest
import seqio

from switch_tf.cli import gin_files, gin_statements, sources
from switch_tf.configs import shipped_gin


@pytest.mark.parametrize(("name", "module"), [
    ("switch_tf.optim.schedules.RsqrtDecay", "switch_tf.optim.schedules"),
    ("switch_tf.optim.schedules.RsqrtDecay.no_attribute_is_looked_for", "switch_tf.optim.schedules"),
    ("keras.optimizers.AdamW", "keras"),
    ("switch_tf.tasks.docs_corpus.source", "switch_tf.tasks.docs_corpus"),
    ("tensorflow.keras", "tensorflow"),  # set while it is imported
    ("no.such.module.Name", "no.such.module"),
    ("switch_tf.optim.schedules.Name", "switch_tf.configs.switch_config"),
])
def test_what_exists_or_cannot_be_seen_is_not_missing(name, module):
    assert sources.missing(name, {module}) is None


@pytest.mark.parametrize(("name", "module", "where", "part"), [
    ("switch_tf.optim.schedules.RsqrtDecy", "switch_tf.optim.schedules", "switch_tf.optim.schedules", "RsqrtDecy"),
    ("keras.optimizers.AdamWW", "keras", "keras.optimizers", "AdamWW"),
    ("keras.optimisers.AdamW", "keras", "keras", "optimisers")])
def test_what_is_nowhere_is_missing_from_the_module_that_lacks_it(name, module, where, part):
    found = sources.missing(name, {module, "switch_tf"})
    assert found[:2] == (where, part) and part not in found[2]


def test_names_within_branches_count_and_a_star_hides_them_all(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "branches.py").write_text("try:\n    import a as b\nexcept ImportError:\n    b = None\n"
                                          "if b:\n    def f(): pass\nelse:\n    class C: pass\nx, (y, z) = 1, (2, 3)\n")
    (tmp_path / "stars.py").write_text("from a import *\n")
    (tmp_path / "broken.py").write_text("def\n")
    assert sources.defined("branches") == {"b", "f", "C", "x", "y", "z"}
    assert sources.defined("stars") is None and sources.defined("broken") is None
    assert sources.texts("broken") == set()


def test_nothing_that_a_shipped_gin_file_names_is_missing():
    folder = shipped_gin.folder()
    for file in folder.glob("gin/*/*.gin"):
        statements = gin_statements.Statements()
        gin_files.read([])  # which tells gin where the shipped files are
        statements.add_file(str(file.relative_to(folder)))
        assert not [name for name in statements.named if sources.missing(name, statements.modules)], file


def test_tasks_are_among_the_texts_of_their_module():
    assert "docs_corpus_span_corruption" in sources.texts("switch_tf.tasks.docs_corpus")
    assert "mc4_span_corruption" in sources.texts("switch_tf.tasks.mc4")


def test_the_modules_that_a_task_module_imports_count_with_it():
    found = sources.with_imported({"switch_tf.tasks.multi_task", "__gin__.dynamic_registration"}, "switch_tf.tasks")
    assert {"switch_tf.tasks.multi_task", "switch_tf.tasks.glue", "switch_tf.tasks.prepared_tfds"} <= found
    assert "switch_tf.tasks.arc" not in found and "switch_tf.tasks.NOBODY" not in found


def test_a_task_is_known_by_itself_or_with_its_mixture():
    assert sources.is_among("a", {"a"}) and sources.is_among("a.b", {"a"})
    assert not sources.is_among("ab", {"a", ""}) and not sources.is_among(".b", {""})


def test_the_task_names_that_sources_spell_out_are_registered():
    names = set()
    for path in sorted((shipped_gin.folder() / "gin" / "tasks").glob("*.gin")):
        modules = sources.with_imported(gin_files.collect([str(path)]).modules, "switch_tf.tasks")
        names |= set().union(*map(sources.task_names, modules))
        for module in modules:
            if module.startswith("switch_tf.tasks."):
                importlib.import_module(module)
    registered = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
    assert names <= registered
    assert {"glue_cola", "winogrande_xs", "anli_r1", "random_facts_5000", "super_glue", "mc4_span_corruption"} <= names
