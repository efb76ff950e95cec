"""PPO by hand: GAE over a three-turn trajectory, the clipped value loss in its regimes, and the critic on real turns."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import envs
import grpo
import ppo
from chat import Sampling
from engine import Sample
from envs import UsageError
from ppo import CriticCredit, gae, load_critic, response_values, token_rewards, value_loss, whiten
from rollout import Trajectory, Turn, play


def turn(tokens, reward, process_reward=None):
    made = Turn((1,), (2,) * tokens, (-0.1,) * tokens, "", "", "a", (0, 1), True, reward, 0, 1)
    return replace(made, process_reward=process_reward)


def test_gae_over_a_three_turn_trajectory_by_hand():
    # Turns of 2, 1 and 2 response tokens; the outcome sits on the very last one. gamma 0.9, lambda 0.8, product 0.72.
    rewards = token_rewards(Trajectory(None, 0, 3, [turn(2, 0.0), turn(1, 0.0), turn(2, 1.0)], reward=1.0))
    assert rewards == [0.0, 0.0, 0.0, 0.0, 1.0]
    values = [0.1, 0.2, 0.3, 0.4, 0.5]
    advantages, returns = gae(rewards, values, gamma=0.9, lam=0.8)
    a5 = 1.0 + 0.9 * 0.0 - 0.5  # the value after the end is zero
    a4 = 0.9 * 0.5 - 0.4 + 0.72 * a5  # 0.05 + 0.36
    a3 = 0.9 * 0.4 - 0.3 + 0.72 * a4  # across the border of two turns like anywhere else
    a2 = 0.9 * 0.3 - 0.2 + 0.72 * a3
    a1 = 0.9 * 0.2 - 0.1 + 0.72 * a2
    assert advantages == pytest.approx([a1, a2, a3, a4, a5])
    assert advantages == pytest.approx([0.31453568, 0.325744, 0.3552, 0.41, 0.5])
    assert returns == pytest.approx([a + v for a, v in zip(advantages, values, strict=True)])


def test_gae_at_the_ends_of_lambda():
    rewards, values = [0.0, 0.0, 1.0], [0.2, 0.5, 0.4]
    assert gae(rewards, values, 1.0, 0.0)[0] == pytest.approx([0.3, -0.1, 0.6])  # one-step surprises
    assert gae(rewards, values, 1.0, 1.0)[0] == pytest.approx([0.8, 0.5, 0.6])  # outcome minus value
    assert gae(rewards, values, 1.0, 1.0)[1] == pytest.approx([1.0, 1.0, 1.0])
    assert gae([], [], 1.0, 1.0) == ([], [])


def test_step_rewards_sit_on_the_last_token_of_their_own_turn():
    played = Trajectory(None, 0, 3, [turn(3, 0.0, 0.5), turn(1, 0.0, None), turn(2, 1.0, 0.25)], reward=1.0)
    # The turn without a score gets the mean of the others, 0.375.
    assert token_rewards(played, process_weight=2.0) == [0.0, 0.0, 1.0, 0.75, 0.0, 1.5]
    assert token_rewards(played) == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "value, loss, gradient",
    [
        (0.3, 0.5 * 0.7**2, -0.7),  # inside the clip: the plain squared error
        (0.8, 0.5 * 0.5**2, 0.0),  # past the clip towards the return: judged as if at 0.5, nothing more to gain
        (-0.8, 0.5 * 1.8**2, -1.8),  # past the clip the wrong way: punished in full
        (1.8, 0.5 * 0.8**2, 0.8),  # past the return as well: worse than the clipped value, corrected
    ],
)
def test_value_loss_in_its_regimes(value, loss, gradient):
    values = torch.tensor([value], requires_grad=True)
    out = value_loss(values, torch.zeros(1), torch.ones(1), clip=0.5)
    out.sum().backward()
    assert out.item() == pytest.approx(loss, rel=1e-5)
    assert values.grad.item() == pytest.approx(gradient, rel=1e-5, abs=1e-7)


def test_whitening_by_hand():
    # 1, 2, 3, 6: mean 3, unbiased variance (4 + 1 + 0 + 9) / 3.
    std = (14 / 3) ** 0.5
    (first, second) = whiten([[1.0, 2.0], [3.0, 6.0]])
    assert first + second == pytest.approx([-2 / std, -1 / std, 0.0, 3 / std])
    assert whiten([[0.35] * 5, [0.35]]) == [[0.0] * 5, [0.0]] and whiten([[4.2]]) == [[0.0]]


# ---- the critic on real trajectories ----


@pytest.fixture
def groups(engine):
    maps = [("SFG", "FFF", "HHH"), ("FFH", "SGH", "FFF"), ("HFH", "GFS", "FFF")]
    games = [(envs.Task(str(rows), "test", rows), seed, 5) for rows in maps for seed in range(8)]
    played = play(engine, partial(envs.make, "frozenlake", size=3), games, Sampling(max_tokens=8), seed=1)
    assert {t.stop for t in played} == {"success", "budget", "failure"}
    return [played[i : i + 8] for i in range(0, 24, 8)]


def arguments(**changes):
    return replace(ppo.Args(lora_rank=4, lora_alpha=8), **changes)


def turns_of(groups):
    return [turn for group in groups for t in group for turn in t.turns]


def uneven(group):
    """The same trajectories with responses of 1, 3 and 5 tokens: a mask or a slice that is off shows only on those."""
    lengths = itertools.cycle((1, 3, 5))
    return [replace(t, turns=[stretch(turn, next(lengths)) for turn in t.turns]) for t in group]


def stretch(turn, length):
    ids = (turn.response_ids * 3)[:length]
    return replace(turn, response_ids=ids, logprobs=(-1.0,) * length)


def test_each_turn_gets_back_its_own_tokens_advantages(base, engine, groups):
    """Through the critic and back: values per turn are joined, GAE runs over the trajectory, its result is cut again."""
    groups = [uneven(group) for group in groups]
    credit = CriticCredit(arguments(gamma=0.9, lam=0.8), base, engine.pad)
    nudge(credit.critic)
    ours, _ = credit.assign(groups)
    expected, expected_returns, values = [], [], []
    for trajectory in (t for group in groups for t in group):
        flat = []
        for turn in trajectory.turns:
            every = credit.critic(torch.tensor([turn.prompt_ids + turn.response_ids])).logits[0, :, 0].tolist()
            flat.append(every[len(turn.prompt_ids) - 1 : -1])
        values += flat
        rewards = [r for turn in trajectory.turns for r in [0.0] * (len(turn.response_ids) - 1) + [turn.reward]]
        advantages, returns = gae(rewards, [v for row in flat for v in row], 0.9, 0.8)
        for row in flat:
            expected.append([advantages.pop(0) for _ in row])
            expected_returns.append([returns.pop(0) for _ in row])
    close = lambda rows: [pytest.approx(row, abs=1e-4) for row in rows]  # noqa: E731
    assert credit.old_values == close(values)
    assert credit.returns == close(expected_returns)
    assert ours == close(whiten(expected))


def nudge(critic):
    generator = torch.Generator().manual_seed(3)
    for p in critic.parameters():
        if p.requires_grad:
            p.data += 0.1 * torch.randn(p.shape, generator=generator)


def test_values_are_those_of_the_moment_before_each_token(base, engine, groups):
    critic = load_critic(base, 4, 8, 0)
    nudge(critic)
    pairs = [Sample(t.prompt_ids, t.response_ids) for t in turns_of(groups)][:8]
    ours = response_values(critic, pairs, engine.pad)
    for row, (prompt, response, _) in zip(ours, pairs, strict=True):
        every = critic(torch.tensor([prompt + response])).logits[0, :, 0]
        plain = every[len(prompt) - 1 : len(prompt) + len(response) - 1]
        assert torch.allclose(row[-len(response) :], plain, atol=1e-5)


def test_the_critic_starts_from_the_actors_base_and_expects_nothing(base, engine, groups):
    critic = load_critic(base, 4, 8, 0)
    assert response_values(critic, [Sample(turns_of(groups)[0].prompt_ids, (2,))], engine.pad).abs().max() == 0
    theirs = dict(engine.policy.named_parameters())
    shared = [(n, p) for n, p in critic.named_parameters() if n in theirs and "lora" not in n]
    assert len(shared) > 10 and all(torch.equal(p, theirs[n]) for n, p in shared)
    trained = {n for n, p in critic.named_parameters() if p.requires_grad}
    assert all("lora" in n or "score" in n for n in trained) and any("score" in n for n in trained)


def test_with_gamma_and_lambda_1_every_token_should_have_been_worth_the_outcome(base, engine, groups):
    """Also for trajectories that ran out of turns: they bootstrap zero, not the critic's opinion of the next state."""
    credit = CriticCredit(arguments(), base, engine.pad)
    nudge(credit.critic)
    credit.assign(groups)
    rows = iter(credit.returns)
    for trajectory in (t for group in groups for t in group):
        for _ in trajectory.turns:
            assert next(rows) == pytest.approx([trajectory.reward] * 2, abs=1e-5)


def test_the_critic_learns_what_the_prompt_tells(base, engine, groups):
    """Returns that the turn counter in the prompt decides: a critic that reads the budget can foresee them all."""
    credit = CriticCredit(arguments(critic_lr=1e-2), base, engine.pad)
    credit.assign(groups)
    credit.returns = [[turn.turns_left / 5] * len(turn.response_ids) for turn in credit.turns]
    losses = []
    for _ in range(120):
        losses.append(credit.learn()["value_loss"])
        credit.old_values = credit.values(credit.turns)  # as after a new batch: the clip moves along
    # Predicting the mean of all turns would leave 0.16 of the first loss; only reading the counter gets below.
    assert losses[-1] < 0.1 * losses[0]


def test_micro_batches_do_not_change_the_critics_gradient(base, engine, groups):
    def gradient(micro_batch):
        credit = CriticCredit(arguments(micro_batch=micro_batch, grad_clip=1e9, critic_lr=1e-12), base, engine.pad)
        nudge(credit.critic)
        credit.assign(groups)
        credit.turns = turns_of([uneven(group) for group in groups])
        # Beyond the clip of 0.5 on either side: on one the loss is flat, on the other it is not.
        off = [0.7 * (-1) ** i for i in range(len(credit.turns))]
        credit.old_values = [[v + o for v in row] for row, o in zip(credit.values(credit.turns), off, strict=True)]
        credit.returns = [[1.0 - 0.1 * j for j in range(len(turn.response_ids))] for turn in credit.turns]
        assert credit.learn()["value_clip_fraction"] > 0.5
        return torch.cat([p.grad.flatten() for p in credit.critic.parameters() if p.requires_grad])

    whole = gradient(10_000)
    assert whole.abs().max() > 0
    for micro_batch in (1, 2, 7):
        assert torch.allclose(whole, gradient(micro_batch), atol=1e-5 * whole.abs().max().item())


def test_micro_batches_do_not_change_the_actors_gradient(base, engine, groups):
    turns = turns_of(groups)
    advantages, _ = CriticCredit(arguments(), base, engine.pad).assign(groups)

    def gradient(micro_batch):
        optimizer = torch.optim.SGD([p for p in engine.policy.parameters() if p.requires_grad], lr=0.0)
        grpo.update(engine.policy, optimizer, turns, advantages, engine.pad, arguments(micro_batch=micro_batch))
        return torch.cat([p.grad.flatten() for p in engine.policy.parameters() if p.requires_grad]).clone()

    whole = gradient(10_000)
    for micro_batch in (1, 2, 7):
        assert torch.allclose(whole, gradient(micro_batch), atol=1e-5 * whole.abs().max().item())


def test_the_critics_learning_rate_is_ten_times_the_actors(base):
    rate = lambda **changes: CriticCredit(arguments(**changes), base, 0).optimizer.param_groups[0]  # noqa: E731
    assert rate(lr=2e-4)["lr"] == pytest.approx(2e-3) and rate()["weight_decay"] == 0.01
    assert rate(critic_lr=5e-4)["lr"] == 5e-4


@pytest.mark.parametrize(
    "wrong", [{"gamma": -0.1}, {"lam": 1.1}, {"lam": math.nan}, {"value_clip": 0.0}, {"critic_lr": -1.0}]
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UsageError):
        CriticCredit.check(arguments(**wrong))
