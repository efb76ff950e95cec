"""The analysis commands end to end on small real runs: what they write, and what they refuse."""

import json
import shutil
from pathlib import Path

import pytest

import analysis
import budgetmix
import grpo
from envs.frozenlake import FrozenLake

SMALL = {"steps": 2, "tasks_per_step": 2, "group_size": 4, "train_tasks": 20, "lora_rank": 4, "lora_alpha": 8, "lr": 0.05,
         "env_args": ("max_turns=8",), "probe": 2}  # fmt: skip


@pytest.fixture(scope="module")
def experiment(base, tmp_path_factory):
    """(folder, full-budget run, BudgetMix run, a second seed of each)."""
    out = tmp_path_factory.mktemp("runs")

    def train(name, budgets, seed):
        return grpo.train(grpo.Args(model=str(base), out=out, seed=seed, **SMALL), out / name, budgets)

    runs = [train(f"{name}{seed}", budgets, seed) for seed in (0, 1)
            for name, budgets in (("full", grpo.full_budget), ("mix", budgetmix.sample_budget))]  # fmt: skip
    return out, *runs


LITTLE = ("--eval-tasks", 10, "--trajectories", 2, "--states", 40)


def test_each_analysis_writes_its_numbers_and_its_picture(experiment, command, capsys):
    out, full, mix, *_ = experiment
    words = {
        "quality": (*LITTLE, "--group", 4),
        "depth": (*LITTLE, "--group", 4),
        "errors": (*LITTLE, "--group", 4, "--continuations", 2),
        "likelihood": LITTLE[:4],
    }
    for what, flags in words.items():
        assert command(analysis, what, "base", full, mix, "--out", out, *flags) == 0
        said = capsys.readouterr().out
        assert "| GRPO" in said and "| GRPO + BudgetMix" in said
        assert (out / "analysis" / f"{what}.md").read_text().strip() in said
        assert (out / "analysis" / f"{what}.png").read_bytes().startswith(b"\x89PNG")
    assert command(analysis, "dynamics", full, mix, "--out", out) == 0
    assert "| GRPO + BudgetMix |" in capsys.readouterr().out and (out / "analysis" / "dynamics.png").exists()


def test_the_report_is_one_page_with_a_verdict_for_each_finding(experiment, command, capsys):
    out, *runs = experiment
    words = ("base", *runs, "--out", out, *LITTLE, "--group", 4, "--n", 16, "--surface-n", 8, "--percents", 25, 50, 100)
    assert command(analysis, "report", *words) == 0
    page = (out / "report" / "report.md").read_text()
    for expected in ("# What did RL improve? FrozenLake: base, GRPO, GRPO + BudgetMix", "2 runs of each kind", "| verdict |",
                     "| R_multi rises in training |", "## Pass@(K,T)", "## Training dynamics", "K=16",
                     "| E2 | GRPO gains less", "## What turns are spent on"):  # fmt: skip
        assert expected in page
    for picture in (
        "pass_at_k",
        "pass_at_t",
        "surface",
        "quality",
        "depth",
        "errors",
        "likelihood",
        "dynamics",
        "mechanism",
    ):
        assert f"({picture}.png)" in page
        assert (out / "report" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    # Under each section stands the command that makes it alone, with the settings of the report.
    (line,) = [line for line in page.splitlines() if line.startswith("    python analysis.py depth base ")]
    assert all(str(run) in line for run in runs) and f"--out {out}" in line
    assert "--eval-tasks 10" in line and "--trajectories 2 --states 40 --group 4" in line and "--n" not in line
    # The same command again samples nothing of Pass@(K,T) anew and says the same.
    assert command(analysis, "report", *words) == 0
    assert (out / "report" / "report.md").read_text() == page


def test_without_exact_action_values_the_rest_is_still_reported(experiment, command, monkeypatch, capsys):
    out, full, *_ = experiment
    monkeypatch.setattr(analysis, "has_oracle", lambda env: False)
    words = ("base", full, "--out", out, *LITTLE, "--n", 8, "--percents", 100, "--name", "inexact", "--surface-n", 8)
    assert command(analysis, "report", *words) == 0
    page = (out / "inexact" / "report.md").read_text()
    assert (
        page.count("Not measured: this environment does not know how good an action is.") == 2
        and "| success from there |" in page
    )
    assert "| RL's actions are better right after an error | better at 65.7 % of states | - | not measured |" in page
    assert (out / "inexact" / "errors.png").exists() and not (out / "inexact" / "quality.png").exists()
    assert command(analysis, "errors", "base", full, "--out", out, *LITTLE) == 0
    assert "quality after an error" not in capsys.readouterr().out
    assert command(analysis, "depth", "base", full, "--out", out, *LITTLE) == 2
    assert "has no exact action values" in capsys.readouterr().err


def test_an_environment_that_knows_no_errors_is_reported_without_them(experiment, command, monkeypatch, capsys):
    out, full, *_ = experiment
    monkeypatch.setattr(FrozenLake, "error_action", lambda env, rng: None)
    words = ("base", full, "--out", out, *LITTLE, "--n", 8, "--percents", 100, "--name", "no-errors", "--surface-n", 8)
    assert command(analysis, "report", *words) == 0
    page = (out / "no-errors" / "report.md").read_text()
    assert page.count("Not measured: this environment does not know") == 1 and "| matched states |" in page
    assert command(analysis, "errors", "base", full, "--out", out, *LITTLE) == 2
    assert "no error state was found" in capsys.readouterr().err


def test_wrong_input_is_one_line_and_exit_code_2(experiment, command, capsys, tmp_path):
    out, full, *_ = experiment
    plain, fog = (Path(shutil.copytree(full, tmp_path / name)) for name in ("plain", "fog"))
    (plain / "probe.jsonl").unlink()
    unfinished, gone = (Path(shutil.copytree(full, tmp_path / name)) for name in ("unfinished", "gone"))
    first, _ = (full / "probe.jsonl").read_text().splitlines(keepends=True)
    (unfinished / "probe.jsonl").write_text(first)
    config = json.loads((gone / "config.json").read_text()) | {"model": "embedded", "base": "runs/no-such-base"}
    (gone / "config.json").write_text(json.dumps(config))
    (fog / "config.json").write_text((fog / "config.json").read_text().replace('"frozenlake"', '"frozenlake-fog"'))
    for words, message in (
        (("quality",), "name at least one trained run"),
        (("quality", "base"), "name at least one trained run"),
        (("quality", "base", tmp_path / "no"), "is not a trained run"),
        (("quality", "base", full, "--states", 1), "at least 2 states"),
        (("quality", "base", full, "--group", 0), "at least one action"),
        (("depth", "base", full, "--percent", 0), "percent must lie between 1 and 100"),
        (("errors", "base", full, "--continuations", 0), "continuations must be at least 1"),
        (("errors", "base", full, "--trajectories", 0), "trajectories must be at least 1"),
        (("quality", "base", fog, "--env", "frozenlake-fog"), "FrozenLake-Fog has no exact action values"),
        (("report", full), "a report compares with the base"),
        (("report", "base", full, "--surface-n", 4), "sample more (--surface-n)"),
        (("report", "base", full, "--name", "../out"), "name must stay inside the folder"),
        (("likelihood", "base", full, "--micro-batch", 0), "micro_batch must be at least 1"),
        (("report", "base", full, "--name", full.name), "holds something else than a report: choose another --name"),
        (("quality", "base", full, "--env", "frozenpond"), "unknown environment 'frozenpond'"),
        (("quality", "base", gone), "the base model of"),
        (("dynamics", unfinished), "is damaged"),
        (("dynamics",), "name the runs that were trained with --probe"),
        (("dynamics", plain), "was trained without probes"),
        (("dynamics", full, full), "a run is named twice"),
    ):
        assert command(analysis, *words, *(() if words[0] == "dynamics" else ("--eval-tasks", 5)), "--out", out) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ") and message in error, words
