"""benchmarks/transfer.py: optima of simulated sweeps, and a trained one that resumes."""

import itertools
import math

import numpy as np
import pytest

from benchmarks import transfer
from benchmarks.transfer import Cell, SweepSettings

SEEDS = range(3)
SETTINGS = SweepSettings()


def swept(best_rate_of_size, sizes=(64, 128, 256), noise=0.0):
    """Losses of sweeps whose optimum is known, in factors of the middle rate."""
    random = np.random.default_rng(0)
    losses = {}
    for size in sizes:
        best = best_rate_of_size(size)

        def loss_of(factor, seed, best=best):
            return 3.0 + 0.1 * math.log(factor / best) ** 2 + noise * random.normal()

        cell = Cell("standard/adamw", "width", size)
        assert len(list(transfer.sweep(cell, SEEDS, losses, loss_of))) % len(SEEDS) == 0
    return losses


def cells_of_widths(losses):
    return transfer.cells_of_axis("standard/adamw", "width", SETTINGS, losses)


def test_optima_move_with_the_width():
    losses = swept(lambda width: 64 / width)
    optima = transfer.optima_of(cells_of_widths(losses), SEEDS, losses)
    logs = [optimum.log2_factor.mean for optimum in optima.values()]
    assert logs == pytest.approx([0.0, -1.0, -2.0], abs=1e-6)
    assert transfer.movement(optima) == pytest.approx(2.0)
    # At the best rate of the smallest: 0.1 (ln 4)^2 more than the least.
    assert optima[256].excess == pytest.approx(0.1 * math.log(4) ** 2)
    assert all(optimum.edge == 0 for optimum in optima.values())
    (row,) = [line for line in transfer.report_lines(SETTINGS, SEEDS, losses) if "| 256 |" in line]
    assert row.endswith("| 4.00x |")


def test_noise_gives_intervals_and_an_edge_more_rates():
    losses = swept(lambda width: 16.0, noise=0.001)
    optima = transfer.optima_of(cells_of_widths(losses), SEEDS, losses)
    for optimum in optima.values():
        estimate = optimum.log2_factor
        assert estimate.ci_low < 4.0 < estimate.ci_high
    assert max(point.factor for point in losses) >= 32.0
    assert transfer.movement(optima) < 0.2
    # Another call trains nothing.
    cell = Cell("standard/adamw", "width", 64)
    assert not list(transfer.sweep(cell, SEEDS, losses, None))
    assert transfer.draw("standard/adamw", "width", SETTINGS, SEEDS, losses).startswith(b"\x89PNG")


def test_all_axes_begin_with_the_same_models():
    losses = swept(lambda width: 1.0, sizes=(64,))
    assert list(cells_of_widths(losses)) == [64]
    assert not transfer.cells_of_axis("standard/adamw", "depth", SETTINGS, losses)
    deep = transfer.cell_of("standard/adamw", "depth", 8, SETTINGS)
    losses |= {point._replace(cell=deep): loss for point, loss in losses.items()}
    cells = transfer.cells_of_axis("standard/adamw", "depth", SETTINGS, losses)
    assert cells == {2: Cell("standard/adamw", "width", 64), 8: deep}
    assert transfer.cell_of("standard/adamw", "tokens", 1, SETTINGS) == cells[2]


@pytest.mark.slow
def test_a_trained_sweep(tmp_path, monkeypatch):
    """On synthetic text: recipes agree at the base, losses depend on rate and seed."""
    path = tmp_path / "synthetic.yml"
    path.write_text(
        "dataset_type: synthetic\nvocab_size: 64\nper_device_batch_size: 4\nadam_weight_decay: 0\n"
    )
    monkeypatch.setattr(transfer, "CONFIGURATION", path)
    settings = SweepSettings(width=32, depth=1, steps=4, length=16, eval_steps=2)
    losses = {}
    for recipe, size in itertools.product(("standard/adamw", "completep/adamw"), (32, 64)):
        trainer = transfer.Trainer(transfer.configure(Cell(recipe, "width", size), settings))
        for factor, seed in ((1.0, 0), (4.0, 0), (1.0, 1)):
            losses[recipe, size, factor, seed] = trainer.loss(factor, seed)
    base = {key[2:]: loss for key, loss in losses.items() if key[:2] == ("standard/adamw", 32)}
    assert len(set(base.values())) == 3
    for key, loss in base.items():
        assert losses["completep/adamw", 32, *key] == pytest.approx(loss, rel=1e-5)
        other = losses["completep/adamw", 64, *key]
        assert other != pytest.approx(losses["standard/adamw", 64, *key], rel=1e-3)
    points = {transfer.Point(Cell("hyperp/muonh", "width", 64), 0.5, 1): None}
    transfer.write(tmp_path / "transfer.json", settings, points)
    assert transfer.read(tmp_path / "transfer.json", settings) == points
    with pytest.raises(SystemExit, match="use another folder"):
        transfer.read(tmp_path / "transfer.json", SweepSettings())
