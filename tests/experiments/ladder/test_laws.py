"""Laws, speed-ups and sizes against laws that are known and figures that were published."""

import math

import numpy as np
import pytest
from scipy.optimize import least_squares

from MaxText.errors import UserError
from MaxText.experiments.ladder import iso_flop, scaling_law, size_law
from MaxText.experiments.ladder.effective_speedup import (
    compute_ratio,
    log_throughput_ratio,
    measure_speedup,
)
from MaxText.experiments.ladder.measurements import Arm, Interval, Rung
from MaxText.experiments.ladder.scaling_law import fit_law, fit_log_linear
from MaxText.experiments.ladder.simulated_ladder import LadderNoise, SimulatedLaw, simulate_ladder
from MaxText.experiments.ladder.size_law import SizeCell, fit_size_law

COMPUTES = np.geomspace(1e13, 1e16, 6)
LAW = SimulatedLaw(asymptote=1.6, exponent=0.1, scale=1.9, log_speedup=math.log(1.2))
SILENT = LadderNoise(0.0, 0.0)

# marin, experiments/grug/moe/README.md, v16: budget and Paloma macro loss of the best run.
MARIN_V16 = {1e18: 3.5273, 3e18: 3.3398, 1e19: 3.1494, 3e19: 3.0066, 1e20: 2.8509, 3e20: 2.7222}
# marin issues 4802 (partial key offset) and 5596 (MuonH): FLOPs, then loss and tokens/s of the
# baseline and of variants, one seed each, with the wall-clock speed-ups that were published.
MARIN_BASELINE = {
    2.19e17: (3.8104, 405_630),
    1.70e18: (3.4339, 273_532),
    9.00e18: (3.1605, 175_165),
    2.83e19: (3.0065, 128_277),
}
MARIN_VARIANTS = {
    "every_4th": [
        (3.8002, 404_371, 1.047),
        (3.4026, 272_679, 1.197),
        (3.1420, 175_706, 1.139),
        (2.9850, 128_375, 1.179),
    ],
    "every_layer": [
        (3.7813, 403_271, 1.144),
        (3.4055, 270_686, 1.168),
        (3.1421, 174_993, 1.134),
        (2.9862, 126_664, 1.152),
    ],
    # Throughputs from the published ratios; 175,165 to 179,731 at 9e18.
    "muonh": [
        (3.7542, 405_630 * 1.010, 1.33),
        (3.3988, 273_532 * 1.025, 1.26),
        (3.1357, 179_731, 1.22),
        (2.9888, 128_277 * 1.039, 1.19),
    ],
}
MARIN_PINNED = (1.6, 0.0941)  # asymptote, exponent


def arm_of(losses: dict[float, float], label="arm", seconds=()) -> Arm:
    rungs = [
        Rung(
            compute=compute,
            tokens=compute / 1e9,
            parameters=100_000_000,
            losses={0: loss},
            estimated_token_seconds={"v5p": seconds[index]} if seconds else {},
        )
        for index, (compute, loss) in enumerate(losses.items())
    ]
    return Arm(label, tuple(rungs))


def marin_arms(variant: str) -> tuple[Arm, Arm]:
    losses = {compute: loss for compute, (loss, _) in MARIN_BASELINE.items()}
    rates = [rate for _, rate in MARIN_BASELINE.values()]
    rows = MARIN_VARIANTS[variant]
    return (
        arm_of(losses, "baseline", [1 / rate for rate in rates]),
        arm_of(
            dict(zip(losses, [loss for loss, _, _ in rows], strict=True)),
            variant,
            [1 / rate for _, rate, _ in rows],
        ),
    )


def test_marins_log_linear_law_and_its_prediction():
    log_compute, losses = np.log([*MARIN_V16]), np.array([*MARIN_V16.values()])
    log_scale, exponent = fit_log_linear(log_compute, losses, np.array([1.6]))
    assert math.exp(log_scale[0]) == pytest.approx(96.71, rel=1e-3)
    assert exponent[0] == pytest.approx(0.0944, rel=1e-3)
    at_1e21 = 1.6 + math.exp(log_scale[0] - exponent[0] * math.log(1e21))
    assert at_1e21 == pytest.approx(2.605, abs=1e-3)


def test_the_law_of_marins_table_holds_out_its_top_and_contains_the_run_at_1e21():
    arm = arm_of(MARIN_V16)
    held_out = fit_law(Arm("below", arm.rungs[:-1])).predict(3e20)
    assert held_out == pytest.approx((2.694, 2.727, 2.757), abs=0.003)
    assert held_out.contains(MARIN_V16[3e20])
    at_1e21 = fit_law(arm).predict(1e21)
    assert at_1e21 == pytest.approx((2.570, 2.598, 2.621), abs=0.003)
    assert at_1e21.contains(2.599)  # the measured run


def test_marins_worked_example():
    in_flops = compute_ratio(3.5422, 3.52, *MARIN_PINNED)
    assert in_flops == pytest.approx(1.1299, abs=1e-4)
    assert in_flops * 410_000 / 433_986 == pytest.approx(1.0675, abs=1e-4)


@pytest.mark.parametrize("variant", MARIN_VARIANTS)
def test_marins_published_speedups_by_its_formula(variant):
    for (loss, rate), (variant_loss, variant_rate, published) in zip(
        MARIN_BASELINE.values(), MARIN_VARIANTS[variant], strict=True
    ):
        speedup = compute_ratio(loss, variant_loss, *MARIN_PINNED) * variant_rate / rate
        assert speedup == pytest.approx(published, rel=0.01)


def test_which_of_marins_speedups_one_seed_supports():
    def supported(variant: str) -> list[bool]:
        baseline, arm = marin_arms(variant)
        speedup = measure_speedup(baseline, arm, fit_law(baseline))
        for rung, (_, _, published) in zip(
            speedup.at_rungs("v5p"), MARIN_VARIANTS[variant], strict=True
        ):
            assert rung.contains(published)
        return [rung.low > 1 for rung in speedup.at_rungs("v5p")]

    assert supported("every_4th") == [False] * 4
    assert supported("every_layer") == [True] * 4
    assert supported("muonh") == [True] * 4


def test_muonhs_advantage_falls_with_compute():
    baseline, arm = marin_arms("muonh")
    speedup = measure_speedup(baseline, arm, fit_law(baseline))
    slope = Interval.of(speedup.slope)
    assert slope.high < 0


def test_a_law_without_noise_is_recovered():
    baseline, variant = simulate_ladder(
        np.random.default_rng(0), COMPUTES, 2, law=LAW, noise=SILENT
    )
    pinned = fit_law(baseline, LAW.asymptote)
    assert np.median(pinned.exponent) == pytest.approx(LAW.exponent, rel=1e-5)
    assert math.exp(np.median(pinned.log_scale)) == pytest.approx(LAW.scale, rel=1e-5)
    free = fit_law(baseline)
    step = np.diff(scaling_law.ASYMPTOTE_SHARES)[0] * baseline.rungs[-1].loss
    assert abs(np.median(free.asymptote) - LAW.asymptote) < step
    x = math.log(1e17 / free.center)
    expected = LAW.asymptote + LAW.scale * math.exp(-LAW.exponent * x)
    # The nearest asymptote of the grid is 0.01 away.
    assert free.predict(1e17).median == pytest.approx(expected, abs=4e-3)

    speedup = measure_speedup(baseline, variant, pinned)
    for interval in (speedup.at(speedup.top), speedup.at(speedup.bottom), speedup.constant()):
        assert interval == pytest.approx((1.2, 1.2, 1.2), rel=1e-4)


def test_least_squares_equal_those_of_scipy():
    generator = np.random.default_rng(5)
    baseline, _ = simulate_ladder(generator, COMPUTES, 1, law=LAW, noise=LadderNoise(0.02, 0.02))
    losses = np.array([rung.loss for rung in baseline.rungs])
    law = fit_law(baseline, 1.5)
    x = np.log(COMPUTES / law.center)

    def residuals(parameters: np.ndarray) -> np.ndarray:
        return losses - 1.5 - np.exp(parameters[0] - parameters[1] * x)

    reference = least_squares(residuals, [0.5, 0.1])
    assert np.median(law.log_scale) == pytest.approx(reference.x[0], abs=2e-3)
    assert np.median(law.exponent) == pytest.approx(reference.x[1], abs=2e-3)
    # v = SSR / chi2(R - 2), whose mean is SSR / (R - 4); parameters have v (J'J)^-1.
    variance = 2 * reference.cost / (len(x) - 4)
    covariance = variance * np.linalg.inv(reference.jac.T @ reference.jac)
    draws = np.cov([law.log_scale, law.exponent])
    assert np.median(law.variance) == pytest.approx(2 * reference.cost / 3.357, rel=0.05)
    correlation = covariance[0, 1] / math.sqrt(covariance[0, 0] * covariance[1, 1])
    assert np.corrcoef(law.log_scale, law.exponent)[0, 1] == pytest.approx(correlation, abs=0.1)
    assert draws[0, 0] == pytest.approx(covariance[0, 0], rel=0.5)  # heavy tails: 4 degrees


def test_intervals_widen_with_noise_level_and_distance():
    def law(noise: float):
        generator = np.random.default_rng(1)
        arm, _ = simulate_ladder(generator, COMPUTES, 2, law=LAW, noise=LadderNoise(noise, noise))
        return fit_law(arm)

    def width(interval: Interval) -> float:
        return interval.high - interval.low

    quiet, loud = law(0.002), law(0.01)
    assert width(quiet.predict(1e16)) < width(loud.predict(1e16))
    assert width(quiet.predict(1e16)) < width(quiet.predict(1e17))
    assert width(quiet.predict(1e16, level=0.8)) < width(quiet.predict(1e16, level=0.95))
    assert width(quiet.curve(1e16)) < width(quiet.predict(1e16))
    medians = [quiet.predict(compute).median for compute in np.geomspace(1e13, 1e17, 9)]
    assert medians == sorted(medians, reverse=True)
    pinned = fit_law(arm_of(MARIN_V16), 1.6)
    assert width(pinned.predict(1e21)) < width(fit_law(arm_of(MARIN_V16)).predict(1e21))


def test_speedup_accounts_for_unequal_flops_of_the_arms():
    baseline, variant = simulate_ladder(
        np.random.default_rng(0), COMPUTES, 1, law=LAW, noise=SILENT
    )
    # The same losses with 10 % more FLOPs are worth 10 % less.
    dearer = Arm(
        "dearer",
        tuple(
            Rung(rung.compute * 1.1, rung.tokens, rung.parameters, rung.losses)
            for rung in variant.rungs
        ),
    )
    law = fit_law(baseline, LAW.asymptote)
    speedup = measure_speedup(baseline, dearer, law)
    assert speedup.constant().median == pytest.approx(1.2 / 1.1, rel=1e-4)


def test_time_divides_flops_by_flops_per_second():
    # Half the FLOPs per token at the same tokens per second: half the FLOPs per second.
    common = {"parameters": 10, "losses": {0: 3.0}}
    first = Rung(compute=2e9, tokens=1e3, token_seconds=(1.0, 1.1, 0.9, 1.2, 1.0), **common)
    other = Rung(compute=1e9, tokens=1e3, token_seconds=(1.0, 1.1, 0.9, 1.2, 1.0), **common)
    ratio = log_throughput_ratio(first, other)
    assert (ratio.mean, ratio.std) == pytest.approx((math.log(0.5), 0.0))
    with pytest.raises(UserError, match="needs 5 interleaved"):
        log_throughput_ratio(first, Rung(compute=1e9, tokens=1e3, **common))
    with pytest.raises(UserError, match="target=h100"):
        log_throughput_ratio(first, other, "h100")


def falling(*losses: float) -> Arm:
    return arm_of(dict(zip(COMPUTES, losses, strict=False)))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: fit_law(falling(4.0, 3.8, 3.6)), "3 rungs with a completed run"),
        (lambda: fit_law(falling(4.0, 3.8, 3.6, 3.5), 3.5), "linf=3.5 is not below"),
        (lambda: fit_law(falling(3.0, 3.2, 3.5, 3.9, 4.4)), "do not fall"),
        (lambda: fit_law(falling(4.0, 3.8, 3.6, 3.5)).predict(1e16), "4 rungs support no projec"),
        (lambda: fit_law(arm_of(MARIN_V16)).predict(3.1e21), "10.3 times the top rung"),
        (lambda: compute_ratio(3.0, 1.5, 1.6, 0.1), "above the asymptote"),
        (
            lambda: measure_speedup(
                falling(4.0, 3.8, 3.6, 3.5), falling(4.0, 3.8, 3.6), fit_law(arm_of(MARIN_V16))
            ),
            "4 rungs and arm has 3",
        ),
        (
            lambda: measure_speedup(
                falling(4.0, 3.8, 3.6, 3.5),
                arm_of(dict.fromkeys(COMPUTES[:4] * 2, 3.0)),
                fit_law(falling(4.0, 3.8, 3.6, 3.5)),
            ),
            "factor of 1.5",
        ),
        (
            lambda: measure_speedup(
                falling(4.0, 3.8, 3.6, 3.5),
                falling(1.0, 0.8, 0.6, 0.1),
                fit_law(falling(4.0, 3.8, 3.6, 3.5)),
            ),
            "unlimited compute",
        ),
    ],
)
def test_refusals(act, message):
    with pytest.raises(UserError, match=message):
        act()


def test_asked_for_projections_are_made():
    law = fit_law(arm_of(MARIN_V16))
    assert law.predict(1e23, beyond=True).low < 2.252 < law.predict(1e23, beyond=True).high


# --- sizes -------------------------------------------------------------------------------------

# Besiroglu et al. 2024, table of the corrected fit.
CHINCHILLA = {"e": 1.8172, "a": 482.01, "b": 2085.43, "alpha": 0.3478, "beta": 0.3658}


def chinchilla_loss(parameters: float, tokens: float) -> float:
    law = CHINCHILLA
    return law["e"] + law["a"] / parameters ** law["alpha"] + law["b"] / tokens ** law["beta"]


def cells(noise: float = 0.0, ratios=(2, 5, 10, 20, 40, 80)) -> list[SizeCell]:
    generator = np.random.default_rng(0)
    return [
        SizeCell(
            parameters,
            parameters * ratio,
            chinchilla_loss(parameters, parameters * ratio) * math.exp(generator.normal(0, noise)),
        )
        for parameters in np.geomspace(4e7, 1.5e10, 8)
        for ratio in ratios
    ]


def test_chinchillas_law_is_recovered():
    law = fit_size_law(cells(), num_bootstraps=2)
    fitted = [math.exp(law.log_e[0]), math.exp(law.log_a[0]), math.exp(law.log_b[0])]
    fitted += [law.alpha[0], law.beta[0]]
    assert fitted == pytest.approx([1.8172, 482.01, 2085.43, 0.3478, 0.3658], rel=1e-3)
    optimum = law.optimal_parameters(5.76e23).median
    scan = np.geomspace(optimum / 2, optimum * 2, 2001)
    losses = [chinchilla_loss(size, 5.76e23 / 6 / size) for size in scan]
    assert optimum == pytest.approx(scan[np.argmin(losses)], rel=2e-3)


def test_bootstraps_of_cells_cover_chinchillas_law():
    law = fit_size_law(cells(noise=0.003), num_bootstraps=40)
    noisier = fit_size_law(cells(noise=0.009), num_bootstraps=40)
    assert law.predict(1e9, 2e10).contains(chinchilla_loss(1e9, 2e10))
    assert Interval.of(law.alpha).contains(CHINCHILLA["alpha"])
    assert 1.5 < np.std(noisier.alpha) / np.std(law.alpha) < 6


@pytest.mark.parametrize(
    ("subset", "message"),
    [(cells()[:24], "24 pairs"), (cells(ratios=(10, 12, 14, 16)), "span 10 to 16")],
)
def test_cells_that_cannot_tell_parameters_from_tokens(subset, message):
    with pytest.raises(UserError, match=message):
        fit_size_law(subset)


def iso_flop_rungs(sizes: np.ndarray, compute: float = 1e20, noise: float = 1e-4) -> list[Rung]:
    generator = np.random.default_rng(0)
    rungs = []
    for size in sizes:
        tokens = compute / 6 / size
        loss = chinchilla_loss(size, tokens) + generator.normal(0, noise)
        rungs.append(Rung(compute, tokens, round(size), {0: loss}))
    return rungs


def test_the_parabola_finds_the_optimum_of_chinchillas_law():
    fine = np.geomspace(1e8, 1e10, 20001)
    best = fine[np.argmin(chinchilla_loss(fine, 1e20 / 6 / fine))]
    optimum = iso_flop.fit_iso_flop(iso_flop_rungs(best * np.geomspace(0.25, 4, 15)))
    assert optimum.num_sizes < 15  # wide grids are narrowed
    assert optimum.parameters.contains(best)
    assert optimum.parameters.median == pytest.approx(best, rel=0.05)
    assert optimum.tokens.median == pytest.approx(1e20 / 6 / best, rel=0.05)
    assert optimum.loss.median == pytest.approx(chinchilla_loss(best, 1e20 / 6 / best), abs=1e-3)


@pytest.mark.parametrize(
    ("sizes", "noise", "message"),
    [
        (np.geomspace(1e9, 3.9e9, 4), 1e-4, "[234] sizes within"),
        (np.geomspace(4e9, 1.3e10, 9), 1e-4, "edge of the grid.*smaller"),
        (np.geomspace(2e8, 6e8, 9), 1e-4, "edge of the grid.*larger"),
        (np.geomspace(1e9, 3.9e9, 9), 0.3, "curve upwards|edge of the grid|sizes within"),
    ],
)
def test_iso_flop_refusals(sizes, noise, message):
    with pytest.raises(UserError, match=message):
        iso_flop.fit_iso_flop(iso_flop_rungs(sizes, noise=noise))


def test_the_summed_huber_losses_are_those_of_the_definition():
    residuals = np.array([0.0, 5e-4, -2e-3, 1.0])
    delta = size_law.HUBER_DELTA
    expected = 0.5 * 5e-4**2 + delta * (2e-3 - delta / 2) + delta * (1.0 - delta / 2)
    assert size_law._huber(residuals) == pytest.approx(expected)
