"""Writes docs/scale.md from the answers of `switch-tf compile`: tables and the text around them."""

from switch_tf.aot.hlo import SENT, WAITING

GIB = 2**30
REPORTED = 0.63  # utilisation of the yardstick
# Columns of the table of times, and the parts of a step that each adds up.
TIMES = {"attention": ["attention"], "feed-forward": ["dense feed-forward"], "experts": ["experts"],
         "routing": ["router", "dispatch", "combine", "rest of Switch layers"],
         "logits, embedding, norms": ["logits and loss", "embedding", "norms and residuals"],
         "optimizer": ["optimizer"], "memory": [WAITING], "sent": [SENT]}
KINDS = ("all-to-all", "all-reduce", "all-gather", "reduce-scatter", "collective-permute")


def page(sparse: list[tuple[str, dict, dict]], yardstick: tuple[str, dict], commands: list[str]) -> str:
    """Returns the page in Markdown.

    Args:
        sparse: Name, answer, and answer of the dense twin for each sparse model.
        yardstick: Name and answer of the dense encoder.
        commands: The commands of all models except the twins.
    """
    rows = [row for name, result, twin in sparse for row in ((name, result), ("&nbsp; its dense twin", twin))]
    rows.append(yardstick)
    predicted = yardstick[1]["predicted"]
    busy = predicted["compute_seconds"] / predicted["step_seconds"]
    return TEXT.format(
        runs=_table(["model", "parameters", "pod, mesh", "tokens a batch", "compiled of layers"], [
            [name, f"{result['num_parameters'] / 1e9:,.1f}B", _pod(result), f"{_tokens(result):,.0f}", _depth(result)]
            for name, result in (*((name, result) for name, result, _ in sparse), yardstick)]),
        memory=_table(["model", "weights", "slots", "gradients", "temporaries", "program", "needed", "chip has"], [
            [name, *(f"{size / GIB:.2f}" for size in _memory(result))] for name, result in rows]),
        too_large="".join(map(_too_large, rows)),
        sent=_table(["model", *KINDS, "warnings"], [
            [name, *(_sent(result, kind) for kind in KINDS), "; ".join(result["warnings"]) or "none"]
            for name, result in rows]),
        time=_table(["model", *TIMES, "step", "floor", "tokens/s", "MFU"], [
            [name, *_time(result)] for name, result in rows]),
        twins=_table(["model", "parameters of its twin", "parameters, times the twin's", "step, times the twin's"], [
            [name, f"{twin['num_parameters'] / 1e9:,.2f}B",
             f"{result['num_parameters'] / twin['num_parameters']:.0f}",
             f"{result['predicted']['step_seconds'] / twin['predicted']['step_seconds']:.2f}"]
            for name, result, twin in sparse]),
        busy=busy, error=busy / REPORTED - 1, commands="\n".join(commands))


def _pod(result):
    return f"{result['topology']}, " + ", ".join(f"{axis} {size}" for axis, size in result["mesh"].items())


def _tokens(result):
    return result["predicted"]["tokens_per_second"] * result["predicted"]["step_seconds"]


def _depth(result):
    both = " and ".join(f"{encoder}+{decoder}" for encoder, decoder in result["compiled_layers"])
    return f"{both} of {'+'.join(map(str, result['layers']))}"


def _memory(result):
    memory = result["bytes_per_device"]
    kinds = ("weights", "slots", "gradients", "temporaries", "code", "needed")
    return [*(memory[kind] for kind in kinds), result["chip_bytes"]]


def _too_large(row):
    """Returns a paragraph about a model that its chips do not hold, or ""."""
    name, result = row
    share = result["bytes_per_device"]["needed"] / result["chip_bytes"] - 1
    return f"\nThe {name} needs {share:.0%} more than its chip has; take a smaller batch.\n" if share > 0 else ""


def _sent(result, kind):
    entry = result["collectives"].get(kind)
    return f"{entry['count']} ({entry['bytes'] / 2**20:,.0f} MiB)" if entry else "0"


def _time(result):
    predicted = result["predicted"]
    yield from (f"{1e3 * sum(predicted['parts'].get(part, 0.0) for part in parts):.1f}" for parts in TIMES.values())
    yield f"{1e3 * predicted['step_seconds']:.1f}"
    yield f"{1e3 * predicted['floor_seconds']:.1f}"
    yield f"{predicted['tokens_per_second']:,.0f}"
    yield f"{predicted['model_flops_utilization']:.0%}"


def _table(header, rows):
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


TEXT = """# Trillions on paper

```sh
.venv/bin/python benchmarks/tpu/scale.py --output docs/scale.md     # writes this page, hours of compiling
```

One training step of the largest models, compiled by the real TPU compiler for pods. **These steps have not run on a
TPU.** Memory and collectives are the compiler's own, for the depths in the table and extrapolated linearly to all
layers. Times are predictions by the compiler's own clock ([compile](compile.md) shows the accuracy), above a floor of
nominal rates.

![share of a chip's memory, and predicted time of a step](images/scale.png)

{runs}

## Does it fit?

Weights are float32, computation is in bfloat16, and the optimizer is Adafactor with factored slots, so the state is
little more than four bytes per parameter. A step is one function, and gradients are temporaries of it
([compared](notebook/tpu.md#shardy-beside-gspmd-one-function-beside-two) with two functions). A chip's share, in GiB:

{memory}
{too_large}
## What is sent?

Number in a step, and bytes of the results on one chip. Experts cost four all-to-alls per sparse layer. All-gathers
collect pieces of dense weights, and of an expert that its copies share; reduce-scatters sum their gradients, and
collective-permutes do either, piece by piece, during a product.

{sent}

## How long does a step take?

Milliseconds by part of the model. "memory" is waiting for it, "sent" is what no computation hides, and no step is
faster than the floor. The clock is about right for products and exaggerates passes over arrays, above all the
optimizer's ([compile](compile.md#how-far-the-clock-is-off)).

{time}

## What do experts cost?

The dense twin has the size of one expert instead of all, so about the same FLOPs per token (two experts for
GShard's), on the same pod with the same batch.

{twins}

## A yardstick

Google reported 63 % of the peak of 2,048 TPU v4 chips for an encoder of 480B parameters, in TensorFlow and
partitioned by GSPMD, counting the forward pass that rematerialisation repeats. Our encoder of 0.5T parameters, also
with rematerialisation and counted in the same way, is predicted at {busy:.0%}. That error of {error:+.0%} shows how
far to trust the predictions above. The encoder is compiled whole, because extrapolation exaggerates its memory
([notebook](notebook/tpu.md#counting)).

## The commands

```sh
{commands}
```
"""
