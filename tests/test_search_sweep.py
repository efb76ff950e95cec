"""The sweep over turns: means, paired differences and crossovers worked by hand."""

from dataclasses import asdict

import numpy as np
import pytest

from envs import UsageError
from search_agent import Metrics, banded_reward
from search_sweep import Sweep, cited, crossover, pair, parse_turns, reward, right


def game(right, turns=3):
    return {"answer_correct": float(right), "sources_correct": float(right), "returned_i_dont_know": 0.0,
            "num_turns": turns, "num_searches": 1}  # fmt: skip


def sweep(**rates):
    """Policies with one run: rates[label] is a success rate per number of turns, over 40 questions with two answers."""
    games = {
        label: [[[[game(q < rate * 40), game(q < rate * 40)] for q in range(40)] for rate in own]]
        for label, own in rates.items()
    }
    return Sweep(list(range(len(next(iter(rates.values()))))), games, {label: ["base"] for label in rates})


def test_turns_are_numbers_and_ranges():
    assert parse_turns("0-3,5, 10") == [0, 1, 2, 3, 5, 10] and parse_turns("2") == [2] and parse_turns("1,1") == [1]
    for wrong in ("", "3-1", "-1", "a", "0-", "1,,2", "0-100000"):
        with pytest.raises(UsageError, match="turns must"):
            parse_turns(wrong)


def test_accuracies_and_differences():
    s = sweep(base=(0.5, 0.5), rl=(0.25, 0.75))
    mean, low, high = s.share("rl", 1)
    assert mean == 75 and low < 75 < high
    assert s.difference("rl", "base", 1)[0] == 25 and s.difference("rl", "base", 0)[0] == -25
    assert s.mean("rl", 0, "num_turns") == 3


def test_cited_is_what_the_reward_counts_as_correct():
    plain = game(True) | {"sources_correct": 0.0}
    assert right(plain) == 1 and cited(plain) == 0 and cited(game(True)) == 1
    assert cited(plain | {"returned_i_dont_know": 1.0}) == 1, "there is nothing to cite"
    assert cited(game(False) | {"sources_correct": 1.0}) == 0


def test_rewards_are_those_of_the_stored_metrics():
    m = Metrics(answer_correct=True, sources_correct=True, attempted_answer=True, num_turns=3, num_searches=1)
    stored = {name: float(value) for name, value in asdict(m).items()}
    assert reward(stored) == banded_reward(m) == pytest.approx(1.8) and reward(stored | {"sources_correct": 0.0}) == -1


def test_a_crossover_needs_a_significant_difference_on_either_side():
    assert crossover(sweep(a=(0.8, 0.5, 0.2), b=(0.2, 0.5, 0.8)), "a", "b") == "b overtakes a between 0 and 2 turns"
    assert crossover(sweep(a=(0.8, 0.5), b=(0.2, 0.525)), "a", "b") == "", "one question more is no crossover"
    assert crossover(sweep(a=(0.8, 0.8), b=(0.2, 0.2)), "a", "b") == ""


def test_runs_are_paired_by_their_base():
    assert pair(["a"], ["a", "a"]) == [(0, 0, "a"), (0, 1, "a")]
    assert pair(["a", "b"], ["b", "a"]) == [(0, 1, "a"), (1, 0, "b")]
    assert pair(["a", "a", "b", "b"], ["a", "b"]) == [(0, 0, "a"), (1, 0, "a"), (2, 1, "b"), (3, 1, "b")]
    assert pair(["a", "a", "a"], ["a", "a"]) == [(0, 0, "a"), (1, 1, "a")], "as many as there are pairs of"
    assert pair(["expert"], ["a", "b"]) == [(0, 0, "a"), (0, 1, "b")] and pair(["a"], ["expert"]) == [(0, 0, "a")]
    assert pair(["a", "b"], ["b"]) == [(1, 0, "b")] and pair(["a", "b"], ["c", "d"]) == []
    s = sweep(base=(0.5,), rl=(0.75,), other=(0.25,))
    s.games["base"], s.bases["base"] = s.games["base"] + s.games["other"], ["a", "b"]
    s.bases["rl"] = ["b"]
    assert s.difference("rl", "base", 0)[0] == 50, "with the base that it was trained on"


def test_one_base_is_paired_with_every_training_on_it():
    s = sweep(base=(0.5,), rl=(0.75,))
    s.games["rl"] = s.games["rl"] * 3
    s.bases["rl"] = ["base"] * 3
    mean, low, high = s.difference("rl", "base", 0)
    assert mean == 25 and 0 < low < high
    assert s.values("rl", 0, lambda g: g["answer_correct"]).shape == (3, 40)
    assert np.all(s.values("base", 0, lambda g: g["num_searches"]) == 1)
