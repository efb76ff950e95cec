"""Pass@k against enumeration, intervals against simulation, and the measurement of real policies."""

import csv
import json
import shutil
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import comb
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import evaluate
import grpo
from comparison import Comparison, fine, interval, interval_of, paired_interval, pass_at_k, pass_values, signed
from envs import UsageError
from evaluate import Policy, Settings, budgets_of, compare, measure, read_models, samples_file, standard_pairs


def test_pass_at_k_against_enumeration_of_subsets():
    for n in range(1, 13):
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
    # One task solved with probability 0.2: Pass@4 is 1 - 0.8^4. The mean of the estimator over 2,000 draws of n = 8 samples.
    rng = np.random.default_rng(0)
    estimates = pass_values(rng.binomial(8, 0.2, size=2000), 8, 4)
    standard_error = estimates.std() / 2000**0.5
    assert abs(estimates.mean() - (1 - 0.8**4)) < 3 * standard_error


@pytest.mark.parametrize("n, c, k", [(4, 1, 8), (4, 1, 0), (4, 5, 2), (4, -1, 2), (0, 0, 1)])
def test_pass_at_k_refuses_what_has_no_answer(n, c, k):
    with pytest.raises(UsageError):
        pass_at_k(n, c, k)


def test_more_draws_than_samples_says_what_to_do():
    with pytest.raises(
        UsageError, match="needs at least 8 samples a task, there are 4: sample more .--n., or lower --k"
    ):
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
    assert interval(better - difficulty) == pytest.approx((0.05, 0.05, 0.05))
    unpaired = interval(better)[1] - interval(difficulty)[2]
    assert unpaired < 0, "without pairing the same difference would drown"


def test_seeds_are_resampled_as_a_whole():
    # Two seeds that disagree by 1 on every map: no number of maps makes that certain, and two say next to nothing.
    mean, low, high = interval(np.stack([np.zeros(500), np.ones(500)]))
    assert mean == 0.5 and low < -2 and high > 3, "Student's t with one degree of freedom: 0.5 +- 12.7 * 0.5"


def test_the_interval_covers_the_truth_on_paired_data():
    # 100 maps of different difficulty; 16 trajectories a map for each of two policies, the second better by 0.08 on average.
    rng = np.random.default_rng(2)
    held = []
    for repeat in range(500):
        base = rng.uniform(0.1, 0.8, size=100)
        gain = rng.normal(0.08, 0.05, size=100)
        a, b = (rng.binomial(16, np.clip(p, 0, 1)) / 16 for p in (base + gain, base))
        _, low, high = paired_interval(a, b, draws=800, seed=repeat)
        held.append(low <= 0.08 <= high)
    assert 0.92 <= np.mean(held) <= 0.98


def test_paired_results_must_be_of_the_same_tasks():
    with pytest.raises(UsageError, match="same runs and tasks"):
        paired_interval(np.zeros(3), np.zeros(4))
    with pytest.raises(UsageError, match="same runs and tasks"):
        paired_interval([], [])


def test_the_interval_covers_with_few_base_models_too():
    # Three base models, each trained once, that differ as much as maps do, and far more: a plain bootstrap holds 85 % there.
    for spread in (0.02, 0.05):
        rng, held = np.random.default_rng(3), []
        for repeat in range(500):
            tasks, runs = rng.normal(0, 0.15, size=100), rng.normal(0, spread, size=(3, 1))
            values = 0.05 + runs + tasks + rng.normal(0, 0.1, size=(3, 100))
            _, low, high = interval(values, draws=400, seed=repeat)
            held.append(low <= 0.05 <= high)
        assert 0.91 <= np.mean(held) <= 0.98


def test_trainings_on_one_base_are_no_more_certain_than_they_are_many():
    # Two trainings that differ by 5 say the same of their only base as two bases that differ by 5 say of all of them.
    values = np.random.default_rng(4).normal(0, 10, size=(1, 60)) + np.array([[0.0], [5.0]])
    _, low, high = interval(values, bases=["only", "only"])
    assert (low, high) == interval(values, bases=["one", "other"])[1:] and high - low > 20


def test_observations_are_averaged_but_whole_tasks_are_resampled():
    # Task 0 has three observations of 1, task 1 a single 0: the mean is 3/4, and a draw holds tasks {0,0}, {0,1} or {1,1}.
    assert interval(np.array([[1.0, 0.0]]), np.array([[3, 1]])) == (0.75, 0.0, 1.0)
    # Twelve tasks with three observations of 1 each, twelve with one of 0.
    values, task = [1.0] * 36 + [0.0] * 12, [t for t in range(12) for _ in range(3)] + list(range(12, 24))
    by_hand = interval(np.array([[1.0] * 12 + [0.0] * 12]), np.array([[3] * 12 + [1] * 12]))
    assert interval_of(values, [0] * 48, task, ["base"]) == by_hand and by_hand[0] == 0.75
    # A task without observations has no weight, whatever its value is said to be.
    assert interval(np.array([[0.5, np.nan]]), np.array([[4, 0]]))[0] == 0.5


def test_too_few_tasks_give_no_interval():
    mean, low, high = interval_of([1.0] * 20, [0] * 20, [i % 9 for i in range(20)], ["base"])
    assert mean == 1.0 and np.isnan([low, high]).all()
    assert signed((1.0, low, high)) == "+1.0 (too few tasks for an interval)"
    assert np.isnan(interval_of([], [], [], ["base"])).all() and fine(interval_of([], [], [], ["base"])) == "none"


def test_bases_are_resampled_and_within_them_their_runs():
    # Only runs differ, equally within each base: whatever bases are drawn, the mean stays near 1/2.
    _, low, high = interval(np.array([[0.0], [1.0]] * 20), bases=[i // 2 for i in range(40)])
    assert 0.3 < low < 0.5 < high < 0.7
    # Only bases differ: twenty bases of two equal runs each know as much as twenty runs, not as forty.
    twenty = interval(np.array([[0.0], [1.0]] * 10))
    doubled = interval(np.array([[0.0], [0.0], [1.0], [1.0]] * 10), bases=[i // 2 for i in range(40)])
    assert doubled[2] - doubled[1] == pytest.approx(twenty[2] - twenty[1], rel=0.1)


def test_limits_and_ties():
    # All equal but for rounding: nothing to widen. And no percentage beyond its limits, however wide the interval.
    equal = 100 * (1 - np.full((3, 20), 1e-16))
    assert interval(equal, within=(0, 100)) == pytest.approx((100, 100, 100))
    mean, low, high = interval(np.stack([np.full(50, 80.0), np.full(50, 99.0)]), within=(0, 100))
    assert mean == 89.5 and 0 <= low < 10 and high == 100
    almost = np.full((3, 20), 100.0)
    almost[1, 0] = 100.0 - 1e-13
    assert interval(almost)[1] > 99.9


def test_with_unequal_runs_per_base_mean_and_interval_speak_of_the_same_number():
    rng = np.random.default_rng(0)
    values = np.concatenate([np.full((9, 1), 0.1), rng.normal(0.3, 0.05, size=(15, 1))]) + np.zeros((1, 5))
    mean, low, high = interval(values, bases=[0] * 9 + list(range(1, 16)))
    assert mean == pytest.approx(values.mean()) and low < mean < high


def comparison(counts: dict, n: int, k: int) -> Comparison:
    """One run, one budget of 6 turns."""
    counts = {label: np.array([[[c] for c in own]]) for label, own in counts.items()}
    return Comparison(counts, [n], (100,), [6], [1.0], ["base"], k)


def by_hand() -> Comparison:
    """Two maps, n = 4: the base solves one map always and the other never, the others better and better."""
    return comparison({"base": [0, 4], "full": [2, 4], "mix": [3, 4], "odd": [3, 4]}, n=4, k=2)


def test_the_table_by_hand():
    table = by_hand().table([("full", "base"), ("mix", "full")], [("full", "base"), ("mix", "base")])
    assert "| Pass@1, % | T=6 (100%) |" in table and "| Pass@2, % | T=6 (100%) |" in table
    assert "| base | 50.0 [0.0, 100.0] |" in table
    assert "| full | <u>75.0</u> [50.0, 100.0] |" in table
    assert "| mix | **87.5** [75.0, 100.0] |" in table and "| odd | **87.5** [75.0, 100.0] |" in table
    assert "| full - base | +25.0 [+0.0, +50.0] |" in table
    assert "| average gain of BudgetMix | +31.2 [+0.0, +62.5] |" in table  # (25 + 37.5) / 2
    assert "| structural bound | 100.0 |" in table
    # Pass@2 of 2 successes in 4: 1 - C(2,2)/C(4,2) = 5/6; the mean with the other map's 1 is 91.7.
    assert "| full | <u>91.7</u> [83.3, 100.0] |" in table


def test_the_curve_over_k_by_hand():
    # n = 4, c = 2 and 4: K = 1 (2/4 + 1) / 2, K = 2 (5/6 + 1) / 2, K = 4 certain. The base: one map of two, for every K.
    lines = by_hand().curve_table([("full", "base")]).splitlines()
    assert lines[0] == "| Pass@K at T=6, % | K=1 | K=2 | K=4 |"
    assert "| base | 50.0 | 50.0 | 50.0 |" in lines and "| full | 75.0 | 91.7 | 100.0 |" in lines
    assert "| full - base | +25.0 [+0.0, +50.0] | +41.7 [+0.0, +83.3] | +50.0 [+0.0, +100.0] |" in lines
    assert by_hand().ks(4) == [1, 2, 4] and by_hand().ks(6) == [1, 2, 4, 6] and by_hand().ks(1) == [1]


def test_a_difference_is_marked_where_its_interval_excludes_zero():
    table = comparison({"a": [1] * 5, "b": [3] * 5}, n=4, k=1).table([("b", "a"), ("a", "b")])
    assert "| b - a | +50.0 [+50.0, +50.0] ▲ |" in table and "| a - b | -50.0 [-50.0, -50.0] ▼ |" in table


def test_csv_holds_the_surface_and_the_pictures_are_drawn(tmp_path):
    by_hand().write_csv(tmp_path / "t.csv", [("mix", "full")])
    rows = list(csv.reader((tmp_path / "t.csv").open()))
    assert rows[0] == ["metric", "row", "budget", "percent_of_t_max", "mean", "low", "high"]
    assert ["pass@1", "mix", "6", "100", "87.500", "75.000", "100.000"] in rows
    assert {row[0] for row in rows[1:]} == {"pass@1", "pass@2", "pass@4"} and len(rows) == 1 + 3 * 5
    # Where the full budget was sampled more often, its larger K are there too.
    counts = {"a": np.array([[[1, 3]] * 12])}
    Comparison(counts, [2, 4], (50, 100), [3, 6], [1.0, 1.0], ["base"], 1).write_csv(tmp_path / "u.csv", [])
    rows = [row[:3] for row in csv.reader((tmp_path / "u.csv").open())][1:]
    assert rows == [[f"pass@{k}", "a", b] for k, b in ((1, "3"), (1, "6"), (2, "3"), (2, "6"), (4, "6"))]
    by_hand().plot(tmp_path / "t.png", [["base", "mix"], ["full"]])
    by_hand().plot_breadth(tmp_path / "k.png")
    by_hand().plot_surface(tmp_path / "kt.png", [("mix", "full")])
    by_hand().plot_surface(tmp_path / "alone.png", [])
    for picture in ("t", "k", "kt", "alone"):
        assert (tmp_path / f"{picture}.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def run(base, tmp_path):
    return trained(base, tmp_path / "run")


def trained(base, folder, budgets=grpo.full_budget, **changes):
    settings = {"steps": 1, "tasks_per_step": 2, "group_size": 2, "train_tasks": 10, "lora_rank": 4, "lora_alpha": 8,
                "env_args": ("max_turns=8",), "out": folder.parent}  # fmt: skip
    return grpo.train(grpo.Args(model=str(base), **settings | changes), folder, budgets)


def settings(tmp_path, **changes) -> Settings:
    return Settings(**{"eval_tasks": 5, "n": 8, "env_args": ("max_turns=8",), "out": tmp_path} | changes)


def test_policies_meet_the_same_maps_and_no_one_beats_the_bound(base, run, tmp_path):
    result = compare({"base": [Policy(base)], "rl": [Policy(base, run)]}, settings(tmp_path))
    assert result.budgets == [2, 4, 6, 8]
    for counts in result.counts.values():
        assert counts.shape == (1, 5, 4)
        assert ((counts > 0).mean(axis=(0, 1)) <= np.array(result.bound) + 1e-9).all()
    games = {}
    for policy in (Policy(base), Policy(base, run)):
        stored = samples_file(policy, settings(tmp_path)).read_text().splitlines()
        games[policy.name] = [json.loads(line) for line in stored]
        assert len(stored) == 5 * 8 * 4
    key = lambda g: (g["budget"], g["task"], g["sample"])  # noqa: E731
    assert [key(g) for g in games["run"]] == [key(g) for g in games[base.name]], "the same tasks, budgets, samples"
    successes = sum(g["success"] for g in games["run"] if g["budget"] == 8)
    assert successes == result.counts["rl"][0, :, 3].sum()


def test_what_is_stored_is_never_sampled_again(base, run, tmp_path, monkeypatch):
    policy, few = Policy(base, run), settings(tmp_path)
    first = measure(policy, few)
    played, asked = evaluate.play, []

    def spy(engine, new_env, games, *rest):
        asked.extend(games)
        return played(engine, new_env, games, *rest)

    monkeypatch.setattr(evaluate, "play", spy)
    assert (measure(policy, few) == first).all() and not asked
    # More samples and another budget: only what is missing is played, and what was counted stays counted.
    more = measure(policy, settings(tmp_path, n=10, surface_n=8, percents=(100, 50)))
    assert len(asked) == 5 * 2 and {budget for _, _, budget in asked} == {8}
    assert (more[:, 0] == first[:, 1]).all() and (0 <= more[:, 1] - first[:, 3]).all()
    # Fewer: the first of those that are there.
    asked.clear()
    assert (measure(policy, settings(tmp_path, n=8)) == first).all() and not asked
    # Trained further, the run is another policy, whatever its log says: the stored numbers are not its numbers.
    weights = run / "adapter" / "adapter_model.safetensors"
    save_file({name: w + 0.01 for name, w in load_file(weights).items()}, weights, {"format": "pt"})
    measure(policy, few)
    assert len(asked) == 5 * 8 * 4


def test_a_killed_evaluation_goes_on_to_the_same_numbers(base, run, tmp_path, monkeypatch):
    small = settings(tmp_path / "straight", sample_batch=32)
    straight = measure(Policy(base, run), small)
    played, batches = evaluate.play, []

    def die(*args):
        batches.append(len(args[2]))
        if len(batches) == 3:
            raise KeyboardInterrupt
        return played(*args)

    monkeypatch.setattr(evaluate, "play", die)
    killed = replace(small, out=tmp_path / "killed")
    with pytest.raises(KeyboardInterrupt):
        measure(Policy(base, run), killed)
    assert batches == [32] * 3 and samples_file(Policy(base, run), killed).read_text().count("\n") == 64
    monkeypatch.setattr(evaluate, "play", played)
    assert (measure(Policy(base, run), killed) == straight).all()
    both = [samples_file(Policy(base, run), s).read_text() for s in (killed, small)]
    assert both[0] == both[1] and not list(tmp_path.glob("**/*.part"))


def test_everything_is_sampled_as_the_paper_says_and_no_batch_twice(base, tmp_path, monkeypatch):
    played, calls = evaluate.play, []

    def spy(engine, new_env, games, sampling, seed, *rest):
        calls.append((sampling, seed, games))
        return played(engine, new_env, games, sampling, seed, *rest)

    monkeypatch.setattr(evaluate, "play", spy)
    measure(Policy(base), settings(tmp_path, sample_batch=40))
    measure(Policy(base), settings(tmp_path, sample_batch=40, n=16))
    assert {(s.temperature, s.top_p) for s, _, _ in calls} == {(0.6, 0.9)}
    seeds = [seed for _, seed, _ in calls]
    assert len(set(seeds)) == len(seeds) == 8, "the same seed twice would sample the same again"
    # The i-th episode of a task has the same seed at every budget, and no two episodes of it have the same.
    episodes = {(task.id, seed) for _, _, games in calls for task, seed, _ in games}
    assert len(episodes) == 5 * 16


def test_what_was_measured_under_other_conditions_is_another_file(base, run, tmp_path):
    plain = settings(tmp_path)
    changes = [
        {},
        {"history": 1},
        {"max_tokens": 9},
        {"split": "val"},
        {"env_args": ("max_turns=9",)},
        {"env": "frozenlake-fog"},
    ]
    files = {samples_file(Policy(base), replace(plain, **change)) for change in changes}
    files.add(samples_file(Policy(base, run), plain))
    changed = Path(shutil.copytree(base, tmp_path / "moved" / base.name))
    weights = changed / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")
    files.add(samples_file(Policy(changed), plain))
    assert len(files) == len(changes) + 2
    assert samples_file(Policy(base), replace(plain, n=99, percents=(1, 2), k=3, eval_tasks=1)) in files


def test_an_unknown_bound_is_left_out(base, tmp_path, monkeypatch):
    from envs.frozenlake import FrozenLake

    monkeypatch.setattr(FrozenLake, "min_turns", lambda env, task: None)
    result = compare({"base": [Policy(base)]}, settings(tmp_path, percents=(100,)))
    assert result.bound == [] and "structural bound" not in result.table([])
    result.plot(tmp_path / "t.png", [["base"]])
    result.plot_breadth(tmp_path / "k.png")


def test_a_damaged_sample_is_named_and_nothing_is_lost(base, tmp_path):
    few = settings(tmp_path, percents=(25,))
    measure(Policy(base), few)
    path = samples_file(Policy(base), few)
    whole = path.read_bytes()
    for damage in (b'{"budget": 2, "ta', b'{"budget": 2, "task": "a", "sample": 0}'):
        path.write_bytes(whole + damage)
        with pytest.raises(UsageError, match="line 41, is damaged: remove the file"):
            measure(Policy(base), few)
    path.write_bytes(whole + b"\xff")
    with pytest.raises(UsageError, match="is damaged: remove the file"):
        measure(Policy(base), few)


def test_runs_come_in_groups_that_can_be_paired(base, tmp_path):
    mix = lambda t_max, rng: t_max // 2  # noqa: E731
    mix.__name__ = "sample_budget"
    full = [trained(base, tmp_path / f"full{s}", seed=s) for s in (0, 1)]
    mixed = [trained(base, tmp_path / f"mix{s}", mix, seed=s) for s in (0, 1)]
    other = trained(base, tmp_path / "other", lr=0.1, seed=0)
    names = list(map(str, (*reversed(full), *mixed)))
    groups, args = read_models(("base", *names), evaluate.Args())
    assert list(groups) == ["base", "GRPO", "GRPO + BudgetMix"]
    assert [p.run for p in groups["GRPO"]] == full and [p.run for p in groups["GRPO + BudgetMix"]] == mixed
    assert [p.base for p in groups["base"]] == [str(base)] * 2 and args.env_args == ("max_turns=8",)
    assert standard_pairs(list(groups)) == [
        ("GRPO", "base"),
        ("GRPO + BudgetMix", "base"),
        ("GRPO + BudgetMix", "GRPO"),
    ]
    # Another learning rate is another experiment; both would be called GRPO, so their folders name them.
    groups, _ = read_models((str(full[0]), str(other)), evaluate.Args())
    assert list(groups) == ["full0", "other"]
    with pytest.raises(UsageError, match="needs the same bases and seeds"):
        read_models(("base", *names[:3]), evaluate.Args())
    with pytest.raises(UsageError, match="named twice"):
        read_models(("base", names[0], names[0]), evaluate.Args())
    shutil.copytree(full[0], tmp_path / "copy")
    longer = trained(base, tmp_path / "longer", steps=2, seed=0)
    groups, _ = read_models((str(full[0]), str(longer)), evaluate.Args())
    assert list(groups) == ["full0", "longer"], "more steps are another experiment"
    with pytest.raises(UsageError, match="same experiment with the same seed"):
        read_models(("base", str(full[0]), str(tmp_path / "copy")), evaluate.Args())


def test_the_command_compares_a_run_with_its_base(run, tmp_path, command, capsys):
    words = (
        "base",
        run,
        "--out",
        tmp_path,
        "--eval-tasks",
        3,
        "--n",
        4,
        "--surface-n",
        2,
        "--k",
        2,
        "--percents",
        50,
        100,
    )
    assert command(evaluate, *words) == 0
    said = capsys.readouterr().out
    assert "| Pass@1, % | T=4 (50%) | T=8 (100%) |" in said and "| base |" in said and "| GRPO - base |" in said
    assert (
        "| Pass@K at T=8, % | K=1 | K=2 | K=4 |" in said and "3 tasks, 2 to 4 trajectories per task and budget" in said
    )
    for name in ("table.md", "table.csv", "pass_at_k.png", "pass_at_t.png", "surface.png"):
        assert (tmp_path / "evaluation" / name).exists()


def test_the_command_refuses_what_cannot_be_compared(run, tmp_path, command, capsys):
    assert command(evaluate, "base", tmp_path / "nothing") == 2
    assert "is not a trained run" in capsys.readouterr().err
    assert command(evaluate, "base", run, "--env", "frozenlake-fog") == 2
    assert "was trained on frozenlake, not on frozenlake-fog: say --env frozenlake" in capsys.readouterr().err
    assert command(evaluate, "base", run, "--env-args", "max_turns=10") == 2
    assert "--env-args is the run's own" in capsys.readouterr().err
    assert command(evaluate, "base", run, "--n", 128, "--surface-n", 4) == 2
    assert "there are 4 at the smaller ones: sample more (--surface-n), or lower --k" in capsys.readouterr().err
    assert command(evaluate, "base", run, "--max-tokens", 3) == 2
    assert "--max-tokens is the run's own, 512: leave it out" in capsys.readouterr().err
    (run / "config.json").write_text('{"base": "x"}')
    assert command(evaluate, "base", run) == 2
    assert "is not the config of a run" in capsys.readouterr().err
    for flags in (("--max-tokens", 0), ("--history", -1), ("--n", 0), ("--k", 9, "--n", 8), ("--eval-tasks", 0)):
        assert command(evaluate, "base", "--out", tmp_path, *flags) == 2
