"""Reports a run: metrics.jsonl, TensorBoard, and progress on the terminal."""

import collections
import contextlib
import datetime
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tqdm import tqdm

import switch_tf
from switch_tf.checkpoints.run_folder import CONFIGURATION, SECONDS, RunFolder
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.metrics import Mean, StepMeasurements
from switch_tf.refusals import Refusal, first_line
from switch_tf.reporting import report
from switch_tf.storage import json_lines, places
from switch_tf.storage.whole_file import Mirror, writing

_BUCKETS = 30  # of a histogram


def origin(words: Sequence[str], config: SwitchConfig) -> str:
    """Returns the head of a run's configuration, as comments: the command of `words`, the time and the versions."""
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    return (f"# {shlex.join(['switch-tf', *words])}\n"
            f"# {now}, switch_tf {switch_tf.__version__}, TensorFlow {tf.__version__}, Keras {keras.__version__}\n"
            f"# {config.num_parameters:,} parameters\n\n")


def training_values(measured: StepMeasurements, others: dict[str, float]) -> dict[str, Any]:
    """Returns the values to log for some training steps: means, and router losses summed over sparse layers.

    The load of a router is a list over experts. `dead_experts` counts its zeros. `others`: name -> value, such as the
    speed.
    """
    batch = measured.batch
    values = {name: divide(term) for name, term in batch.loss_terms.items()}
    values["accuracy"] = divide(batch.accuracy)
    for name in ("load_balancing_loss", "router_z_loss"):
        values[name] = sum(divide(getattr(stats, name)) for stats in batch.routers.values())
    values |= {"loss": divide(measured.loss), "gradient_norm": divide(measured.gradient_norm), **others}
    logged = {f"train/{name}": value for name, value in values.items()}
    for layer, stats in batch.routers.items():
        logged |= {report.router(layer, name): divide(mean) for name, mean in stats._asdict().items()}
        logged[report.router(layer, "dead_experts")] = logged[report.router(layer, "expert_load")].count(0)
    return logged


def shown(values: dict[str, float]) -> str:
    """Returns the values of an evaluation as a line."""
    shares = report.find_shares(values)
    return "  ".join(f"{name} {report.shown(value, name in shares)}" for name, value in values.items())


def _utilization(share):
    return f"{share:.0%}" + (" (more than the rate known of this machine)" if share > 1 else "")


def divide(mean: Mean) -> Any:
    """Returns total / weight of a Mean on the host, or the total if the weight is 0."""
    value = np.asarray(mean.total) / (mean.weight if mean.weight else 1.0)
    return value.tolist()


@contextlib.contextmanager
def writing_events(folder: places.Place) -> Iterator[None]:
    """Raises a Refusal that names the folder if TensorBoard's writer fails."""
    try:
        yield
    except tf.errors.OpError as error:
        raise Refusal(f"{folder} could not be written ({first_line(error)}); free space or mend its permissions, "
                      "then start the same command again.") from error


def message(tag: str, value: Any) -> bytes:
    """Returns TensorBoard's message of a number, or of a list as a histogram. Joined messages are one message."""
    if isinstance(value, list):
        array = np.asarray(value, np.float32)
        return histogram_pb(tag, array[np.isfinite(array)], _BUCKETS).SerializeToString()
    return scalar_pb(tag, value).SerializeToString()


class Writer:
    """A writer of logged steps to metrics.jsonl and to TensorBoard's files, with the configuration.

    On a disk a step is in metrics.jsonl at once. In a bucket both are there within a minute, and before the next
    checkpoint.

    TensorBoard gets no seconds of `speed.Clock`. Its tags lack the prefixes "train/" and "eval/<mixture>/", so that
    equal tags share a chart. Tasks of a mixture keep their name: "<task>/loss". An array becomes one histogram.
    """

    def __init__(self, folder: RunFolder):
        self._path = folder.metrics
        self._mirror = None if places.is_local(folder.path) else Mirror(folder.path)
        self._events = (self._mirror.local if self._mirror else folder.path) / "events"
        self._writers: dict[str, Any] = {}
        with writing(self._path):
            lines = self._mirror.fetch(self._path.name) if self._mirror else self._path
            self._lines = open(lines, "a")  # noqa: SIM115  open for the whole run

    def write(self, step: int, values: dict, declared: dict[str, bool] | None = None) -> None:
        """Writes the values of a step.

        Args:
            values: Logged name -> number or list of numbers. In an evaluation the whole mixture comes first.
            declared: Logged name -> whether a lower value is better, for metrics that declare it.
        """
        # Three digits: a line holds the noisy load of thousands of experts.
        rounded = {name: [float(f"{entry:.3g}") for entry in value] if isinstance(value, list) else value
                   for name, value in values.items()}
        mixture = next((name.split("/")[1] for name in values if name.startswith("eval/") and name.count("/") > 1), "")
        with self._errors():
            self._lines.write(json_lines.dumps({"step": step, **rounded, **(
                {"lower_is_better": declared} if declared else {})}) + "\n")
            self._lines.flush()
            # One message a step: an operation for each of a hundred values takes as long as a step.
            messages = collections.defaultdict(bytes)
            for name, value in values.items():
                if name.startswith(SECONDS):
                    continue
                kind = "eval" if name.startswith("eval/") else "train"
                tag = name.removeprefix(f"{kind}/").removeprefix(f"{mixture}/" if kind == "eval" else "")
                messages[kind] += message(tag, value)
                if kind == "eval" and tag.split("/")[-1] == "loss":
                    # The held-out loss is only cross-entropy.
                    messages[kind] += message(tag.removesuffix("loss") + "cross_entropy", value)
            for kind, joined in messages.items():
                with self._writer(kind, step).as_default(step=step):
                    tf.summary.experimental.write_raw_pb(joined)

    def _writer(self, kind, step):
        if kind not in self._writers:
            self._writers[kind] = tf.summary.create_file_writer(str(self._events / kind))
            configuration = self._path.with_name(CONFIGURATION)
            if kind == "train" and configuration.is_file():
                with self._writers[kind].as_default(step=step):
                    text = configuration.read_text(errors="replace")
                    tf.summary.text("configuration", "\n".join(f"    {line}" for line in text.splitlines()))
        return self._writers[kind]

    def flush(self) -> None:
        """Brings all values into the run folder."""
        if self._mirror:
            with writing(self._path):
                self._mirror.flush()

    def close(self) -> None:
        with self._errors():
            self._lines.close()
            for writer in self._writers.values():
                writer.close()
            if self._mirror:
                self._mirror.close()

    @contextlib.contextmanager
    def _errors(self):
        with writing(self._path), writing_events(self._path.with_name("events")):
            yield


class NoWriter:
    """A writer without output: another process writes."""

    def write(self, *step_and_values: Any) -> None:
        pass

    flush = close = write


_QUIET_SECONDS = 15.0  # longest time without a line


class Progress:
    """A progress bar on a terminal, and lines of text, both on standard error."""

    def __init__(self, last_step: int, is_shown: bool = True):
        self._last_step = last_step
        self._last_reported = 0
        self._is_shown = is_shown
        self._last_line = -math.inf
        self._bar = tqdm(total=last_step, unit="step", file=sys.stderr, disable=None if is_shown else True,
                         dynamic_ncols=True)

    def resume(self, step: int) -> None:
        """Sets the step that training starts from, for the bar's rate and remaining time."""
        self._last_reported = step
        self._bar.reset(self._last_step)
        self._bar.initial = step
        self._bar.update(step)

    def advance(self, steps: int) -> None:
        self._bar.update(steps)

    def glance(self, step: int, loss: float) -> None:
        """Prints the last step's loss if no line was printed for some seconds or a tenth of the run."""
        is_due = 10 * (step - self._last_reported) >= self._last_step
        if is_due or time.monotonic() - self._last_line > _QUIET_SECONDS:
            self._last_reported = step
            self.say(f"step {step}/{self._last_step}  loss {loss:.4f}")

    def say(self, text: str) -> None:
        self._last_line = time.monotonic()
        if self._is_shown:
            tqdm.write(text, file=sys.stderr)

    def remaining_seconds(self, step: int, seconds_per_step: float) -> float:
        """Returns the time to the last step, at the last logged speed."""
        return (self._last_step - step) * seconds_per_step

    def log(self, step: int, values: dict) -> None:
        """Prints the `training_values` of some steps."""
        self._last_reported = step
        remaining = self.remaining_seconds(step, values["train/seconds_per_step"])
        dropped = [value for name, value in values.items() if name.endswith("/fraction_tokens_dropped")]
        mfu = values.get("train/model_flops_utilization")  # absent for an unknown chip
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
