"""An answer of the compiler and its question, made up: what is built on answers is tested with one of their kind."""

from switch_tf import Experiment, SwitchConfig
from switch_tf.aot import estimate
from switch_tf.aot.clock import Schedule
from switch_tf.aot.program import Collective, Roofline
from switch_tf.configs import parts
from switch_tf.configs.parts import Part
from switch_tf.configs.run import Run, StepSettings
from switch_tf.hardware.chips import Chip
from switch_tf.partitioning.layout import Layout


def experiment(config, layout, batch_size, lengths, settings=None):
    run = Run("unused", "unused", lengths, 1, batch_size)
    return Experiment(config, layout, run, settings or StepSettings(), Part(parts.MODEL, {"dtype": "mixed_bfloat16"}),
                      Part(parts.ADAFACTOR, {"learning_rate": 0.01}))


CONFIG = SwitchConfig.from_preset("t5_base")
CHIP = Chip(memory=1000.0, flops=1e15, memory_bandwidth=1e12, link_bandwidth=1e11, clock=1e9)
EXPERIMENT = experiment(CONFIG, Layout("data=4", (("batch", "data"),)), 8, {"inputs": 64, "targets": 32})


class _Program:
    unread_loops = ()
    collectives = [Collective("all-reduce", size, 4, ("data",), "f32[1]", "encoder") for size in (*range(1, 10), 100)]


def answer(temporaries, refused=None):
    """The JSON object of an answer about `CHIP`."""
    memory = {"arguments": 500, "outputs": 400, "aliased": 300, "temporaries": temporaries, "code": 100, "weights": 200,
              "slots": 100, "gradients": 0}
    parts = {"attention": 0.4, "waiting for memory": 0.1}
    schedule = Schedule(0.2, [], {"attention": 0.2}, {"encoder/layers_0": 0.2}, {"sort": 0.01})
    sent = {"all-reduce": {"count": 10, "bytes": 145}}
    found = estimate.Estimate(memory, 900, [(2, 2), (4, 4)], {}, refused, sent, 5.0, Roofline(0.3, 0.1, 0.2), parts,
                              None if refused else _Program(), schedule)
    return estimate.as_json(EXPERIMENT, "v5e:2x2", CHIP, found)
