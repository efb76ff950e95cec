"""The verdicts: a rule on intervals, shown to say each of its words; and what it reads off the data."""

import numpy as np
import pytest

from comparison import Comparison
from dynamics import Curves
from envs import Task
from findings import LABORATORY, Finding, effects, judge, less, table, turned
from likelihood import Likelihoods, Scored
from rollout import Trajectory
from step_quality import Matched


def finding(*cells) -> str:
    return Finding("1", "claim", "paper", "here", list(cells)).verdict()


def test_the_rule():
    assert finding((2.0, 1.0, 3.0)) == "**seen**"
    assert finding((-2.0, -3.0, -1.0)) == "**not seen**"
    assert finding((0.5, -1.0, 2.0)) == "inconclusive"
    assert finding((0.0, 0.0, 0.0)) == "inconclusive", "no difference at all is not evidence for one"
    assert finding((2.0, 1.0, 3.0), (0.5, -1.0, 2.0)) == "inconclusive", "all must be above zero"
    assert finding((2.0, 1.0, 3.0), (-2.0, -3.0, -1.0)) == "**not seen**", "one below is enough"
    assert finding((1.0, np.nan, np.nan)) == "too few tasks"
    assert finding((0.0, 1e-17, 2e-17)) == "inconclusive", "rounding is no evidence"
    assert Finding("1", "claim", "paper", "", "no room").verdict() == "no room"


def test_turning_a_claim_around():
    assert turned((2.0, 1.0, 4.0)) == (-2.0, -4.0, -1.0)
    assert less((2.0, 1.0, 4.0), 1.5) == (0.5, -0.5, 2.5)


TASKS = 40


def counts(*per_budget):
    """The same successes out of 8 on every map, at 25 % and at 100 %."""
    return np.tile(np.array(per_budget), (1, TASKS, 1))


def states(trained, depth=None) -> Matched:
    depth = np.linspace(0, 0.99, TASKS) if depth is None else depth
    zeros = np.zeros(TASKS)
    return Matched(
        zeros, np.broadcast_to(trained, TASKS).astype(float), zeros.astype(int), np.arange(TASKS), depth, ["b"]
    )


def verdicts(result, found, curves=None) -> dict[str, str]:
    return {f.claim: f.verdict() for f in judge(result, found, curves or {})}


@pytest.fixture
def result():
    # Base 1 and 2 of 8, GRPO 2 and 6, BudgetMix 4 and 6.
    data = {"base": counts(1, 2), "GRPO": counts(2, 6), "GRPO + BudgetMix": counts(4, 6)}
    return Comparison(data, [8, 8], (25, 100), [8, 32], [1.0, 1.0], ["b"], k=2)


def test_findings_about_pass_at_k_and_t(result):
    said = verdicts(result, {})
    # At T_max GRPO is above the base at K = 1, 2 and 4; with all 8 samples both solve every map, and there is no room left.
    assert said["Pass@K of RL is above the base's for all K"] == "**seen**"
    assert said["RL gains less at tight budgets (Pass@1)"] == "**seen**"  # 12.5 points against 50
    assert said["BudgetMix is better than the full budget at 25 % (Pass@1)"] == "**seen**"
    assert said["BudgetMix is better than the full budget at 50 % (Pass@1)"] == "not measured"
    assert said["BudgetMix is on a par with the full budget at T_max (Pass@1)"] == "**seen**"
    assert said["BudgetMix is better than the base at 25 % (Pass@1)"] == "**seen**"
    assert said["exact step rewards help at 25 % (Pass@2)"] == said["GiGPO helps at 25 % (Pass@1)"] == "not measured"
    assert said["RL's single actions are not better on average"] == said["R_multi rises in training"] == "not measured"
    result.counts["GRPO + BudgetMix"] = counts(1, 7)
    said = verdicts(result, {})
    assert said["BudgetMix is better than the full budget at 25 % (Pass@1)"] == "**not seen**"
    assert said["BudgetMix is on a par with the full budget at T_max (Pass@1)"] == "**not seen**", (
        "12.5 points better is no parity either"
    )


def test_without_room_without_t_max_and_with_few_tasks_nothing_is_concluded():
    full = {"base": counts(1, 8), "GRPO": counts(2, 8)}
    said = verdicts(Comparison(full, [8, 8], (25, 100), [8, 32], [1.0, 1.0], ["b"], k=2), {})
    assert (
        said["RL gains less at tight budgets (Pass@1)"]
        == said["Pass@K of RL is above the base's for all K"]
        == "no room"
    )
    said = verdicts(Comparison(full, [8, 8], (25, 50), [8, 16], [1.0, 1.0], ["b"], k=2), {})
    assert (
        said["RL gains less at tight budgets (Pass@1)"]
        == said["Pass@K of RL is above the base's for all K"]
        == "not measured"
    )
    few = {"base": counts(1, 2)[:, :9], "GRPO": counts(2, 6)[:, :9]}
    said = verdicts(Comparison(few, [8, 8], (25, 100), [8, 32], [1.0, 1.0], ["b"], k=2), {})
    assert said["RL gains less at tight budgets (Pass@1)"] == "too few tasks"


def test_at_the_ceiling_neither_gain_nor_parity_is_concluded():
    data = {"base": counts(1, 2), "GRPO": counts(8, 8), "GRPO + BudgetMix": counts(8, 8)}
    said = verdicts(Comparison(data, [8, 8], (25, 100), [8, 32], [1.0, 1.0], ["b"], k=2), {})
    assert said["BudgetMix is better than the full budget at 25 % (Pass@1)"] == "no room"
    assert said["BudgetMix is on a par with the full budget at T_max (Pass@1)"] == "no room"
    assert said["BudgetMix is better than the base at 25 % (Pass@1)"] == "**seen**"


def test_findings_about_step_signals(result):
    result.counts |= {"GRPO + oracle": counts(4, 6), "GiGPO": counts(1, 6)}
    mix = {"quality": states(0.1), "errors": states(-0.1)}
    said = verdicts(result, {"GiGPO": {"quality": states(-0.1), "errors": states(0.1)}, "GRPO + BudgetMix": mix})
    assert said["exact step rewards help at 25 % (Pass@1)"] == "**seen**"
    assert said["GiGPO helps at 25 % (Pass@1)"] == "**not seen**"
    assert (
        said["GiGPO's actions are better at matched states"] == "**not seen**"
        and said["and at error states"] == "**seen**"
    )
    assert said["BudgetMix's actions are better at matched states"] == "**seen**"
    assert said["BudgetMix's actions are better at error states"] == "**not seen**"


def test_findings_about_likelihoods(result):
    def side(llr, nll):
        won = [Trajectory(Task(str(t), "test", None), 0, 9, success=True) for t in range(TASKS)]
        return [[Scored(t, np.array([llr]), np.full(4, nll), np.ones(4), 8) for t in won]]

    said = verdicts(result, {"GRPO": {"likelihood": Likelihoods(side(-1.0, 1.0), side(2.0, 0.9), ["b"])}})
    assert said["the LLR of RL trajectories grows"] == said["and does so at equal length"] == "**seen**"
    assert said["single RL actions are hardly more surprising to the base"] == "**seen**"
    said = verdicts(result, {"GRPO": {"likelihood": Likelihoods(side(2.0, 1.0), side(-1.0, 1.1), ["b"])}})
    assert said["the LLR of RL trajectories grows"] == said["and does so at equal length"] == "**not seen**"
    assert said["single RL actions are hardly more surprising to the base"] == "**not seen**"


def test_findings_about_single_actions(result):
    rising = np.where(np.linspace(0, 0.99, TASKS) < 0.5, -0.2, 0.1)
    grpo = {"quality": states(rising), "errors": states(0.1), "recovery": states(0.2)}
    said = verdicts(result, {"GRPO": grpo})
    assert said["RL's single actions are not better on average"] == "**seen**"
    assert said["RL's actions are better right after an error"] == "**seen**"
    assert said["RL succeeds more often from error states"] == "**seen**"
    assert said["RL's advantage in single actions grows with depth"] == "**seen**"
    said = verdicts(result, {"GRPO": {"quality": states(0.1), "errors": states(-0.1), "recovery": states(0.0)}})
    assert said["RL's single actions are not better on average"] == "**not seen**"
    assert said["RL's actions are better right after an error"] == "**not seen**"
    assert said["RL succeeds more often from error states"] == "inconclusive"
    assert said["RL's advantage in single actions grows with depth"] == "inconclusive"


def test_findings_about_training(result):
    def curves(multi, single):
        grid = lambda values: np.array(values)[:, None, None] * np.ones((1, 1, TASKS))  # noqa: E731
        return Curves([0, 5], grid(multi), grid(single), np.ones((1, TASKS)), ["b"])

    said = verdicts(
        result, {}, {"GRPO": curves([0.2, 0.5], [0.6, 0.5]), "GRPO + BudgetMix": curves([0.2, 0.5], [0.6, 0.7])}
    )
    assert said["R_multi rises in training"] == said["R_single falls meanwhile"] == "**seen**"
    assert said["R_single ends higher with BudgetMix"] == said["but not with BudgetMix"] == "**seen**"
    said = verdicts(result, {}, {"GRPO": curves([0.5, 0.2], [0.6, 0.7])})
    assert said["R_multi rises in training"] == said["R_single falls meanwhile"] == "**not seen**"


def test_the_table_has_a_line_for_every_finding(result):
    lines = table(judge(result, {}, {})).splitlines()
    assert lines[0] == "| paper | finding | number there | number here | verdict |"
    assert len(lines) == 2 + len(judge(result, {}, {})) and all(line.count("|") == 6 for line in lines)
    assert "| 5.4 | BudgetMix is better than the full budget at 25 % (Pass@1) |" in "\n".join(lines)


def test_the_three_effects_by_hand():
    # Of 8: at 25, 50 and 100 % the base 1, 2, 2; GRPO 1, 4, 6; BudgetMix 3, 5, 6.
    data = {"base": counts(1, 2, 2), "GRPO": counts(1, 4, 6), "GRPO + BudgetMix": counts(3, 5, 6)}
    result = Comparison(data, [8, 8, 8], (25, 50, 100), [8, 16, 32], [1.0] * 3, ["b"], k=2)
    judged = effects(result)
    assert [f.section for f in judged] == ["E1", "E2", "E3", "E3", "E3"]
    # E1: Pass@2 is 1 - C(2,2)/C(8,2) = 27/28 against 1 - C(6,2)/C(8,2) = 13/28. E2: 50 points at T_max, none at 25 %.
    assert [f.cells[0][0] for f in judged] == pytest.approx([50.0, 50.0, 25.0, 12.5, 3.0])
    assert {f.verdict() for f in judged} == {"**seen**"}
    assert (
        "| E2 | GRPO gains less Pass@1 at 25 % than at T_max | above 0 | gain +0.0 at 25 %, +50.0 at T_max:"
        in table(judged, LABORATORY)
    )
    # BudgetMix 12.5 points worse at T_max, full budgets no worse at 25 % than at T_max, and no more found in two attempts.
    data |= {"GRPO": counts(1, 2, 2), "GRPO + BudgetMix": counts(1, 2, 1)}
    assert [f.verdict() for f in effects(result)] == ["inconclusive"] * 4 + ["**not seen**"]
    assert effects(Comparison(data, [8, 8, 8], (10, 50, 100), [4, 16, 32], [], ["b"], k=2)) == []
    assert effects(result, "GiGPO") == []
    few = {label: values[:, :9] for label, values in data.items()}
    assert {f.verdict() for f in effects(Comparison(few, [8] * 3, (25, 50, 100), [8, 16, 32], [], ["b"], k=2))} == {
        "too few tasks"
    }
