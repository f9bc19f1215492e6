"""Loss as a function of parameters N and tokens D: Chinchilla's third approach.

    L(N, D) = E + A / N^alpha + B / D^beta

Hoffmann et al. 2022 (2203.15556, equation 10), with the corrections of Besiroglu et al. 2024
(2404.10102): the Huber losses are summed, because their mean stops L-BFGS before the minimum.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from MaxText.errors import UserError
from MaxText.experiments.ladder.measurements import Interval

MIN_CELLS = 25
MIN_RATIO_SPAN = 8.0  # of tokens per parameter
HUBER_DELTA = 1e-3
NUM_BOOTSTRAPS = 400
_NUM_STARTS = 8  # the best of the grid, refined
# ln A, ln B, ln E, alpha, beta: the grid of Hoffmann et al., appendix D.3.
_GRID = (
    (0.0, 5.0, 10.0, 15.0, 20.0, 25.0),
    (0.0, 5.0, 10.0, 15.0, 20.0, 25.0),
    (-1.0, -0.5, 0.0, 0.5, 1.0),
    (0.0, 0.5, 1.0, 1.5, 2.0),
    (0.0, 0.5, 1.0, 1.5, 2.0),
)


class SizeCell(NamedTuple):
    """A model size trained on a number of tokens; `loss` is the mean over seeds."""

    parameters: float
    tokens: float
    loss: float  # nats per token


@dataclasses.dataclass(frozen=True)
class SizeLaw:
    """Draws of L(N, D); the first is the fit to all cells, the others are bootstraps."""

    log_a: np.ndarray  # [K]
    log_b: np.ndarray  # [K]
    log_e: np.ndarray  # [K]
    alpha: np.ndarray  # [K]
    beta: np.ndarray  # [K]

    def predict(self, parameters: float, tokens: float) -> Interval:
        """Returns the interval of the law's loss, in nats per token."""
        loss = (
            np.exp(self.log_e)
            + np.exp(self.log_a - self.alpha * math.log(parameters))
            + np.exp(self.log_b - self.beta * math.log(tokens))
        )
        return Interval.of(loss)

    def optimal_parameters(self, compute: float) -> Interval:
        """Returns the parameters of least loss at C = 6 N D FLOPs (Hoffmann, equation 4).

        N = G (C / 6)^(beta / (alpha + beta)), G = (alpha A / (beta B))^(1 / (alpha + beta)).
        """
        total = self.alpha + self.beta
        log_g = (np.log(self.alpha / self.beta) + self.log_a - self.log_b) / total
        log_budget = math.log(compute / 6)
        return Interval.of(np.exp(log_g + self.beta / total * log_budget))


def fit_size_law(
    cells: Sequence[SizeCell],
    *,
    num_bootstraps: int = NUM_BOOTSTRAPS,
    generator: np.random.Generator | None = None,
) -> SizeLaw:
    """Fits the law to cells, and to resampled cells for its intervals.

    Cells, not seeds, are resampled: what a cell's seeds share is the larger error.

    Args:
      cells: At least `MIN_CELLS` (N, D) pairs over `MIN_RATIO_SPAN` in tokens per parameter.
      num_bootstraps: Resampled fits.
      generator: Of random numbers; a fixed one by default.

    Raises:
      UserError: The cells cannot tell N from D.
    """
    pairs = {(cell.parameters, cell.tokens) for cell in cells}
    ratios = [cell.tokens / cell.parameters for cell in cells]
    if len(pairs) < MIN_CELLS:
        raise UserError(
            f"{len(pairs)} pairs of parameters and tokens; E + A/N^a + B/D^b needs {MIN_CELLS}. "
            "Train more sizes at more token counts, or fit loss over compute alone."
        )
    if max(ratios) < MIN_RATIO_SPAN * min(ratios):
        raise UserError(
            f"tokens per parameter span {min(ratios):.3g} to {max(ratios):.3g}; separating N from "
            f"D needs a factor of {MIN_RATIO_SPAN:g}. Add runs with more and with fewer tokens."
        )
    generator = generator or np.random.default_rng(2)
    log_n, log_d, log_loss = np.log(np.array(cells, dtype=float).T)
    log_n_mean, log_d_mean = float(log_n.mean()), float(log_d.mean())
    all_cells = _Cells(log_n - log_n_mean, log_d - log_d_mean, log_loss)
    fits = [_fit_from_grid(all_cells, log_n_mean, log_d_mean)]
    for _ in range(num_bootstraps):
        index = generator.integers(len(cells), size=len(cells))
        resampled = _Cells(*(values[index] for values in all_cells))
        fits.append(_minimize(resampled, fits[0]))
    log_a, log_b, log_e, alpha, beta = np.array(fits).T
    return SizeLaw(
        log_a=log_a + alpha * log_n_mean,
        log_b=log_b + beta * log_d_mean,
        log_e=log_e,
        alpha=alpha,
        beta=beta,
    )


class _Cells(NamedTuple):
    """Logarithms of cells, with N and D relative to their geometric means.

    Centered, ln A and alpha hardly correlate, and a minimum is found in a tenth of the steps.
    """

    log_n: np.ndarray  # [cells]
    log_d: np.ndarray  # [cells]
    log_loss: np.ndarray  # [cells]

    def residuals(self, theta: np.ndarray) -> np.ndarray:
        """Returns ln of the law minus ln of the losses: float [..., cells].

        Args:
          theta: ln A, ln B, ln E, alpha, beta, relative to the means: float [..., 5].
        """
        return np.logaddexp.reduce(self._terms(theta)) - self.log_loss

    def jacobian(self, theta: np.ndarray) -> np.ndarray:
        """Returns the derivatives of `residuals` by theta: float [cells, 5]."""
        terms = self._terms(theta)
        share_a, share_b, share_e = np.exp(terms - np.logaddexp.reduce(terms))
        return np.stack(
            [share_a, share_b, share_e, -share_a * self.log_n, -share_b * self.log_d], axis=1
        )

    def _terms(self, theta: np.ndarray) -> np.ndarray:
        """Returns logarithms of the law's three terms: float [3, ..., cells]."""
        log_a, log_b, log_e, alpha, beta = np.moveaxis(theta[..., None], -2, 0)
        terms = (log_a - alpha * self.log_n, log_b - beta * self.log_d, log_e + 0 * self.log_n)
        return np.stack(terms)


def _huber(residuals: np.ndarray) -> np.ndarray:
    """Returns Huber losses summed over cells: [..., cells] -> [...]."""
    size = np.abs(residuals)
    linear = HUBER_DELTA * (size - 0.5 * HUBER_DELTA)
    return np.where(size <= HUBER_DELTA, 0.5 * residuals**2, linear).sum(-1)


def _fit_from_grid(cells: _Cells, log_n_mean: float, log_d_mean: float) -> np.ndarray:
    """Returns the parameters of least loss from the best starts of the grid: float [5]."""
    starts = np.array([*itertools.product(*_GRID)])
    starts[:, 0] -= starts[:, 3] * log_n_mean
    starts[:, 1] -= starts[:, 4] * log_d_mean
    order = np.argsort(_huber(cells.residuals(starts)))
    fits = [_minimize(cells, start) for start in starts[order[:_NUM_STARTS]]]
    return min(fits, key=lambda fit: _huber(cells.residuals(fit)))


def _minimize(cells: _Cells, start: np.ndarray) -> np.ndarray:
    """Returns the parameters of the nearest minimum of the summed Huber losses: float [5]."""
    return least_squares(
        cells.residuals,
        start,
        cells.jacobian,  # pyright: ignore[reportArgumentType]  # declared as a name only
        loss="huber",
        f_scale=HUBER_DELTA,
        x_scale="jac",
        ftol=1e-10,
        xtol=1e-10,
        gtol=1e-12,
        max_nfev=500,
    ).x
