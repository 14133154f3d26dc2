"""What a run says while it runs: metrics.jsonl, TensorBoard, and a line on the terminal."""

import contextlib
import math
import sys
import time

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from switch_tf.messages import first_line
from switch_tf.metrics import Mean, RouterStats, StepMeasurements
from switch_tf.refusals import Refusal
from switch_tf.reporting import names
from switch_tf.reporting.events import Events
from switch_tf.storage import json_lines
from switch_tf.storage.whole_file import writing


def training_values(measured: StepMeasurements, others: dict[str, float]) -> dict:
    """What is written of some training steps: sums are divided, and the routers' losses added up over sparse layers.

    Args:
        measured: on the host.
        others: values that are no means over a batch, such as the speed.
    """
    batch = measured.batch
    values = {name: _divide(term) for name, term in batch.loss_terms.items()}
    values["accuracy"] = _divide(batch.accuracy)
    for name in ("load_balancing_loss", "router_z_loss"):
        values[name] = sum(_divide(getattr(stats, name)) for stats in batch.routers.values())
    values |= {"loss": _divide(measured.loss), "gradient_norm": _divide(measured.gradient_norm), **others}
    return {**{f"train/{name}": value for name, value in values.items()}, **_router_values(batch.routers)}


def shown(values: dict[str, float]) -> str:
    """Returns the values of an evaluation for a line of text."""
    shares = names.shares(values)
    return "  ".join(f"{name} {names.shown(value, name in shares)}" for name, value in values.items())


def _router_values(routers: dict[str, RouterStats]) -> dict:
    """Each router's statistics; the load is a list over experts, and `dead_experts` counts its zeros."""
    values = {}
    for layer, stats in routers.items():
        for name, mean in stats._asdict().items():
            values[names.router(layer, name)] = _divide(mean)
        load = values[names.router(layer, "expert_load")]
        values[names.router(layer, "dead_experts")] = load.count(0)
    return values


def _utilization(share):
    """In per cent; above 100 it says that something is wrong with what it is measured against."""
    return f"{share:.0%}" + (" (more than the rate known of this machine)" if share > 1 else "")


def _divide(mean: Mean):
    value = np.asarray(mean.total) / (mean.weight if mean.weight else 1.0)
    return value.tolist()


@contextlib.contextmanager
def writing_events(folder):
    """Within this scope TensorBoard's writer, whose folder is full or gone, raises a Refusal that names the folder."""
    try:
        yield
    except tf.errors.OpError as error:
        raise Refusal(f"{folder} could not be written ({first_line(error)}); free space or mend its permissions, "
                      "then start the same command again.") from error


class Writer:
    """Appends one JSON line for each logged step, flushed at once, and the same numbers to TensorBoard."""

    def __init__(self, folder):
        self._path = folder.metrics
        with writing(self._path):
            self._lines = open(self._path, "a")  # noqa: SIM115  open for the whole run
        with writing_events(folder.path / "events"):
            self._events = Events(folder)

    def write(self, step: int, values: dict, declared: dict[str, bool] | None = None) -> None:
        """Writes the values of a step, and what metrics declare of their direction.

        Raises:
            Refusal: metrics.jsonl cannot be written.
        """
        declared = {"lower_is_better": declared} if declared else {}
        with writing(self._path):
            self._lines.write(json_lines.dumps({"step": step, **_rounded(values), **declared}) + "\n")
            self._lines.flush()
        with writing_events(self._path.with_name("events")):
            self._events.write(step, values)

    def close(self) -> None:
        with writing(self._path):
            self._lines.close()
        with writing_events(self._path.with_name("events")):
            self._events.close()


def _rounded(values):
    """The same with three digits in arrays: a line holds thousands of experts' shares, whose noise is far larger."""
    return {name: [float(f"{entry:.3g}") for entry in value] if isinstance(value, list) else value
            for name, value in values.items()}


class NoWriter:
    """Writes nothing: another process does."""

    def write(self, step: int, values: dict, declared: dict[str, bool] | None = None) -> None:
        pass

    def close(self) -> None:
        pass


_QUIET_SECONDS = 15.0  # between two lines of a run that trains, at most


class Progress:
    """A bar on a terminal, and lines of text everywhere; on standard error, where it is shown."""

    def __init__(self, first_step: int, last_step: int, is_shown=True):
        self._last_step = last_step
        self._last_told = first_step
        self._is_shown = is_shown
        self._last_line = -math.inf
        self._bar = tqdm(total=last_step, initial=first_step, unit="step", file=sys.stderr,
                         disable=None if is_shown else True, dynamic_ncols=True)

    def resume(self, step: int) -> None:
        """Sets the step that training starts from; the bar's rate and remaining time count from here."""
        self._last_told = step
        self._bar.reset(self._last_step)
        self._bar.initial = step
        self._bar.update(step)

    def advance(self, steps: int) -> None:
        self._bar.update(steps)

    def glance(self, step: int, loss: float) -> None:
        """Prints the loss of the step just done if no line was printed for some seconds, or for a tenth of the run.

        Shows that a run moves where its LOG_PERIOD is long, and how a short one went.
        """
        is_due = 10 * (step - self._last_told) >= self._last_step
        if is_due or time.monotonic() - self._last_line > _QUIET_SECONDS:
            self._last_told = step
            self.say(f"step {step}/{self._last_step}  loss {loss:.4f}")

    def say(self, text: str) -> None:
        self._last_line = time.monotonic()
        if self._is_shown:
            tqdm.write(text, file=sys.stderr)

    def remaining_seconds(self, step: int, seconds_per_step: float) -> float:
        """Until the last step, at the speed of the steps that were logged last."""
        return (self._last_step - step) * seconds_per_step

    def log(self, step: int, values: dict, routers: dict[str, RouterStats]) -> None:
        """Says what `training_values` made of some steps, and of what their routers did."""
        self._last_told = step
        remaining = self.remaining_seconds(step, values["train/seconds_per_step"])
        dropped = [_divide(stats.fraction_tokens_dropped) for stats in routers.values()]
        mfu = values.get("train/model_flops_utilization")  # not of a chip of an unknown type
        text = (f"step {step}/{self._last_step}  loss {values['train/loss']:.4f}  "
                f"cross-entropy {values['train/cross_entropy']:.4f}  accuracy {values['train/accuracy']:.1%}  "
                f"learning rate {values['train/learning_rate']:.3g}  "
                + (f"balance {values['train/load_balancing_loss']:.3f}  dropped {np.mean(dropped):.1%}  "
                   if dropped else "")
                + f"{values['train/tokens_per_second']:,.0f} tokens/s  {values['train/seconds_per_step']:.3f} s/step  "
                + (f"MFU {_utilization(mfu)}  " if mfu is not None else "")
                + f"input wait {values['train/input_wait_fraction']:.0%}  ETA {tqdm.format_interval(remaining)}")
        self.say(text)

    def close(self) -> None:
        self._bar.close()
