"""Picture of a step by the compiler's clock: its schedule, and the time of each part of the model."""

from switch_tf.aot.attribution import SENT, WAITING
from switch_tf.aot.clock import COPIES, CORE, LINKS, Schedule
from switch_tf.reporting.figures import png, pyplot

_LANES = {CORE: "core", COPIES: "copies", LINKS: "links"}


def draw(schedule: Schedule, parts: dict[str, float], compiled: tuple[int, int], layers: tuple[int, int]) -> bytes:
    """Returns a PNG.

    Args:
        schedule: Schedule of the deepest compiled model.
        parts: Part -> seconds of a step of the whole model.
        compiled: Encoder and decoder layers of the compiled model.
        layers: Encoder and decoder layers of the whole model.
    """
    names = sorted(parts, key=parts.get)
    busy = [name for name in names[::-1] if name not in (SENT, WAITING)]
    palette = pyplot().get_cmap("tab20").colors
    colors = {name: palette[2 * place % 20 + place // 10] for place, name in enumerate(busy)}
    colors |= {SENT: "black", WAITING: "silver"}
    figure, (time, bars) = pyplot().subplots(2, 1, figsize=(14, 2.6 + 0.3 * len(names)), layout="constrained",
                                           height_ratios=(1.6, 0.3 * len(names)))
    for place, lane in enumerate(reversed(_LANES)):
        spans = [span for span in schedule.spans if span.lane == lane]
        time.broken_barh([(1e3 * span.start, 1e3 * span.seconds * span.times) for span in spans], (place - 0.4, 0.8),
                         facecolors=[colors.get(span.part, "silver") for span in spans])
    time.set_yticks(range(len(_LANES)), [*_LANES.values()][::-1])
    time.set(xlim=(0, 1e3 * schedule.seconds), xlabel="ms",
             title=f"A step of {' + '.join(map(str, compiled))} layers in the order of the compiler's schedule")
    total = sum(parts.values())
    bars.barh(names, [1e3 * parts[name] for name in names], color=[colors[name] for name in names])
    for place, name in enumerate(names):
        bars.text(1e3 * parts[name], place, f" {1e3 * parts[name]:.2f} ms, {parts[name] / total:.0%}", va="center")
    bars.margins(x=0.12)
    bars.set(xlabel="ms", title=f"A step of all {' + '.join(map(str, layers))} layers, {1e3 * total:.2f} ms, by part")
    return png(figure)
