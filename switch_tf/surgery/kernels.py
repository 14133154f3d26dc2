"""Kernels of experts and routers for upcycled models."""

import dataclasses

import numpy as np

from switch_tf import checks


@dataclasses.dataclass(frozen=True)
class Changes:
    """Changes to the copies of a dense layer that become experts.

    Args:
        noise: Standard deviation of Gaussian noise added to each kernel, relative to the kernel's own.
        reinitialize: In [0, 1). Share of each expert's hidden units drawn anew, with the replaced weights' mean and
            standard deviation (Drop-Upcycling, arXiv 2502.19261).
        gate_scale: Factor of the output kernels, because gates may not sum to one. "auto" keeps the mean size of each
            layer's output, see `upcycling.gate_scale`.
    """

    noise: float = 0.0
    reinitialize: float = 0.0
    gate_scale: float | str = 1.0
    seed: int = 0

    def __post_init__(self):
        checks.fields(self, ("noise",), checks.number, "0 or above")
        checks.fields(self, ("reinitialize",), checks.number, "in [0, 1)")
        if self.gate_scale != "auto":
            checks.fields(self, ("gate_scale",), checks.number, "above 0")
        checks.fields(self, ("seed",), checks.integer, 0)


def expert_kernel(dense: np.ndarray, hidden_axis: int, width: int, expert: int, drawn: np.ndarray, spread: float,
                  generator: np.random.Generator) -> np.ndarray:
    """Returns a kernel of one expert.

    If experts are narrower than the dense layer by a factor k, expert e holds slice e % k of the hidden units (granular
    upcycling, arXiv 2410.07524).

    Args:
        dense: <float32>[d_model, d_ff] or [d_ff, d_model].
        width: Hidden units of an expert.
        drawn: <int>[n]. Hidden units to draw anew.
        spread: Standard deviation of the noise.

    Returns:
        <float32>[d_model, width] or [width, d_model].
    """
    slices = np.split(dense, dense.shape[hidden_axis] // width, axis=hidden_axis)
    source = slices[expert % len(slices)]
    kernel = np.array(source, np.float32)
    if drawn.size:
        place = (slice(None),) * hidden_axis + (drawn,)
        replaced = source[place]
        kernel[place] = replaced.mean() + replaced.std() * generator.standard_normal(replaced.shape, np.float32)
    if spread:
        kernel += np.float32(spread) * generator.standard_normal(kernel.shape, np.float32)
    return kernel


def router_kernel(d_model: int, num_experts: int, num_slices: int, init_scale: float,
                  generator: np.random.Generator) -> np.ndarray:
    """Draws the kernel of a router, with the distribution of new models.

    Experts with slices of one copy share a column, so a token's best experts are the slices of one copy (virtual
    groups, arXiv 2410.07524).

    Returns: <float32>[d_model, num_experts].
    """
    return np.repeat(draw((d_model, num_experts // num_slices), init_scale, generator), num_slices, axis=1)


def draw(shape: tuple[int, ...], init_scale: float, generator: np.random.Generator) -> np.ndarray:
    """Draws a router's weight with the distribution of new models: variance init_scale / shape[0], truncated."""
    values = generator.standard_normal(shape, np.float32)
    while (outside := np.abs(values) > 2).any():  # standard deviations
        values[outside] = generator.standard_normal(np.count_nonzero(outside), np.float32)
    return np.float32((init_scale / shape[0]) ** 0.5) * values
