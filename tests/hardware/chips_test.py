"""What is stored on a TPU is counted, and refused where it is more than a device has."""

import pytest

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
