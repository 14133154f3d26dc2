from switch_tf.aot import answer_cache


def test_another_question_or_other_flags_of_the_compiler_have_another_answer(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    first = answer_cache.answer_file("a", "v5e:2x2")
    assert answer_cache.answer_file("a", "v5e:2x2") == first != answer_cache.answer_file("a", "v5e:2x4")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_async_all_to_all=true")
    assert answer_cache.answer_file("a", "v5e:2x2") != first
