"""What is stored on a TPU is counted, and refused where it is more than a device has."""

import os

import pytest

from switch_tf import environment
from switch_tf.hardware import chips

GIB = 2**30


@pytest.mark.parametrize("gib, accelerator, is_refused", [
    (7.5, "v5litepod-8", False), (22.4, "v5litepod-8", True), (22.4, "v5p-16", False), (8000, "v5p-1024", True),
    (8000, "", False)])
def test_more_than_a_device_has_is_refused(gib, accelerator, is_refused, monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", accelerator)
    if not is_refused:
        chips.check_memory(int(gib * GIB))
        return
    words = (rf"^Each device would store {gib:.1f} GiB of weights and gradients, and has (16|95)\.0 GiB; use more "
             r"devices, or a layout that cuts the weights into smaller pieces \(at_rest_rules, as in "
             r"gin/layouts/fully_sharded\.gin\) with backend='pjrt'\.$")
    with pytest.raises(ValueError, match=words):
        chips.check_memory(int(gib * GIB))


EINSUMS = "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
ALL_TO_ALLS = "--xla_tpu_enable_async_all_to_all=true"


@pytest.mark.parametrize("tpu, flags", [
    ("v5litepod-1", [EINSUMS, ALL_TO_ALLS]), ("v5litepod-64", [EINSUMS, ALL_TO_ALLS]), ("v5litepod-128", [EINSUMS]),
    ("v5e:8x8", [EINSUMS, ALL_TO_ALLS]), ("v5e:8x16", [EINSUMS]), ("v5p-1024", [EINSUMS, ALL_TO_ALLS]),
    ("v5p:8x8x8", [EINSUMS, ALL_TO_ALLS]), ("tpu7x:2x2x1", [EINSUMS, ALL_TO_ALLS]), ("", [EINSUMS])])
def test_a_tpu_is_compiled_for_with_flags_unless_the_user_set_some(tpu, flags, monkeypatch, capsys):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    monkeypatch.setitem(environment.OF_USER, "LIBTPU_INIT_ARGS", "")
    chips.set_compiler_flags(tpu)
    assert os.environ["LIBTPU_INIT_ARGS"] == capsys.readouterr().err == ""
    monkeypatch.delitem(environment.OF_USER, "LIBTPU_INIT_ARGS")
    chips.set_compiler_flags(tpu)
    assert os.environ["LIBTPU_INIT_ARGS"].split() == flags
    assert capsys.readouterr().err == (
        f"LIBTPU_INIT_ARGS is not set, so the TPU compiler gets {' '.join(flags)} (docs/compile.md).\n")
