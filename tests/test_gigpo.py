"""GiGPO by hand: returns, anchors with recurrences, singletons, equal returns, and repeats within one trajectory."""

from functools import partial

import pytest

import envs
import gigpo
import grpo
from chat import Sampling
from envs import UsageError
from gigpo import AnchorCredit, discounted_returns, step_advantages
from rollout import Trajectory, Turn, play


def trajectory(states, rewards, budget=3):
    turns = [
        Turn((1,), (2, 3), (-0.1, -0.1), "", "", "a", (0, 1), True, reward, state, budget - t)
        for t, (state, reward) in enumerate(zip(states, rewards, strict=True))
    ]
    return Trajectory(None, 0, budget, turns, reward=sum(rewards))


# From A one trajectory reaches the goal in two turns, one dawdles and takes three, one never does.
GROUP = [trajectory("AB", [0.0, 1.0]), trajectory("AAB", [0.0, 0.0, 1.0]), trajectory("AC", [0.0, 0.0])]


def test_discounted_returns_by_hand():
    assert discounted_returns([0.0, 0.0, 1.0], 0.95) == pytest.approx([0.9025, 0.95, 1.0])
    assert discounted_returns([1.0, 2.0, 3.0], 0.5) == pytest.approx([1 + 0.5 * (2 + 0.5 * 3), 2 + 0.5 * 3, 3.0])
    assert discounted_returns([1.0, 1.0], 0.0) == [1.0, 1.0]
    assert discounted_returns([], 0.95) == []


def test_step_advantages_by_hand():
    # All three stand in A with three turns left and earn 0.95, 0.9025 and 0 from there: mean 0.6175, and the unbiased
    # standard deviation is sqrt((0.3325^2 + 0.285^2 + 0.6175^2) / 2) = 0.535298. Every other turn is alone with its
    # (state, turns left): B is met with 2 turns left once and with 1 turn left once.
    expected = [[0.62115, 0.0], [0.53241, 0.0, 0.0], [-1.15356, 0.0]]
    for ours, by_hand in zip(step_advantages(GROUP, 0.95), expected, strict=True):
        assert ours == pytest.approx(by_hand, abs=1e-4)


def test_the_original_rule_ignores_the_clock_and_counts_a_trajectory_each_time_it_returns():
    # A is met four times, twice by the dawdler: returns 0.95, 0.9025, 0.95, 0; mean 0.700625, unbiased std 0.467583.
    # B is met twice with return 1 both times: no variance, exactly 0.
    ours = step_advantages(GROUP, 0.95, anchor="state")
    std = (((0.95 - 0.700625) ** 2 * 2 + (0.9025 - 0.700625) ** 2 + 0.700625**2) / 3) ** 0.5
    assert ours[0] == pytest.approx([(0.95 - 0.700625) / std, 0.0], abs=1e-4)
    assert ours[1] == pytest.approx([(0.9025 - 0.700625) / std, (0.95 - 0.700625) / std, 0.0], abs=1e-4)
    assert ours[2] == pytest.approx([-0.700625 / std, 0.0], abs=1e-4)
    assert ours[0][1] == 0.0 and ours[1][2] == 0.0


def test_singletons_and_equal_returns_give_exactly_zero_and_keep_the_trajectory_advantage():
    group = [trajectory("AB", [0.0, 0.0]), trajectory("AB", [0.0, 0.0]), trajectory("ZY", [0.0, 1.0])]
    assert step_advantages(group, 0.95) == [[0.0, 0.0]] * 3
    credit = AnchorCredit(gigpo.Args(), "", 0).turn_advantages(group)
    outcome = grpo.group_advantages([0.0, 0.0, 1.0])
    assert credit == [[a, a] for a in outcome]


def test_omega_weighs_the_step_part():
    steps = step_advantages(GROUP, 0.95)
    outcome = grpo.group_advantages([1.0, 1.0, 0.0])
    for omega in (0.0, 0.3, 1.0):
        credit = AnchorCredit(gigpo.Args(omega=omega), "", 0).turn_advantages(GROUP)
        for own, a, s in zip(credit, outcome, steps, strict=True):
            assert own == pytest.approx([a + omega * x for x in s])


def test_the_quicker_of_two_successes_is_preferred_where_they_met():
    (quick, *_), (slow, *_), _ = step_advantages(GROUP, 0.95)
    assert quick > slow > 0
    assert grpo.group_advantages([1.0, 1.0, 0.0])[0] == grpo.group_advantages([1.0, 1.0, 0.0])[1], (
        "GRPO cannot tell them"
    )


def test_every_token_of_a_turn_gets_the_turns_advantage_and_the_anchors_are_watched():
    advantages, watch = AnchorCredit(gigpo.Args(), "", 0).assign([GROUP])
    assert [len(a) for a in advantages] == [2] * 7 and all(a[0] == a[1] for a in advantages)
    # Seven turns; three share an anchor, four stand alone: five anchors.
    assert watch == {"shared_anchor_turns": 3 / 7, "anchor_size": 7 / 5}


def test_anchors_never_reach_across_groups():
    # The same states in two groups: assigned together each group gets what it would get alone.
    other = [trajectory("AB", [0.0, 0.0]), trajectory("AB", [0.0, 1.0])]
    credit = AnchorCredit(gigpo.Args(), "", 0)
    together, _ = credit.assign([GROUP, other])
    assert together == credit.assign([GROUP])[0] + credit.assign([other])[0]


def test_on_real_trajectories_members_meet_at_the_start(engine):
    task = envs.make("frozenlake").tasks("train", 1, 0)[0]
    games = [(task, seed, 6) for seed in range(16)]
    group = play(engine, partial(envs.make, "frozenlake"), games, Sampling(max_tokens=8), seed=0)
    assert len(gigpo.anchors(group, "state+budget")[(group[0].turns[0].state, 6)]) == 16
    for key, members in gigpo.anchors(group, "state+budget").items():
        assert {(group[i].turns[t].state, group[i].turns[t].turns_left) for i, t in members} == {key}
        assert len({i for i, _ in members}) == len(members), "with the turns left in the key no one meets itself"


@pytest.mark.parametrize(
    "wrong", [{"gamma": 1.5}, {"gamma": float("nan")}, {"omega": -1.0}, {"process_reward": "oracle"}]
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UsageError):
        AnchorCredit.check(gigpo.Args(**wrong))
