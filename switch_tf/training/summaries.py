"""What a run says while it runs: metrics.jsonl, TensorBoard, and a line on the terminal."""

import json
import math
import sys
import time

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from switch_tf import metrics
from switch_tf.metrics import Mean


def loss_parts(config, means: dict, prefix: str) -> dict[str, float]:
    """The loss and its parts, divided: the router losses are sums over sparse layers without their coefficients."""
    parts = {f"{prefix}/{name}": _divide(means[name]) for name in ("cross_entropy", "z_loss", "accuracy")}
    for name in ("load_balancing_loss", "router_z_loss"):
        parts[f"{prefix}/{name}"] = sum(_divide(means[f"router/{layer}/{name}"]) for layer in config.sparse_layer_names)
    parts[f"{prefix}/loss"] = (
        parts[f"{prefix}/cross_entropy"] + parts[f"{prefix}/z_loss"]
        + config.load_balancing_loss_weight * parts[f"{prefix}/load_balancing_loss"]
        + config.router_z_loss_weight * parts[f"{prefix}/router_z_loss"])
    return parts


def router_values(means: dict) -> dict:
    """Each router's statistics, divided; the load is a list over experts, and `dead_experts` counts its zeros."""
    values = {}
    for name, mean in means.items():
        if name.startswith("router/"):
            value = _divide(mean)
            values[name] = value
            if name.endswith("/expert_load"):
                values[name.replace("expert_load", "dead_experts")] = sum(load == 0 for load in value)
    return values


def _divide(mean: Mean):
    value = np.asarray(mean.total) / (mean.weight if mean.weight else 1.0)
    return value.tolist()


def pending_to_json(means: dict) -> dict:
    """Sums that were not logged yet, for a checkpoint; float64 survives JSON exactly."""
    return {name: [np.asarray(mean.total).tolist(), float(mean.weight)] for name, mean in means.items()}


def pending_from_json(saved: dict) -> dict:
    """The reverse of `pending_to_json`."""
    return {name: Mean(np.asarray(total, np.float64), np.float64(weight)) for name, (total, weight) in saved.items()}


class Writer:
    """Appends one JSON line for each logged step, flushed at once, and the same numbers to TensorBoard."""

    def __init__(self, folder):
        self._lines = open(folder.metrics, "a")  # noqa: SIM115  open for the whole run
        self._events = tf.summary.create_file_writer(str(folder.path / "events"))

    def write(self, step: int, values: dict) -> None:
        self._lines.write(json.dumps({"step": step, **{name: _finite(value) for name, value in values.items()}}) + "\n")
        self._lines.flush()
        with self._events.as_default(step=step):
            for name, value in values.items():
                if isinstance(value, list):
                    for index, entry in enumerate(value):
                        tf.summary.scalar(f"{name}/{index}", entry)
                else:
                    tf.summary.scalar(name, value)

    def close(self) -> None:
        self._lines.close()
        self._events.close()


class NoWriter:
    """Writes nothing: another process does."""

    def write(self, step: int, values: dict) -> None:
        pass

    def close(self) -> None:
        pass


def _finite(value):
    """JSON has no NaN and no infinity."""
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return value if math.isfinite(value) else None


class Progress:
    """A bar on a terminal, and a line of text for each logged step everywhere; on standard error, where it is shown."""

    def __init__(self, first_step: int, last_step: int, is_shown=True):
        self._last_step = last_step
        self._is_shown = is_shown
        self._bar = tqdm(total=last_step, initial=first_step, unit="step", file=sys.stderr,
                         disable=None if is_shown else True, dynamic_ncols=True)

    def advance(self, steps: int) -> None:
        self._bar.update(steps)

    def say(self, text: str) -> None:
        if self._is_shown:
            tqdm.write(text, file=sys.stderr)

    def log(self, step: int, values: dict) -> None:
        remaining = (self._last_step - step) * values["train/seconds_per_step"]
        dropped = [value for name, value in values.items() if name.endswith("/fraction_tokens_dropped")]
        text = (f"step {step}/{self._last_step}  loss {values['train/loss']:.4f}  "
                f"cross-entropy {values['train/cross_entropy']:.4f}  accuracy {values['train/accuracy']:.3f}  "
                + (f"balance {values['train/load_balancing_loss']:.3f}  dropped {np.mean(dropped):.1%}  "
                   if dropped else "")
                + f"{values['train/tokens_per_second']:,.0f} tokens/s  {values['train/seconds_per_step']:.3f} s/step  "
                f"MFU {values['train/model_flops_utilization']:.0%}  "
                f"input wait {values['train/input_wait_fraction']:.0%}  ETA {tqdm.format_interval(remaining)}")
        self.say(text)

    def close(self) -> None:
        self._bar.close()


class Meter:
    """Sums metrics between two logged steps and measures their speed."""

    def __init__(self, flops_per_step: float, peak_flops: float, pending: dict):
        self._flops_per_step = flops_per_step
        self._peak_flops = peak_flops
        self.sums = pending
        self.restart()

    def restart(self) -> None:
        """Measures speed from now on; the sums stay."""
        self._started, self._steps, self._tokens, self._input_wait = time.perf_counter(), 0, 0.0, 0.0

    def add(self, means: dict, num_steps: int, input_wait: float) -> None:
        self.sums = metrics.merge(self.sums, means)
        self._steps += num_steps
        self._tokens += float(means["tokens"].total)
        self._input_wait += input_wait

    def pause(self) -> float:
        return time.perf_counter()

    def resume(self, paused_at: float) -> None:
        """Leaves out the time since `paused_at`, which an evaluation or a checkpoint took."""
        self._started += time.perf_counter() - paused_at

    def read(self, config) -> dict:
        """The values to log; starts over."""
        seconds = time.perf_counter() - self._started
        values = {
            **loss_parts(config, self.sums, "train"),
            "train/gradient_norm": _divide(self.sums["gradient_norm"]),
            "train/tokens_per_second": self._tokens / seconds,
            "train/seconds_per_step": seconds / self._steps,
            "train/model_flops_utilization": self._flops_per_step * self._steps / seconds / self._peak_flops,
            "train/input_wait_fraction": self._input_wait / seconds,
            **router_values(self.sums),
        }
        self.sums = {}
        self.restart()
        return values
