"""The one idea, and the main command: what it makes, what it refuses, and that BudgetMix changes nothing but the budgets."""

import json
import math
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest

import budgetmix
from budgetmix import candidate_budgets, sample_budget
from envs import UsageError

ROOT = Path(__file__).parent.parent


def test_candidate_budgets_against_exact_arithmetic():
    for t_max in range(1, 101):
        exact = sorted({math.ceil(Fraction(k * t_max, 10)) for k in range(1, 11)})
        assert candidate_budgets(t_max) == exact
    assert candidate_budgets(70) == [7, 14, 21, 28, 35, 42, 49, 56, 63, 70]
    assert candidate_budgets(10) == list(range(1, 11))
    assert candidate_budgets(3) == [1, 2, 3]
    assert candidate_budgets(1) == [1]
    assert math.ceil(0.1 * 3 * 10) == 4, "the trap: in floats the third tenth of ten is four"


@pytest.mark.parametrize("t_max", [0, -5])
def test_a_t_max_below_one_turn_is_refused(t_max):
    with pytest.raises(UsageError, match="T_max must be at least 1"):
        candidate_budgets(t_max)


def test_budgets_are_drawn_uniformly_from_the_candidates():
    counts = Counter(sample_budget(70, Random(seed)) for seed in range(5000))
    assert sorted(counts) == candidate_budgets(70)
    # 500 expected in each of ten cells; four standard deviations of a binomial are 85.
    assert all(abs(count - 500) < 85 for count in counts.values())


def run(monkeypatch, *argv):
    """The main command as typed, in this process. Returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["budgetmix.py", *map(str, argv)])
    try:
        budgetmix.run_cli(budgetmix.Args, budgetmix.main, budgetmix.__doc__)
    except SystemExit as stop:
        return stop.code
    return 0


def small(base, out, *more):
    return ("--model", base, "--out", out, "--steps", 2, "--tasks-per-step", 2, "--group-size", 4, "--train-tasks", 20,
            "--eval-tasks", 6, "--n", 8, "--env-args", "max_turns=8", *more)  # fmt: skip


def test_the_main_command_trains_compares_and_shows(base, tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, *small(base, tmp_path, "--compare", "--seeds", 0, 1)) == 0
    said = capsys.readouterr().out
    for expected in ("| Pass@1, % | T=2 (25%) | T=4 (50%) | T=6 (75%) | T=8 (100%) |", "| Pass@8, %", "| base |",
                     "| GRPO, full budget |", "| BudgetMix-GRPO |", "| BudgetMix-GRPO - GRPO, full budget |",
                     "| structural bound |", "6 maps, 8 trajectories per map and budget, 2 seeds",
                     "One trajectory of training step", "read next: grpo.py"):  # fmt: skip
        assert expected in said
    folder = tmp_path / "frozenlake"
    assert (folder / "table.md").read_text().strip() in said
    assert (folder / "pass_at_t.png").read_bytes().startswith(b"\x89PNG")
    configs = {arm: json.loads((folder / f"{arm}-s1" / "config.json").read_text()) for arm in ("full", "mix")}
    assert configs["full"] == configs["mix"], "BudgetMix changes the budget distribution and nothing else"
    rows = {arm: [json.loads(line) for line in (folder / f"{arm}-s1" / "trajectories.jsonl").read_text().splitlines()]
            for arm in ("full", "mix")}  # fmt: skip
    assert [(r["task"], r["seed"]) for r in rows["full"]] == [(r["task"], r["seed"]) for r in rows["mix"]]
    assert {r["budget"] for r in rows["full"]} == {8} and {r["budget"] for r in rows["mix"]} <= set(
        candidate_budgets(8)
    )
    # The prompt tells the model the budget of its group, not T_max.
    assert all(r["turns"][0]["turns_left"] == r["budget"] for r in rows["mix"])


def test_a_second_run_is_kept_apart_and_resume_continues_the_latest(base, tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, *small(base, tmp_path)) == 0
    first = (tmp_path / "frozenlake" / "table.md").read_text()
    assert run(monkeypatch, *small(base, tmp_path)) == 0
    assert (tmp_path / "frozenlake-2" / "table.md").read_text() == first, "the same command gives the same numbers"
    # Finished runs are not sampled again: resuming reads what is stored.
    capsys.readouterr()
    monkeypatch.setattr(budgetmix.evaluate, "play", None)
    monkeypatch.setattr(budgetmix.grpo, "play", None)
    assert run(monkeypatch, *small(base, tmp_path, "--resume")) == 0
    assert "frozenlake-2/table.md" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--env", "frozenpond"), "unknown environment 'frozenpond': choose one of frozenlake, frozenlake-fog"),
        (("--env-args", "max_turns=0"), "max_turns must be between 1 and"),
        (("--env-args", "colour=blue"), "has no option 'colour'"),
        (("--env-args", "size"), "not of the form name=value"),
        (("--model", "no/such/model"), "cannot load the model 'no/such/model'"),
        (("--out", "/proc/nowhere"), "cannot write to the folder /proc/nowhere"),
        (("--resume",), "there is no experiment"),
        (("--n", "0"), "at least one task and one sample"),
        (("--percents", "0"), "percents must lie between 1 and 100"),
        (("--steps", "0"), "steps must be at least 1"),
        (("--group-size", "1"), "group_size must be at least 2"),
        (("--seeds", "1", "1"), "seeds must be different"),
    ],
)
def test_wrong_input_is_one_clear_line_and_exit_code_2(argv, message, base, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = small(base, tmp_path / "runs")
    arguments = [a for i, a in enumerate(arguments) if argv[0] not in arguments[max(0, i - 1) : i + 1]]
    assert run(monkeypatch, *arguments, *argv) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not list(tmp_path.glob("runs/**/metrics.jsonl")), "nothing is half done"


def test_the_command_line_itself(tmp_path):
    """Once as a real process: an unknown environment says one line and no traceback."""
    done = subprocess.run(
        [sys.executable, ROOT / "budgetmix.py", "--env", "x"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.strip() == "error: unknown environment 'x': choose one of frozenlake, frozenlake-fog"


@pytest.mark.parametrize("script", ["budgetmix.py", "grpo.py", "evaluate.py", "warmstart.py"])
def test_help_reads_like_documentation(script, tmp_path):
    done = subprocess.run([sys.executable, ROOT / script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "--env" in done.stdout
    assert not any("(required)" in line for line in done.stdout.splitlines())
