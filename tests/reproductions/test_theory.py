"""The reproductions of the theory of clipping: exact statements, and that each leaves its files."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from hushgrad.launch.reproduction import StudySettings
from hushgrad_reproductions import glm_dimension as dimension
from hushgrad_reproductions import glm_lower_bound as lower
from hushgrad_reproductions import lazy_region as lazy
from hushgrad_reproductions.descending import noise_multiplier
from hushgrad_reproductions.glm_lower_bound import LOGISTIC, SQUARED


def settings(out: Path, seeds: int = 2) -> StudySettings:
    return StudySettings(data=None, out=out, seeds=seeds, progress=lambda line: None)


def rows(path: Path) -> list[dict[str, object]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return [dict(zip(found["headings"], row, strict=True)) for row in found["rows"]]


def drawn(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("norm", [0.001, 0.01, 0.1, 0.2, 0.24, 0.4, 0.49])
def test_theorem_3_2s_minimiser_comes_out_of_the_huberised_loss(norm: float) -> None:
    objective = LOGISTIC.objective(norm)
    assert float(objective.minimiser()) == pytest.approx(2 * math.log(1 / norm - 1), abs=1e-9)
    assert float(objective.minimiser(clipped=False)) == pytest.approx(0, abs=1e-9)
    assert objective.original(torch.zeros(1, dtype=torch.float64)) == pytest.approx(math.log(2))
    least = LOGISTIC.least(norm)
    if norm < 0.25:
        assert least is not None
        assert objective.excess_risk() > least > math.log(1 / norm) / 60
    else:
        assert least is None


@pytest.mark.parametrize("norm", [0.5, 1.0, 3.0])
def test_a_norm_that_is_large_enough_costs_nothing(norm: float) -> None:
    assert LOGISTIC.objective(norm).excess_risk() == pytest.approx(0, abs=1e-12)


def test_theorem_b_4s_numbers() -> None:
    tight, wide = SQUARED.objective(1.0), SQUARED.objective(16.0)
    assert float(tight.minimiser()) == pytest.approx(1) and tight.excess_risk() == pytest.approx(4)
    assert float(wide.minimiser()) == pytest.approx(3) and wide.excess_risk() < 1e-12


def test_records_do_not_undo_the_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "STEPS", 60)
    tight = lower.trained_risk(LOGISTIC, 0.1, 300, seeds=2)
    assert tight.mean == pytest.approx(LOGISTIC.objective(0.1).excess_risk(), rel=0.2)
    few, many = (lower.trained_risk(LOGISTIC, 1.0, n, seeds=4).mean for n in (5, 300))
    assert many < few / 10 and many < 0.01
    wrong = lower.trained_risk(SQUARED, 1.0, 300, seeds=2)
    assert wrong.mean == pytest.approx(4, rel=0.2)
    assert lower.trained_risk(SQUARED, 16.0, 300, seeds=2).mean < 0.1


def test_the_lower_bounds_tables_and_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower, "STEPS", 2)
    lower.glm_lower_bound(settings(tmp_path), copies=(2, 4))
    assert drawn(tmp_path / "glm-lower-bound.png")
    found = rows(tmp_path / "glm-lower-bound.json")
    assert [row["L"] for row in found] == list(LOGISTIC.norms)
    for row in found:
        assert row["θ clipped"] == pytest.approx(row["θ paper"], abs=1e-9)
        assert len(row["DP-GD, n = 4"]) == 2
    wrong, right = rows(tmp_path / "glm-lower-bound-squared.json")
    assert (wrong["θ clipped"], right["θ clipped"]) == (pytest.approx(1), pytest.approx(3))
    assert "± 95 %" in (tmp_path / "glm-lower-bound.md").read_text(encoding="utf-8")


def test_the_excess_risk_is_free_of_the_dimension_until_a_projection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dimension, "STEPS", 40)
    given, noise = dimension.risk_problem(128), noise_multiplier(2.0, 1e-5, 40) / 128
    small, large = (dimension.excess_risks(given, p, noise=noise, seeds=4) for p in (6, 2000))
    free = [np.array(risks["free"].values) for risks in (small, large)]
    spread = math.hypot(*(np.std(values, ddof=1) / 2 for values in free))
    assert abs(free[0].mean() - free[1].mean()) < 5 * spread
    assert max(free[1]) < 2 * max(free[0])
    for way in ("projected", "projected, its own rate"):
        assert min(large[way].values) > 1.3 * small[way].mean
        assert min(large[way].values) > 1.3 * free[1].mean()


def test_the_dimensions_table_and_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dimension, "STEPS", 15)
    dimension.glm_dimension(settings(tmp_path), largest=100, records=64)
    assert drawn(tmp_path / "glm-dimension.png")
    small, large = rows(tmp_path / "glm-dimension.json")
    for row in (small, large):
        assert np.mean(row["excess risk, free"]) <= row["bound, rank k"]
        assert np.mean(row["excess risk, projected, its own rate"]) <= row["bound, rank p"]
    assert small["bound, rank k"] == large["bound, rank k"]
    assert large["bound, rank p"] > 1.3 * small["bound, rank p"]


def test_without_noise_no_dimension_and_no_projection_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dimension, "STEPS", 30)
    monkeypatch.setattr(dimension, "EPSILON", math.inf)
    given = dimension.risk_problem(64)
    found = [dimension.excess_risks(given, p, noise=0.0, seeds=1) for p in (5, 500)]
    for risks in found:
        assert risks["free"].mean == pytest.approx(found[0]["free"].mean, rel=1e-9)
        assert risks["projected"].mean == pytest.approx(found[0]["projected"].mean, rel=1e-9)


def test_the_noise_is_that_of_the_target() -> None:
    assert noise_multiplier(math.inf, 1e-5, 10) == 0
    one, many = noise_multiplier(1.0, 1e-5, 1), noise_multiplier(1.0, 1e-5, 100)
    assert one == pytest.approx(3.7307, rel=1e-3) and many == pytest.approx(10 * one, rel=1e-3)


@pytest.mark.parametrize("theta", [-6.0, -1.0, 0.0, 2.5, 6.0])
def test_normalised_intercept_gradients_cancel_everywhere(theta: float) -> None:
    """Every gradient of a class has the same sign, so two balanced classes always cancel."""
    tug = lazy.intercept(500)
    pulls = {rule: lazy.pull(tug.objective(clip), theta) for rule, clip in tug.rules().items()}
    assert pulls["AUTO-V"] == pytest.approx(0, abs=1e-12)
    if theta:
        assert pulls["AUTO-S"] * theta > 0.02  # it points to the minimum, near 0


def test_a_shifted_label_is_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "STEPS", 1)
    for tug in (lazy.intercept(50), lazy.mixture(50)):
        for rule, clip in tug.rules().items():
            step = lazy.end(tug, clip, 3.0, epsilon=math.inf) - 3.0
            by_hand = -lazy.STRIDE * lazy.pull(tug.objective(clip), 3.0)
            assert step == pytest.approx(by_hand, abs=1e-9), rule


def test_the_mixtures_lazy_region_is_that_of_the_sign() -> None:
    """AUTO-V's mean gradient is the share of records below θ minus that above it."""
    tug = lazy.mixture(2000)
    objective = tug.objective(tug.rules()["AUTO-V"])
    below = float((tug.labels < 1.5).double().mean())
    assert lazy.pull(objective, 1.5) == pytest.approx(2 * below - 1, abs=1e-9)
    low, high = lazy.lazy_region(objective)
    assert abs(lazy.pull(objective, 0.99 * low)) <= lazy.STILL < lazy.pull(objective, 1.1 * high)
    narrow = lazy.lazy_region(tug.objective(tug.rules()["AUTO-S"]))
    assert low < -0.5 < narrow[0] < narrow[1] < 0.5 < high


@pytest.mark.parametrize("start", [-3.0, 3.0])
def test_an_intercept_stays_or_arrives(start: float) -> None:
    tug = lazy.intercept(500)
    ends = {rule: lazy.end(tug, c, start, epsilon=math.inf) for rule, c in tug.rules().items()}
    assert ends["AUTO-V"] == pytest.approx(start, abs=1e-6)
    assert abs(ends["AUTO-S"]) < 0.2 < 0.4 < abs(ends["Abadi"])


def test_a_mean_stays_between_the_middle_records_or_arrives() -> None:
    tug = lazy.mixture(100)
    low, high = tug.labels.sort().values[99:101].tolist()
    start = high - 0.1
    ends = {rule: lazy.end(tug, c, start, epsilon=math.inf) for rule, c in tug.rules().items()}
    assert low < 0 and start > 0.8  # there is a way to go
    assert ends["AUTO-V"] == pytest.approx(start, abs=1e-9)
    assert ends["Abadi"] == pytest.approx(start, abs=1e-9)
    assert abs(ends["AUTO-S"]) < 0.3


def test_the_lazy_regions_tables_and_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy, "STEPS", 2)
    lazy.lazy_regions(settings(tmp_path), each=50)
    assert drawn(tmp_path / "lazy-region.png")
    for name in ("intercept", "mixture"):
        found = {row["rule"]: row for row in rows(tmp_path / f"lazy-region-{name}.json")}
        assert list(found) == ["Abadi", "AUTO-V", "AUTO-S"]
        stuck = found["AUTO-V"]
        assert (
            stuck["to"] - stuck["lazy from"] > found["AUTO-S"]["to"] - found["AUTO-S"]["lazy from"]
        )
        moved = [np.array(stuck[f"θ from {start}, with DP"]) - start for start in (1, 3)]
        assert len(set(moved[0])) == 2 and not np.isclose(*moved).any()  # noise of their own
