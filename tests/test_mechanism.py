"""What turns were spent on: purposes, shares and lengths by hand, and the picture from real runs."""

import numpy as np
import pytest

import analysis
import grpo
from envs import Task
from mechanism import Watched, met, plot_mechanism, purpose
from rollout import Trajectory, Turn

CORRIDOR = Task("corridor", "test", ("SFG", "HHH", "FFF"))


def turn(action: str | None, state, valid: bool = True) -> Turn:
    return Turn((), (), (), "", "", action, None, valid, 0.0, state, 1)


def test_the_purpose_of_a_turn():
    trajectory = Trajectory(CORRIDOR, 0, 8)
    assert (
        purpose(trajectory, turn("right", 0)) == "closer" and purpose(trajectory, turn(" RIGHT", (1, True))) == "closer"
    )
    assert purpose(trajectory, turn("up", 0)) == "elsewhere", "against the edge"
    assert purpose(trajectory, turn("down", 0)) == "elsewhere", "into a hole"
    assert purpose(trajectory, turn("left", (1, False))) == "elsewhere", "back"
    assert purpose(trajectory, turn("brace", (1, False))) == "brace"
    assert purpose(trajectory, turn("look", (1, frozenset({0})))) == "look"
    assert (
        purpose(trajectory, turn("jump", 0, valid=False))
        == purpose(trajectory, turn(None, 0, valid=False))
        == "invalid"
    )


def watched() -> Watched:
    """Two trajectories on each of ten tasks of two moves: one braces each time and arrives, one walks off and falls."""
    turns = [["brace", "closer", "brace", "closer"], ["closer", "elsewhere"]] * 10
    task = [i // 2 for i in range(20)]
    return Watched(4, "brace", ["base"], [0] * 20, task, ["success", "failure"] * 10, [2] * 20, turns)


def test_shares_lengths_and_endings_by_hand():
    w = watched()
    # The first two turns, 4 and 3 left: one brace of four. With two left only who braces before each move still plays.
    assert w.share("brace", 4) == (0.25, 0.25, 0.25) and w.share("closer", 4) == (0.5, 0.5, 0.5)
    assert w.share("brace", 2) == (0.5, 0.5, 0.5) and w.share("closer", 1) == (1.0, 1.0, 1.0)
    assert np.isnan(w.share("brace", 0)[1]), "nobody played a fifth turn"
    assert w.lengths() == {"closer": 1.0, "elsewhere": 0.0, "brace": 1.0, "look": 0.0, "invalid": 0.0}
    assert w.spent() == {"closer": 3 / 6, "elsewhere": 1 / 6, "brace": 2 / 6, "look": 0.0, "invalid": 0.0}
    assert w.endings() == {"success": 0.5, "failure": 0.5, "budget": 0.0, "context": 0.0}
    w.ends = ["budget"] * 20
    assert np.isnan(w.lengths()["closer"]), "no success, no length"
    assert met({"base": {100: w}}) == ["closer", "elsewhere", "brace"]
    hasty = Watched(4, "brace", ["base"], [0], [0], ["failure"], [2], [["elsewhere"]])
    assert met({"base": {100: hasty}}) == ["elsewhere", "brace"], "never to brace is an answer too"
    w.task = [0] * 20
    assert np.isnan(w.share("brace", 4)[1:]).all(), "one task is too few for an interval"


def test_the_picture_of_policies_of_which_one_never_arrives(tmp_path):
    lost = watched()
    lost.ends = ["budget"] * 20
    results = {label: dict.fromkeys((25, 50, 100), w) for label, w in (("base", lost), ("GRPO", watched()))}
    plot_mechanism(tmp_path / "mechanism.png", results)
    assert (tmp_path / "mechanism.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def run(base, tmp_path):
    args = grpo.Args(env="frozenlake-brace", model=str(base), out=tmp_path, steps=1, tasks_per_step=2, group_size=4,
                     train_tasks=20, env_args=("max_turns=8",), lora_rank=4)  # fmt: skip
    return grpo.train(args, tmp_path / "full")


def test_the_command_on_a_real_run(run, tmp_path, command, monkeypatch, capsys):
    words = ("mechanism", "base", run, "--env", "frozenlake-brace", "--out", tmp_path, "--eval-tasks", 10)
    assert command(analysis, *words, "--trajectories", 2) == 0
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if line.startswith("| T=")]
    assert [row.split(":")[0] for row in rows] == [
        f"| T={t} ({p}%)" for t, p in ((2, 25), (4, 50), (8, 100)) for _ in range(2)
    ]
    for row in rows:  # endings are shares of all trajectories
        assert sum(float(cell.strip(" %")) for cell in row.split("|")[-4:-1]) == pytest.approx(100, abs=0.2)
    assert (tmp_path / "analysis" / "mechanism.png").read_bytes().startswith(b"\x89PNG")
    assert command(analysis, *words, "--trajectories", 0) == 2
    assert "trajectories must be at least 1" in capsys.readouterr().err
    assert command(analysis, "mechanism", "base", "--env", "frozenlake-brace", "--out", tmp_path) == 2
    assert "name at least one trained run" in capsys.readouterr().err
    # An environment without maps has no such picture, and a report says so.
    monkeypatch.setattr("mechanism.FrozenLake", int)
    assert command(analysis, *words) == 2
    assert "the mechanism is read off FrozenLake's maps, FrozenLake-Brace has none" in capsys.readouterr().err
