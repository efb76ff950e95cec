"""The one idea, and the main command: what it makes, what it refuses, and that BudgetMix changes nothing but the budgets."""

import json
import math
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest

import analysis
import budgetmix
import evaluate
import gigpo
import grpo
import ppo
import warmstart
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


def small(base, out, *more):
    return ("--model", base, "--out", out, "--steps", 2, "--tasks-per-step", 2, "--group-size", 4, "--train-tasks", 20,
            "--eval-tasks", 6, "--n", 8, "--env-args", "max_turns=8", *more)  # fmt: skip


def test_the_main_command_trains_compares_and_shows(base, tmp_path, command, capsys):
    assert command(budgetmix, *small(base, tmp_path, "--compare", "--seeds", 0, 1)) == 0
    said = capsys.readouterr().out
    for expected in ("| Pass@1, % | T=2 (25%) | T=4 (50%) | T=6 (75%) | T=8 (100%) |", "| Pass@8, %", "| base |",
                     "| GRPO |", "| GRPO + BudgetMix |", "| GRPO + BudgetMix - GRPO |", "| structural bound |",
                     "6 tasks, 8 trajectories per task and budget, 2 seeds", "One trajectory of training step",
                     "read next: grpo.py"):  # fmt: skip
        assert expected in said
    folder = tmp_path / "frozenlake"
    assert (folder / "table.md").read_text().strip() in said
    assert (folder / "pass_at_t.png").read_bytes().startswith(b"\x89PNG")
    assert_only_the_budgets_differ(folder / "grpo-full-s1", folder / "grpo-mix-s1")


def assert_only_the_budgets_differ(full: Path, mix: Path):
    configs = [json.loads((run / "config.json").read_text()) for run in (full, mix)]
    assert (configs[0].pop("budgets"), configs[1].pop("budgets")) == ("full_budget", "sample_budget")
    assert configs[0] == configs[1], "BudgetMix changes the budget distribution and nothing else"
    rows = [[json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()] for run in (full, mix)]
    assert [(r["task"], r["seed"]) for r in rows[0]] == [(r["task"], r["seed"]) for r in rows[1]]
    assert {r["budget"] for r in rows[0]} == {8}
    assert {r["budget"] for r in rows[1]} <= set(candidate_budgets(8))
    # The prompt tells the model the budget of its group, not T_max.
    assert all(r["turns"][0]["turns_left"] == r["budget"] for r in rows[1])


def test_all_algorithms_make_table_1_and_figure_9(base, tmp_path, command, capsys):
    words = small(base, tmp_path, "--algo", "all", "--compare", "--ppo.lam", 0.9, "--gigpo.omega", 0.5)
    assert command(budgetmix, *words) == 0
    folder = tmp_path / "frozenlake"
    table = (folder / "table.md").read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")]
    assert rows[1:10] == ["base", "GRPO", "GRPO + BudgetMix", "GiGPO", "GiGPO + BudgetMix", "PPO", "PPO + BudgetMix",
                          "GRPO + oracle", "structural bound"]  # fmt: skip
    assert {"PPO + BudgetMix - PPO", "GRPO + oracle - GRPO", "average gain of BudgetMix"} <= set(rows)
    assert len((folder / "table.csv").read_text().splitlines()) > 100
    for picture in ("pass_at_t.png", "process_signals.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    for algo in ("grpo", "gigpo", "ppo"):
        assert_only_the_budgets_differ(folder / f"{algo}-full-s0", folder / f"{algo}-mix-s0")
    configs = {a: json.loads((folder / f"{a}-full-s0" / "config.json").read_text()) for a in ("gigpo", "ppo")}
    assert configs["ppo"]["lam"] == 0.9 and configs["gigpo"]["omega"] == 0.5
    # Stopped between two arms, it starts the missing one and leaves the others alone.
    shutil.rmtree(folder / "ppo-mix-s0")
    assert command(budgetmix, *words, "--resume") == 0
    assert (folder / "table.md").read_text() == table


def test_several_trainings_share_a_base_and_intervals_know_it(base, tmp_path, monkeypatch, command, capsys):
    monkeypatch.setattr(warmstart, "ensure_base", lambda game, recipe=None: made.append(game.seed) or base)
    made: list[int] = []
    words = [w for w in small(base, tmp_path, "--compare", "--seed", 5, "--rl-seeds", 2) if w not in ("--model", base)]
    assert command(budgetmix, *words) == 0
    assert set(made) == {5}, "one base for both trainings"
    said, folder = capsys.readouterr().out, tmp_path / "frozenlake"
    assert "2 seeds on 1 base model" in said
    runs = [folder / name for name in ("grpo-full-s5", "grpo-full-s5-2", "grpo-mix-s5", "grpo-mix-s5-2")]
    configs = [json.loads((run / "config.json").read_text()) for run in runs]
    assert [(c["seed"], c["base_seed"]) for c in configs] == [(5, 5), (1005, 5)] * 2
    first, second = ((run / "trajectories.jsonl").read_text() for run in runs[:2])
    assert first != second
    assert_only_the_budgets_differ(*runs[1::2])
    # Resumed with less than it holds it would lose its table: it is not.
    table = (folder / "table.md").read_text()
    for fewer, message in (
        (("--compare", "--seed", 5), "also holds grpo-full-s5-2, grpo-mix-s5-2: resume it as it was begun"),
        (("--seed", 5, "--rl-seeds", 2), "also holds grpo-full-s5, grpo-full-s5-2"),
        (("--compare", "--seed", 5, "--rl-seeds", 2, "--steps", 1), "has 2 steps behind it already"),
    ):
        assert command(budgetmix, *words[: words.index("--compare")], *fewer, "--resume") == 2
        assert message in capsys.readouterr().err
    assert (folder / "table.md").read_text() == table
    assert all(json.loads((run / "config.json").read_text())["steps"] == 2 for run in runs)
    # What was trained apart from its base is read as such: two runs of each kind.
    assert command(evaluate, "base", *runs, "--out", tmp_path, "--eval-tasks", 6, "--n", 8) == 0
    assert "2 seeds on 1 base model" in capsys.readouterr().out


def test_the_effects_are_judged_below_the_table(base, tmp_path, command, capsys):
    words = [w for w in small(base, tmp_path, "--compare") if w not in ("--eval-tasks", 6)] + ["--eval-tasks", 10]
    assert command(budgetmix, *words) == 0
    said = capsys.readouterr().out
    assert said.count("| E3 | ") == 3 and "| E1 | GRPO raises Pass@8 over the base at T_max | above 0 | " in said
    assert "The effects come from one base model and are a direction, no more." in said
    assert "| E2 | " in (tmp_path / "frozenlake" / "table.md").read_text()


def test_an_experiment_killed_before_its_first_training_is_resumed(base, tmp_path, command):
    (tmp_path / "frozenlake").mkdir()
    assert command(budgetmix, *small(base, tmp_path, "--resume")) == 0
    (tmp_path / "frozenlake-2").mkdir()
    assert command(budgetmix, *small(base, tmp_path)) == 0
    assert (tmp_path / "frozenlake-2" / "table.md").exists(), "an empty folder is as good as none"
    assert not (tmp_path / "frozenlake-3").exists()


def test_a_preset_names_defaults_and_what_is_typed_wins(monkeypatch):
    def read(*words) -> budgetmix.Args:
        seen = []
        monkeypatch.setattr(sys, "argv", ["budgetmix.py", *words])
        budgetmix.run_cli(budgetmix.Args, seen.append, budgetmix.__doc__)
        return seen[0]

    assert (read().seeds, read().rl_seeds) == ((), 1) and read("--preset", "quick") == read()
    results = read("--compare", "--preset", "results", "--n", "32")
    assert (results.seeds, results.rl_seeds, results.eval_tasks, results.n) == ((0, 1, 2, 3), 2, 200, 32)
    fewer = read("--preset=results", "--seeds", "7", "--rl-seeds", "1", "--eval-tasks", "100")
    assert (fewer.seeds, fewer.rl_seeds, fewer.eval_tasks) == ((7,), 1, 100), (
        "typed, though it is the quick one's value"
    )
    for wrong in (("--preset", "best"), ("--preset",)):
        with pytest.raises(SystemExit) as stop:
            read(*wrong)
        assert stop.value.code == 2


def test_a_second_run_is_kept_apart_and_resume_continues_the_latest(base, tmp_path, monkeypatch, command, capsys):
    assert command(budgetmix, *small(base, tmp_path)) == 0
    first = (tmp_path / "frozenlake" / "table.md").read_text()
    assert command(budgetmix, *small(base, tmp_path)) == 0
    assert (tmp_path / "frozenlake-2" / "table.md").read_text() == first, "the same command gives the same numbers"
    # Finished runs are not sampled again: resuming reads what is stored.
    capsys.readouterr()
    monkeypatch.setattr(evaluate, "play", None)
    monkeypatch.setattr(grpo, "play", None)
    assert command(budgetmix, *small(base, tmp_path, "--resume")) == 0
    assert f"everything lies in {tmp_path}/frozenlake-2/" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--env", "frozenpond"), "unknown environment 'frozenpond': choose one of frozenlake, frozenlake-brace"),
        (("--env-args", "max_turns=0"), "max_turns must be between 1 and"),
        (("--env-args", "colour=blue"), "has no option 'colour'"),
        (("--env-args", "size"), "not of the form name=value"),
        (("--model", "no/such/model"), "cannot load the model 'no/such/model'"),
        (("--out", "/proc/nowhere"), "cannot write to the folder /proc/nowhere"),
        (("--resume",), "there is no experiment"),
        (("--n", "4"), "Pass@8 needs at least 8 samples a task, there are 4: sample more (--n), or lower --k"),
        (("--k", "0"), "k must be at least 1"),
        (("--probe", "-1"), "probe must not be negative"),
        (("--n", "0"), "at least one sample a task"),
        (("--percents", "0"), "percents must lie between 1 and 100"),
        (("--percents", "25", "25"), "percents must be different"),
        (("--name", "../escape"), "name must stay inside the folder"),
        (("--steps", "0"), "steps must be at least 1"),
        (("--group-size", "1"), "group_size must be at least 2"),
        (("--seeds", "1", "1"), "seeds must be different"),
        (("--rl-seeds", "0"), "rl_seeds must be at least 1"),
        (("--seeds", "0", "1000", "--rl-seeds", "2"), "seeds that differ by 1000 are used by --rl-seeds"),
        (("--preset", "results", "--seed", "5"), "--seed 5 has no effect beside the seeds 0 1 2 3: use --seeds"),
        (("--seed", "2147483647", "--rl-seeds", "2"), "seed must be between 0 and 2147483647, not 2147484647"),
        (("--base-seed", "1"), "base_seed speaks of the embedded base model"),
        (("--base-seed", "-1"), "base_seed must be between 0 and"),
        (("--seeds", "1", "99999999999"), "seed must be between 0 and"),
        (("--algo", "gigpo", "--process-reward", "oracle"), "GiGPO makes its step credit from outcomes"),
        (("--process-reward", "judge"), "a judge needs the name of a model"),
        (("--algo", "ppo", "--ppo.gamma", "2"), "gamma and lam must be in [0, 1]"),
        (("--algo", "all", "--compare", "--ppo.gamma", "2"), "gamma and lam must be in [0, 1]"),
        (("--env-args", "size=2", "max_turns=3", "holes=0.1"), "maps with size=2"),
        (("--weight-decay", "-1"), "weight_decay must not be negative"),
        (("--seed", "99999999999"), "seed must be between 0 and"),
        (("--max-tokens", "0"), "max_tokens and sample_batch must be at least 1"),
        (("--max-tokens", "4090"), "no prompt fits into the context of 4096 tokens"),
    ],
)
def test_wrong_input_is_one_clear_line_and_exit_code_2(argv, message, base, tmp_path, monkeypatch, command, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = small(base, tmp_path / "runs")
    arguments = [a for i, a in enumerate(arguments) if argv[0] not in arguments[max(0, i - 1) : i + 1]]
    assert command(budgetmix, *arguments, *argv) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not list(tmp_path.glob("runs/**/metrics.jsonl")), "nothing is half done"


def test_the_command_line_itself(tmp_path):
    """Once as a real process: an unknown environment says one line and no traceback."""
    done = subprocess.run(
        [sys.executable, ROOT / "budgetmix.py", "--env", "x"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: unknown environment 'x': choose one of frozenlake, frozenlake-brace, frozenlake-fog\n"


@pytest.mark.parametrize("what", ["quality", "errors", "depth", "likelihood", "dynamics", "mechanism", "report"])
def test_every_analysis_has_its_help(what, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["analysis.py", what, "--help"])
    with pytest.raises(SystemExit) as stop:
        analysis.run_cli(analysis.Args, analysis.main, analysis.__doc__)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        stop.value.code == 0
        and "paper A" in said + " paper A" * (what in ("report", "mechanism"))
        and "(required)" not in said
    )


@pytest.mark.parametrize("script", [budgetmix, grpo, gigpo, ppo, evaluate, warmstart])
def test_help_reads_like_documentation(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script.__name__, "--help"])
    with pytest.raises(SystemExit) as stop:
        script.run_cli(script.Args, script.main, script.__doc__)
    said = capsys.readouterr().out
    assert stop.value.code == 0
    assert "--env" in said and "(required)" not in said
    assert script.__doc__.split(":")[0] in " ".join(said.split()), "it opens with the idea of the file"
    # Every option has its line of help.
    options = [f.name for f in fields(script.Args) if f.name not in ("judge", "gigpo", "ppo", "models")]
    assert all(f"--{name.replace('_', '-')}" in said for name in options)
