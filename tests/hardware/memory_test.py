"""What is stored on a TPU is counted, and refused where it is more than a device has."""

import pytest

from switch_tf.configs.accounting import Weight
from switch_tf.hardware import memory
from switch_tf.partitioning.layout import Layout

GIB = 2**30


@pytest.mark.parametrize("gib, accelerator, is_refused", [
    (7.5, "v5litepod-8", False), (22.4, "v5litepod-8", True), (22.4, "v5p-16", False), (8000, "v5p-1024", True),
    (8000, "", False)])
@pytest.mark.parametrize("storing, words", [
    (memory.TPU_STRATEGY, r"TPUStrategy keeps weights and gradients whole on each device, .* GiB of them, and a .* "
                          r"device has .* GiB; use gin/layouts/fully_sharded.gin with backend='dtensor', which stores"),
    (memory.DTENSOR, r"The layout stores weights and gradients in pieces, .* GiB of them, and a .* device has .* GiB; "
                     r"use a layout that cuts them into smaller ones \(at_rest_rules\), or more devices\.")])
def test_more_than_a_device_has_is_refused(gib, accelerator, is_refused, storing, words, monkeypatch):
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    if not is_refused:
        memory.check(int(gib * GIB), storing, accelerator)
        return
    with pytest.raises(ValueError, match=words):
        memory.check(int(gib * GIB), storing, accelerator)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", accelerator)
    with pytest.raises(ValueError, match=words):
        memory.check(int(gib * GIB), storing)


def test_bytes_stored_are_those_of_the_pieces():
    layout = Layout("one=1,a=4,b=2", (("expert", ("one", "a")), ("batch", ("a", "b"))), (("embed", ("b", "a")),))
    weights = [Weight("experts", 3, (8, 16, 32), ("expert", "embed", "expert_mlp")),  # over a and b
               Weight("embedding", 1, (100, 16), ("vocab", "embed")),  # over b and a
               Weight("norm", 1, (7,), ("vocab",))]
    assert layout.stored_bytes(weights) == 8 * (3 * 2 * 8 * 32 + 100 * 2 + 7)
