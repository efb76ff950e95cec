"""Pass@k against enumeration, intervals against simulation, and the measurement of real policies."""

import csv
import json
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import evaluate
import grpo
from envs import UsageError
from evaluate import Comparison, Policy, Settings, budgets_of, compare, interval, measure, pass_at_k, pass_values


def test_pass_at_k_against_enumeration_of_subsets():
    for n in range(1, 11):
        for c in range(n + 1):
            outcomes = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(combinations(outcomes, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_stays_exact_for_many_samples():
    for c, k in ((1, 1), (1, 1000), (3, 128), (500, 500), (999, 2), (10, 8)):
        assert pass_at_k(1000, c, k) == pytest.approx(float(1 - Fraction(comb(1000 - c, k), comb(1000, k))), abs=1e-12)
    assert pass_at_k(1000, 0, 1000) == 0.0 and pass_at_k(1000, 1000, 1) == 1.0


def test_pass_at_k_is_unbiased():
    # One task solved with probability 0.2: Pass@4 is 1 - 0.8^4. The mean of the estimator over 4,000 draws of n = 8 samples.
    rng = np.random.default_rng(0)
    estimates = pass_values(rng.binomial(8, 0.2, size=4000), 8, 4)
    standard_error = estimates.std() / 4000**0.5
    assert abs(estimates.mean() - (1 - 0.8**4)) < 3 * standard_error


@pytest.mark.parametrize("n, c, k", [(4, 1, 8), (4, 1, 0), (4, 5, 2), (4, -1, 2), (0, 0, 1)])
def test_pass_at_k_refuses_what_has_no_answer(n, c, k):
    with pytest.raises(UsageError):
        pass_at_k(n, c, k)


def test_more_draws_than_samples_says_what_to_do():
    with pytest.raises(UsageError, match="Pass@8 needs at least 8 samples a task, there are 4: sample more"):
        pass_at_k(4, 1, 8)


def test_budgets_round_up_in_integers():
    assert budgets_of(70) == [18, 35, 53, 70]  # paper A's T_max for FrozenLake
    assert budgets_of(32) == [8, 16, 24, 32]
    assert budgets_of(10) == [3, 5, 8, 10]
    assert budgets_of(1) == [1, 1, 1, 1]


def test_interval_by_hand_and_by_simulation():
    assert interval(np.full((1, 7), 0.25)) == (0.25, 0.25, 0.25)
    # Means of 50 draws from 0/1 with p = 0.3: the interval should hold 0.3 in about 95 % of repetitions.
    rng = np.random.default_rng(1)
    held = [low <= 0.3 <= high for _, low, high in
            (interval(rng.binomial(1, 0.3, size=(1, 50)).astype(float), draws=500, seed=i) for i in range(300))]  # fmt: skip
    assert 0.90 < np.mean(held) < 0.98


def test_pairing_removes_the_difficulty_of_the_maps():
    difficulty = np.random.default_rng(0).uniform(0, 1, size=(1, 100))
    better = difficulty + 0.05
    _, low, high = interval(better - difficulty)
    assert low == pytest.approx(0.05) and high == pytest.approx(0.05)
    unpaired = interval(better)[1] - interval(difficulty)[2]
    assert unpaired < 0, "without pairing the same difference would drown"


def test_seeds_are_resampled_as_a_whole():
    # Two seeds that disagree by 1 on every map: no number of maps makes that certain.
    values = np.stack([np.zeros(500), np.ones(500)])
    assert interval(values) == (0.5, 0.0, 1.0)


def by_hand() -> Comparison:
    """One seed, two maps, one budget, n = 4: the base solves one map always, the others better and better."""
    counts = {"base": [0, 4], "full": [2, 4], "mix": [3, 4], "odd": [3, 4]}
    return Comparison({label: np.array([[[a], [b]]]) for label, (a, b) in counts.items()}, 4, (100,), [6], [1.0])


def test_the_table_by_hand():
    table = by_hand().table([("full", "base"), ("mix", "full")], [("full", "base"), ("mix", "base")])
    assert "| Pass@1, % | T=6 (100%) |" in table and "Pass@8" not in table, "k = 8 needs 8 samples"
    assert "| base | 50.0 [0.0, 100.0] |" in table
    assert "| full | <u>75.0</u> [50.0, 100.0] |" in table
    assert "| mix | **87.5** [75.0, 100.0] |" in table and "| odd | **87.5** [75.0, 100.0] |" in table
    assert "| full - base | +25.0 [+0.0, +50.0] |" in table
    assert "| average gain of BudgetMix | +31.2 [+0.0, +62.5] |" in table  # (25 + 37.5) / 2
    assert "| structural bound | 100.0 |" in table


def test_a_difference_is_marked_where_its_interval_excludes_zero():
    counts = {"a": np.full((1, 5, 1), 1), "b": np.full((1, 5, 1), 3)}
    table = Comparison(counts, 4, (50,), [3], [1.0]).table([("b", "a"), ("a", "b")])
    assert "| b - a | +50.0 [+50.0, +50.0] ▲ |" in table and "| a - b | -50.0 [-50.0, -50.0] ▼ |" in table


def test_csv_and_picture_hold_the_same_rows(tmp_path):
    by_hand().write_csv(tmp_path / "t.csv", [("mix", "full")])
    rows = list(csv.reader((tmp_path / "t.csv").open()))
    assert rows[0] == ["metric", "row", "budget", "percent_of_t_max", "mean", "low", "high"]
    assert ["pass@1", "mix", "6", "100", "87.500", "75.000", "100.000"] in rows and len(rows) == 1 + 5
    by_hand().plot(tmp_path / "p.png", [["base", "mix"], ["full"]])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def run(base, tmp_path):
    args = grpo.Args(model=str(base), out=tmp_path, steps=1, tasks_per_step=2, group_size=2, train_tasks=10, lora_rank=4,
                     lora_alpha=8, env_args=("max_turns=8",))  # fmt: skip
    return grpo.train(args, tmp_path / "run")


SETTINGS = Settings(eval_tasks=5, n=8, env_args=("max_turns=8",))


def test_policies_meet_the_same_maps_and_no_one_beats_the_bound(base, run, tmp_path):
    groups = {"base": [Policy("base", base, tmp_path / "base")], "rl": [Policy("rl", base, run, run)]}
    result = compare(groups, SETTINGS)
    assert result.budgets == [2, 4, 6, 8]
    for counts in result.counts.values():
        assert counts.shape == (1, 5, 4)
        assert ((counts > 0).mean(axis=(0, 1)) <= np.array(result.bound) + 1e-9).all()
    stored = json.loads((run / "eval-test.json").read_text())
    assert stored["counts"] == result.counts["rl"][0].tolist() and stored["budgets"] == [2, 4, 6, 8]


def test_a_measurement_is_reused_only_for_the_same_question(base, run, tmp_path, monkeypatch):
    policy = Policy("rl", base, run, run)
    first = measure(policy, SETTINGS)
    played = evaluate.play
    monkeypatch.setattr(evaluate, "play", None)
    assert (measure(policy, SETTINGS) == first).all()
    with pytest.raises(TypeError):
        measure(policy, replace(SETTINGS, n=4))
    # Trained further, the run is another policy, whatever its log says: the stored numbers are not its numbers.
    weights = run / "adapter" / "adapter_model.safetensors"
    before = weights.read_bytes()
    save_file({name: w + 0.01 for name, w in load_file(weights).items()}, weights, {"format": "pt"})
    with pytest.raises(TypeError):
        measure(policy, SETTINGS)
    weights.write_bytes(before)
    monkeypatch.setattr(evaluate, "play", played)
    (run / "eval-test.json").unlink()
    assert (measure(policy, SETTINGS) == first).all(), "the same weights and seeds give the same counts"


def test_the_command_compares_a_run_with_its_base(run, tmp_path, command, capsys):
    assert command(evaluate, "base", run, "--out", tmp_path, "--eval-tasks", 3, "--n", 2, "--percents", 50, 100) == 0
    said = capsys.readouterr().out
    assert "| Pass@1, % | T=4 (50%) | T=8 (100%) |" in said and "| base |" in said and f"| {run} - base |" in said
    assert (tmp_path / "evaluation" / "table.md").exists()


def test_the_command_refuses_what_cannot_be_compared(run, tmp_path, command, capsys):
    assert command(evaluate, "base", tmp_path / "nothing") == 2
    assert "is not a trained run" in capsys.readouterr().err
    assert command(evaluate, "base", run, "--env", "frozenlake-fog") == 2
    assert "was trained with another env" in capsys.readouterr().err
    assert command(evaluate, "base", run, "--env-args", "max_turns=10") == 2
    assert "--env-args is the run's own" in capsys.readouterr().err
    for flags in (("--max-tokens", 0), ("--history", -1), ("--n", 0)):
        assert command(evaluate, "base", "--out", tmp_path, *flags) == 2
