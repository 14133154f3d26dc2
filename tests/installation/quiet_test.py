"""Warnings of libraries are shown as single sentences."""

import warnings

from switch_tf.installation import quiet


def test_a_warning_of_a_library_is_one_sentence_and_told_once(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # as it was, after the test
    quiet.import_tensorflow()
    shown = [warnings.formatwarning(UserWarning("F-score is ill-defined\n  and set to 0.0."), UserWarning,
                                    "/lib/sklearn/metrics.py", 1879, "  _warn_prf(average)") for _ in range(2)]
    assert shown == ["Warning: F-score is ill-defined and set to 0.0.\n", ""]
