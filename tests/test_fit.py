"""Fitting of efficiency models: parameters recovered from data made with them, splits, and the command on a small table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from profiler.catalogue import device as catalogue_device
from profiler.fit.__main__ import main
from profiler.fit.attention import AttentionTable, attention_prior, attentions, fit_attention, representative
from profiler.fit.families import family_of, watts_per_flop
from profiler.fit.forms import (
    ATTENTION,
    SMOOTH,
    TILE,
    Chip,
    Space,
    attention_time_s,
    joined,
    product_time_s,
    products,
    tile_grid,
    tile_time_s,
)
from profiler.fit.gemm import backward_factor, fit_products, large_enough
from profiler.fit.grouped import Layers, MixtureTable, fit_grouped
from profiler.fit.memory_bound import Stream, fit_stream
from profiler.fit.records import Efficiencies, Fit
from profiler.fit.run import fit_everything, write
from profiler.fit.samples import folds, held_out
from profiler.fit.solver import Prior, solve
from profiler.fit.tables import ProductTable, chip_of, product_tables, table_of
from profiler.fit.transfer import published_flop_per_s, sustained_efficiency, transferred
from specs.errors import InvalidInput

RNG = np.random.default_rng(0)
SMOOTH_TRUTH = np.array([0.8, 60.0, 90.0, 30.0, 3e-6, 0.05, 0.85, 3.0])
TILE_TRUTH = np.array([0.9, 20.0, 3e-6, 1e-6, 0.06, 0.8, 2.5, 2e-6, 2.0])


def shapes(count: int = 500, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    wide = np.array([512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 8192, 12288])
    return np.exp(rng.uniform(np.log(128), np.log(16384), count)).round(), rng.choice(wide, count), rng.choice(wide, count)


def made_table(form: str = "smooth", truth: np.ndarray = SMOOTH_TRUTH, count: int = 500, noise: float = 0.02) -> ProductTable:
    """Times of an A100 made with known parameters."""
    chip = chip_of(catalogue_device("a100_sxm_80gb"), "bfloat16")
    shape = products(*shapes(count))
    time_s = product_time_s(form, truth, shape, chip) * np.exp(np.random.default_rng(3).normal(0, noise, count))
    return ProductTable("a100_sxm_80gb", "bfloat16", "nobody", "made here", shape, time_s)


# --- forms ----------------------------------------------------------------------------------------------------------


def test_tile_form_by_hand() -> None:
    """One tile of 128 x 128 on one unit: 2 x 128 x 128 x 32 FLOP a step, at the tile's rate, plus wave and floor."""
    chip = Chip(flop_per_s=100e12, bytes_per_s=1e15, units=100)
    values = np.array([0.5, 0.0, 1e-6, 2e-6, 0.0, 1.0, 8.0, 1.0, 1e9])  # no tile-edge cost, split never worth it
    shape = products(128, 128, 3200)
    steps = 3200 / 32
    # tiles of 64 x 64 run four at once on four units: a quarter of the work each, the quickest of the tiles is 64 x 32 or 32 x 64
    per_tile = {(tm, tn): steps * 2 * tm * tn * 32 / (0.5 * 1e12) + 1e-6 for tm, tn in ((64, 32), (32, 64), (16, 128))}
    expected = 2e-6 + min(per_tile.values())
    assert tile_time_s(values, tile_grid(shape, chip), chip)[0] == pytest.approx(expected, rel=1e-3)


def test_smooth_form_by_hand() -> None:
    chip = Chip(flop_per_s=100e12, bytes_per_s=1e12, units=100)
    values = np.array([0.5, 100.0, 0.0, 0.0, 5e-6, 0.1, 1.0, 8.0])
    shape = products(100, 10_000, 10_000)
    flop = 2e10  # 0.30 decades above 1e10: heat 1.0301; half the rate at m = 100
    compute = flop / 50e12 * (1 + 0.1 * np.log10(2)) * 2
    memory = (100 * 10_000 * 2 + 1e8) * 2 / 1e12
    assert product_time_s("smooth", values, shape, chip)[0] == pytest.approx(5e-6 + (compute**8 + memory**8) ** (1 / 8))


def test_forms_never_beat_the_peak() -> None:
    chip = Chip(1e14, 1e12, 100)
    shape = products(*shapes())
    for form, space in (("tile", TILE), ("smooth", SMOOTH)):
        fast = np.array(space.low)
        fast[0] = 1.2
        assert (product_time_s(form, fast, shape, chip) >= shape.flop / 1e14).all()


# --- solver ---------------------------------------------------------------------------------------------------------


def test_smooth_parameters_are_recovered() -> None:
    chip = Chip(312e12, 2e12, 108)
    shape = products(*shapes())
    measured = np.log(product_time_s("smooth", SMOOTH_TRUTH, shape, chip))
    found = solve(lambda x: np.log(product_time_s("smooth", x, shape, chip)) - measured, SMOOTH, [np.array(SMOOTH.start)])
    assert found.loss < 0.002
    assert found.values[0] == pytest.approx(0.8, rel=0.02)
    assert found.values[6] == pytest.approx(0.85, rel=0.05)


def test_tile_parameters_are_recovered() -> None:
    chip = Chip(312e12, 2e12, 108)
    shape = products(*shapes())
    grid = tile_grid(shape, chip)
    measured = np.log(tile_time_s(TILE_TRUTH, grid, chip))
    found = solve(lambda x: np.log(tile_time_s(x, grid, chip)) - measured, TILE, [np.array(TILE.start)])
    assert found.loss < 0.01
    assert found.values[0] == pytest.approx(0.9, rel=0.05)
    assert found.values[2] == pytest.approx(3e-6, rel=0.4)


def test_outliers_do_not_move_the_fit() -> None:
    space = Space(("slope",), (0.0,), (10.0,), (1.0,), (0.5,))
    x = np.linspace(1, 2, 101)
    y = 3 * x
    y[::10] *= 20
    found = solve(lambda values: values[0] * x - y, space, [np.array([1.0])])
    assert found.values[0] == pytest.approx(3.0, rel=1e-2)


def test_bounds_hold_and_a_prior_decides_what_data_does_not() -> None:
    space = Space(("a", "b"), (0.0, 0.0), (1.0, 5.0), (0.5, 1.0), (0.1, 0.1))
    x = np.linspace(0, 1, 50)
    free = solve(lambda v: v[0] * x - 2 * x, space, [np.array([0.5, 1.0])])
    assert free.values[0] == 1.0  # the best allowed
    prior = Prior(np.array([0.5, 3.0]), np.array([10.0, 0.1]))
    helped = solve(lambda v: v[0] * x - 0.3 * x, space, [np.array([0.5, 1.0])], prior)
    assert helped.values[0] == pytest.approx(0.3, abs=0.02)
    assert helped.values[1] == pytest.approx(3.0, abs=0.1)


# --- splits ---------------------------------------------------------------------------------------------------------


def test_whole_groups_are_held_out() -> None:
    groups = np.repeat(np.arange(40.0), 5)
    unseen = held_out(groups, np.random.default_rng(0))
    assert 0 < unseen.sum() < len(groups)
    assert not set(groups[unseen]) & set(groups[~unseen])
    parts = folds(groups, np.random.default_rng(0))
    assert (np.sum(parts, axis=0) == 1).all()
    assert held_out(np.array([1.0, 1.0, 2.0]), np.random.default_rng(0), share=1e-9).any()


# --- fits of tables -------------------------------------------------------------------------------------------------


def test_held_out_error_is_the_noise_where_the_form_is_right() -> None:
    found = fit_products(made_table(noise=0.03), {})
    assert found is not None
    assert found.fit.error is not None
    assert found.fit.error.median_ape < 0.035
    assert set(found.parameters) == {"tile", "smooth"}


def test_the_data_chooses_the_form() -> None:
    smooth, tile = fit_products(made_table(), {}), fit_products(made_table("tile", TILE_TRUTH), {})
    assert smooth is not None
    assert tile is not None
    assert (smooth.fit.form, tile.fit.form) == ("smooth", "tile")


def test_few_points_lean_on_the_prior_and_fewer_than_ten_are_no_fit() -> None:
    table = made_table("tile", TILE_TRUTH, count=12, noise=0.05)
    prior = {"tile": Prior(TILE_TRUTH, np.array(TILE.step)), "smooth": Prior(SMOOTH_TRUTH, np.array(SMOOTH.step))}
    found = fit_products(table, prior)
    assert found is not None
    assert found.fit.form == "tile"
    rich = made_table("tile", TILE_TRUTH)
    rows = large_enough(rich.shape)
    error = np.abs(found.predict(rich.shape.take(rows)) / rich.time_s[rows] - 1)
    assert np.median(error) < 0.08
    assert fit_products(made_table(count=9), {}) is None


def test_launches_of_eager_tables_do_not_stay_in_the_floor() -> None:
    made = made_table()
    table = table_of("a100_sxm_80gb", "bfloat16", "x", "x", made.shape, made.time_s + 25e-6, eager=True)
    assert (table.time_s >= 100e-6).all()
    found = fit_products(table, {})
    assert found is not None
    assert found.fit.parameters["floor_s"] < 3e-6


def test_impossible_rows_are_dropped() -> None:
    shape = products([4096, 4096], 4096, 4096)
    table = table_of("a100_sxm_80gb", "bfloat16", "x", "x", shape, np.array([1e-5, 5e-4]), eager=False)
    assert len(table) == 1


def test_backward_factor_is_measured_over_both_products() -> None:
    made = made_table()
    found = fit_products(made, {})
    assert found is not None
    shape = made.shape
    twice = found.predict(products(shape.m, shape.k, shape.n)) + found.predict(products(shape.n, shape.k, shape.m))
    table = ProductTable(made.device, made.dtype, "x", "x", shape, 0.9 * twice, backward=True)
    assert backward_factor(found, table) == pytest.approx(0.9, rel=1e-3)


def attention_table(count: int, truth: np.ndarray, build: str = "one") -> AttentionTable:
    rng = np.random.default_rng(5)
    batch, heads = rng.choice([1.0, 2, 4, 8], count), rng.choice([8.0, 12, 16, 24, 32, 40, 48, 64], count)
    length = rng.choice([512.0, 1024, 2048, 4096, 8192, 16384], count)
    shape = attentions(batch, heads, heads, length, head_dim=128, causal=np.ones(count, dtype=bool), backward=False)
    chip = chip_of(catalogue_device("a100_sxm_80gb"), "bfloat16")
    time_s = attention_time_s(truth, shape, chip) * np.exp(rng.normal(0, 0.02, count))
    return AttentionTable("a100_sxm_80gb", "flash", build, "forward", 128, "made here", shape, time_s, heads)


def test_attention_parameters_are_recovered_from_many_and_from_few_points() -> None:
    truth = np.array([0.62, 350.0, 1.2e-5, 0.8])
    many = fit_attention(attention_table(400, truth), None)
    assert many is not None
    assert many.parameters["efficiency"] == pytest.approx(0.62, rel=0.03)
    assert many.error is not None
    assert many.error.median_ape < 0.03
    other = many.replace(parameters={**many.parameters, "half_length": 500.0})
    few = fit_attention(attention_table(8, truth), attention_prior([many, other]))
    assert few is not None
    assert few.parameters["efficiency"] == pytest.approx(0.62, rel=0.1)


def test_the_representative_build_is_the_one_in_the_middle() -> None:
    builds = []
    for name, efficiency in (("slow", 0.5), ("middle", 0.6), ("fast", 0.72)):
        table = attention_table(300, np.array([efficiency, 350.0, 1.2e-5, 0.8]), name)
        fit = fit_attention(table, None)
        assert fit is not None
        builds.append((table, fit))
    chosen, disagreement = representative(builds)
    assert chosen is builds[1][1]
    assert 0.05 < disagreement < 0.2


def test_bandwidth_share_is_recovered() -> None:
    moved = np.exp(np.random.default_rng(2).uniform(np.log(5e7), np.log(5e9), 200))
    bandwidth = catalogue_device("a100_sxm_80gb").memory_bandwidth_bytes_per_s
    fit = fit_stream("a100_sxm_80gb", Stream(moved, 3e-5 + moved / (0.7 * bandwidth), "made here"), 2e-6)
    assert fit.parameters["efficiency"] == pytest.approx(0.7, rel=0.01)
    assert fit.parameters["floor_s"] == 2e-6  # what exceeds a kernel's floor was launch


def test_grouped_scale_is_recovered() -> None:
    dense = Fit(form="smooth", parameters=SMOOTH.named(SMOOTH_TRUTH))
    rng = np.random.default_rng(4)
    count = 300
    sizes = {
        "tokens": (256.0, 1024.0, 4096.0, 16384.0), "hidden": (2048.0, 4096.0, 6144.0), "intermediate": (1024.0, 2048.0, 8192.0),
        "top_k": (2.0, 8.0), "experts": (8.0, 64.0, 128.0),
    }  # fmt: skip
    columns = {name: rng.choice(values, count) for name, values in sizes.items()}
    blank = MixtureTable("a100_sxm_80gb", "made here", **columns, time_s=np.ones(count))
    truth = np.array([0.75, 1.05, 3e-5, 1.2])
    table = MixtureTable("a100_sxm_80gb", "made here", **columns, time_s=Layers(blank, dense).time_s(truth))
    found = fit_grouped(table, dense)
    assert found is not None
    assert found.parameters["compute"] == pytest.approx(0.75, rel=0.05)
    assert found.error is not None
    assert found.error.median_ape < 0.03


# --- carrying over --------------------------------------------------------------------------------------------------


def test_families_split_unlike_chips_of_one_name() -> None:
    names = {
        "a100_sxm_80gb": "ampere", "a40": "ampere_graphics", "rtx_3090": "ampere_graphics", "h100_sxm": "hopper",
        "gh200_96gb": "hopper", "b300_sxm": "blackwell", "rtx_5090": "blackwell_graphics", "mi300x": "cdna",
        "l4": "ada", "tpu_v5p": "tpu",
    }  # fmt: skip
    assert {name: family_of(catalogue_device(name)) for name in names} == names
    assert watts_per_flop(catalogue_device("h100_sxm")) == pytest.approx(700 / 989.4e12)


def test_a_published_rate_sets_the_sustained_efficiency() -> None:
    device = catalogue_device("mi300x")
    chip = chip_of(device, "bfloat16")
    fit = Fit(form="smooth", parameters=SMOOTH.named(SMOOTH_TRUTH))
    rate = published_flop_per_s(device, "bfloat16")
    assert rate == pytest.approx(0.89 * 668.4e12)  # best shape -> sustained
    moved = transferred(fit, device, "bfloat16", chip, 0.0)
    assert sustained_efficiency("smooth", moved.parameters, chip) == pytest.approx(rate / 1307.4e12, rel=0.03)
    assert published_flop_per_s(catalogue_device("l40s"), "float16") == 191e12  # sustained as it stands


# --- the command ----------------------------------------------------------------------------------------------------


def write_tables(folder: Path) -> None:
    """A small world laid out like the public tables: products of two devices, one attention table, one norm table."""
    (folder / "aiconfigurator").mkdir(parents=True)
    for short, name, efficiency in (("a100_sxm", "a100_sxm_80gb", 0.8), ("h100_sxm", "h100_sxm", 0.7)):
        chip = chip_of(catalogue_device(name), "bfloat16")
        m, n, k = shapes(300, seed=len(short))
        truth = SMOOTH_TRUTH.copy()
        truth[0] = efficiency
        time_us = product_time_s("smooth", truth, products(m, n, k), chip) * 1e6
        frame = pd.DataFrame({"m": m.astype(int), "n": n, "k": k, "latency_us": time_us})
        frame.to_csv(folder / "aiconfigurator" / f"gemm_{short}_bf16.csv.gz", index=False)
    table = attention_table(200, np.array([0.6, 300.0, 1e-5, 0.5]))
    rng = np.random.default_rng(5)
    batch, heads = rng.choice([1.0, 2, 4, 8], 200), rng.choice([8.0, 12, 16, 24, 32, 40, 48, 64], 200)
    length = rng.choice([512.0, 1024, 2048, 4096, 8192, 16384], 200)
    pd.DataFrame(
        {
            "gpu": "a100_sxm", "fw": "x-1", "kernel": "flash_attention", "batch": batch.astype(int), "seqlen": length.astype(int),
            "heads": heads.astype(int), "kv_heads": heads.astype(int), "head_dim": 128, "latency_us": table.time_s * 1e6,
        }
    ).to_csv(folder / "aiconfigurator" / "attention_prefill_bf16.csv.gz", index=False)  # fmt: skip


def test_the_command_fits_a_small_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tables(tmp_path / "data")
    assert main(["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "Matrix products" in printed
    assert "h100_sxm" in printed
    record = Efficiencies.model_validate(json.loads((tmp_path / "out" / "h100_sxm.json").read_text()))
    assert record.gemm["bfloat16"].error is not None
    assert record.gemm["bfloat16"].error.median_ape < 0.02
    attention = json.loads((tmp_path / "out" / "a100_sxm_80gb.json").read_text())["attention"]["flash"]["forward"]["128"]
    assert attention["parameters"]["efficiency"] == pytest.approx(0.6, rel=0.05)
    errors = json.loads((tmp_path / "out" / "errors.json").read_text())
    # the other device has another efficiency: 0.8 against 0.7 is what leaving it out costs, unless its published rate is used
    assert {row["device"] for row in errors["gemm"]} == {"a100_sxm_80gb", "h100_sxm"}
    assert all(row["left_out"]["specs_only"] < 0.25 for row in errors["gemm"])
    assert (tmp_path / "out" / "prior.json").exists()
    assert not list((tmp_path / "out").glob("*.partial"))


def test_the_same_data_gives_the_same_files(tmp_path: Path) -> None:
    write_tables(tmp_path / "data")
    texts = []
    for name in ("first", "second"):
        write(fit_everything(tmp_path / "data"), tmp_path / name)
        texts.append({path.name: path.read_text() for path in sorted((tmp_path / name).iterdir())})
    assert texts[0] == texts[1]


def test_a_folder_without_tables_is_said_so(tmp_path: Path) -> None:
    assert product_tables(tmp_path) == []
    with pytest.raises(InvalidInput, match="no measurement table"):
        fit_everything(tmp_path)
    assert main(["--data", str(tmp_path / "absent")]) == 2


def test_backward_of_attention_is_slower_than_forward_flop_say() -> None:
    forward, backward = (
        attentions(*(np.array([float(x)]) for x in (1, 16, 16, 4096)), head_dim=128, causal=np.array([True]), backward=phase)
        for phase in (False, True)
    )
    assert backward.flop[0] == 2.5 * forward.flop[0]
    assert ATTENTION.names[0] == "efficiency"


def test_batched_products_are_joined_to_the_others() -> None:
    both = joined(products(2.0, 3.0, 4.0), products([5.0, 6.0], 7.0, 8.0, 9.0))
    assert list(both.flop) == [48.0, 2 * 5 * 7 * 8 * 9.0, 2 * 6 * 7 * 8 * 9.0]
