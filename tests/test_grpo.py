"""GRPO by hand: the maths on numbers one can check on paper, the update against a plain forward pass, and exact resuming."""

import itertools
import math
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch
from conftest import move
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

import envs
import grpo
from chat import Sampling
from engine import Sample, add_adapter, load_model, micro_batches, response_logprobs
from envs import UsageError
from grpo import GroupCredit, clipped_loss, full_budget, group_advantages, k3_kl, update
from rollout import Trajectory, Turn, play

# ---- group advantages ----


def test_group_advantages_by_hand():
    # mean 1/4, unbiased std sqrt((9/16 + 3/16) / 3) = 1/2
    assert group_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_equal_rewards_give_exactly_zero_whatever_the_float_residue_says():
    assert sum([0.35] * 6) / 6 != 0.35, "the trap: the float mean of equal numbers is another number"
    for rewards in ([0.35] * 6, [0.0] * 16, [1.0] * 16, [0.1] * 3, [7.7]):
        assert group_advantages(rewards) == [0.0] * len(rewards)


def test_a_floor_for_the_deviation_keeps_near_equal_failures_small():
    assert group_advantages([-1.0, -0.9], min_std=0.25) == pytest.approx([-0.2, 0.2], rel=1e-4)
    assert max(map(abs, group_advantages([-1.0, -0.9]))) > 0.7, "without the floor they are blown up"


def test_statistics_are_over_trajectories_not_over_turns():
    def trajectory(reward, length):
        turn = Turn((1,), (2,), (-0.1,), "", "", None, None, False, 0.0, 0, 1)
        return Trajectory(None, 0, 9, [turn] * length, reward=reward)

    # One long failure and three short successes: mean over trajectories is 3/4; over turns it would be 3/12.
    credit = GroupCredit(grpo.Args(), "", 0)
    advantages = credit.turn_advantages([trajectory(0.0, 9), *(trajectory(1.0, 1) for _ in range(3))])
    assert [len(a) for a in advantages] == [9, 1, 1, 1]
    assert advantages[0] == pytest.approx([-1.5] * 9, rel=1e-5)
    assert advantages[1] == pytest.approx([0.5], rel=1e-5)


# ---- k3 ----


def test_k3_value_by_hand_and_never_negative():
    logp, ref = torch.tensor([0.0, -1.0, -2.0]), torch.tensor([math.log(2), -1.0, -3.0])
    expected = [2 - math.log(2) - 1, 0.0, math.exp(-1) + 1 - 1]
    assert k3_kl(logp, ref).tolist() == pytest.approx(expected, abs=1e-6)


def test_k3_punishes_distance_in_both_directions():
    logp = torch.tensor([-1.0, -3.0], requires_grad=True)  # above and below the reference
    k3_kl(logp, torch.tensor([-2.0, -2.0])).sum().backward()
    # d/dlogp (exp(ref - logp) - (ref - logp) - 1) = 1 - exp(ref - logp); gradient *descent* moves towards the reference.
    assert logp.grad.tolist() == pytest.approx([1 - math.exp(-1), 1 - math.exp(1)], abs=1e-6)


def test_k3_clamps():
    logp = torch.tensor([-30.0, 30.0], requires_grad=True)
    value = k3_kl(logp, torch.tensor([0.0, 0.0]))
    assert value.tolist() == [10.0, 10.0]  # exp(20) - 21 and exp(-20) + 19, both above 10
    value.sum().backward()
    assert logp.grad.tolist() == [0.0, 0.0]


def test_k3_estimates_the_kl_of_two_known_distributions():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    exact = (p * (p / q).log()).sum()
    assert (p * k3_kl(p.log(), q.log())).sum().item() == pytest.approx(exact.item(), abs=1e-6)


# ---- the clipped loss ----


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        (1.5, 2.0, -1.2 * 2.0, 0.0),  # a good action already made likelier: no further reward
        (0.5, 2.0, -0.5 * 2.0, -0.5 * 2.0),  # a good action made less likely: corrected
        (0.5, -2.0, 0.8 * 2.0, 0.0),  # a bad action already made less likely: no further reward
        (1.5, -2.0, 1.5 * 2.0, 1.5 * 2.0),  # a bad action made likelier: corrected
        (1.0, 2.0, -2.0, -2.0),  # on policy: the policy gradient, - A * d ratio
    ],
)
def test_clipped_loss_in_its_regimes(ratio, advantage, loss, gradient):
    logp = torch.tensor([math.log(ratio)], requires_grad=True)
    value = clipped_loss(logp, torch.zeros(1), torch.tensor([advantage]))
    value.sum().backward()
    assert value.item() == pytest.approx(loss, rel=1e-6)
    assert logp.grad.item() == pytest.approx(gradient, rel=1e-6)


# ---- the update on real trajectories ----


@pytest.fixture
def batch(engine):
    """Real turns of two groups with random advantages, and the arguments of an update that neither clips nor moves."""
    env = partial(envs.make, "frozenlake")
    tasks = env().tasks("train", 2, 0)
    games = [(task, 0, 5) for task in tasks for _ in range(8)]
    turns = [turn for t in play(engine, env, games, Sampling(max_tokens=8), seed=1) for turn in t.turns]
    # Every other answer is cut or stretched to 1, 3 or 5 tokens: a mask that is off shows only on uneven responses.
    for i, length in zip(range(0, len(turns), 2), itertools.cycle((1, 3, 5)), strict=False):
        ids = (turns[i].response_ids * 3)[:length]
        with torch.no_grad():
            logp = engine.policy(torch.tensor([turns[i].prompt_ids + ids])).logits[0].log_softmax(-1)
        own = [logp[len(turns[i].prompt_ids) + j - 1, token].item() for j, token in enumerate(ids)]
        turns[i] = replace(turns[i], response_ids=ids, logprobs=tuple(own))
    assert {len(turn.response_ids) for turn in turns} >= {1, 2, 3, 5}
    rng = Random(0)
    return turns, [[rng.gauss(0, 1) for _ in turn.response_ids] for turn in turns], grpo.Args(grad_clip=1e9)


def gradient_of(policy, turns, advantages, pad, args):
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.0)
    health = update(policy, optimizer, turns, advantages, pad, args)
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad]), health


def test_micro_batches_do_not_change_the_gradient(engine, batch):
    turns, advantages, args = batch
    move(engine.policy)
    whole, health = gradient_of(engine.policy, turns, advantages, engine.pad, replace(args, micro_batch=10_000))
    assert health["kl"] > 0 and health["distinct_share"] < 1, "the batch must hold repeats and distance to be a test"
    for micro_batch in (1, 2, 7):
        part, again = gradient_of(engine.policy, turns, advantages, engine.pad, replace(args, micro_batch=micro_batch))
        assert torch.allclose(whole, part, atol=1e-5 * whole.abs().max().item())
        assert again["loss"] == pytest.approx(health["loss"], abs=1e-5)
    part, _ = gradient_of(engine.policy, turns, advantages, engine.pad, replace(args, micro_tokens=150))
    assert torch.allclose(whole, part, atol=1e-5 * whole.abs().max().item())


def test_micro_batches_hold_no_more_rows_and_tokens_than_allowed(batch):
    turns, _, _ = batch
    longest = max(len(t.prompt_ids) + len(t.response_ids) for t in turns)
    for rows, tokens in ((4, 10_000), (64, 3 * longest), (64, longest), (64, 1)):
        batches = micro_batches(turns, rows, tokens)
        assert sorted(i for _, members, _ in batches for i in members) == list(range(len(turns))), "each turn once"
        for samples, members, row_of in batches:
            padded = len(samples) * max(len(s.prompt) + len(s.response) for s in samples)
            assert len(samples) <= rows and (padded <= tokens or len(samples) == 1)
            for i, row in zip(members, row_of, strict=True):
                assert samples[row] == (turns[i].prompt_ids, turns[i].response_ids, None)
    assert all(len(samples) == 1 for samples, _, _ in micro_batches(turns, 64, 1)), "one is always taken"


def test_gradient_checkpointing_changes_no_gradient(engine, batch):
    turns, advantages, args = batch
    move(engine.policy)
    plain, health = gradient_of(engine.policy, turns, advantages, engine.pad, args)
    engine.policy.gradient_checkpointing_enable({"use_reentrant": False})
    computed = []  # forward passes of the first layer: with checkpoints each is done again in the backward pass
    engine.policy.base_model.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: computed.append(1))
    args = replace(args, gradient_checkpointing=True)
    again, same = gradient_of(engine.policy, turns, advantages, engine.pad, args)
    assert torch.allclose(plain, again, atol=1e-6 * plain.abs().max().item()) and same["loss"] == health["loss"]
    reference_and_policy_and_again = 3 * len(micro_batches(turns, args.micro_batch, args.micro_tokens))
    assert len(computed) == reference_and_policy_and_again and not engine.policy.training


def test_truncated_importance_weights_by_hand(engine, batch):
    """Where the sampler gave a token a third less probability than the trainer does, it counts 1.5 times; where a
    quarter of it, 4 times, cut off at the cap of 2; where twice as much, half."""
    turns, _, args = batch
    turn = next(t for t in turns if len(t.response_ids) == 1)
    move(engine.policy)
    args = replace(args, kl_coef=0.0)

    def gradient(factor, is_cap):
        """With the trainer's probability `factor` times that of the sampler."""
        shifted = replace(turn, logprobs=(exact - math.log(factor),))
        optimizer = torch.optim.SGD([p for p in engine.policy.parameters() if p.requires_grad], lr=0.0)
        health = update(engine.policy, optimizer, [shifted], [[1.0]], engine.pad, args, is_cap)
        return torch.cat([p.grad.flatten() for p in engine.policy.parameters() if p.requires_grad]), health

    with torch.no_grad():
        exact = response_logprobs(engine.policy, [Sample(turn.prompt_ids, turn.response_ids)], engine.pad)[0, -1].item()
    plain, _ = gradient(1.0, 0.0)
    assert plain.abs().max() > 0
    for factor, weight, truncated in ((1.5, 1.5, 0.0), (4.0, 2.0, 1.0), (0.5, 0.5, 0.0), (1.0, 1.0, 0.0)):
        weighted, health = gradient(factor, 2.0)
        assert torch.allclose(weighted, weight * plain, atol=1e-5 * plain.abs().max().item())
        assert health["truncated"] == truncated and health["loss"] == pytest.approx(-weight)
        assert health["mismatch"] == pytest.approx(abs(math.log(factor)), abs=1e-5)
    # Without weights the ratio is taken for a change of the policy, and from 1.2 on there is no gradient at all.
    clipped, health = gradient(1.5, 0.0)
    assert clipped.abs().max() == 0 and "truncated" not in health


def plain_gradient(policy, turns, advantages, args, keep=lambda j, length: True):
    """The loss written out turn by turn: no padding, no sharing, all logits of a full forward pass."""
    policy.zero_grad()
    total = sum(len(t.response_ids) for t in turns)
    for turn, own in zip(turns, advantages, strict=True):
        ids = torch.tensor([turn.prompt_ids + turn.response_ids])
        logp = policy(ids).logits.log_softmax(-1)[0]
        with torch.no_grad(), policy.disable_adapter():
            ref = policy(ids).logits.log_softmax(-1)[0]
        loss = 0.0
        for j, (token, advantage) in enumerate(zip(turn.response_ids, own, strict=True)):
            at = len(turn.prompt_ids) + j - 1  # the position whose logits predict response token j
            if keep(j, len(turn.response_ids)):
                ratio = (logp[at, token] - turn.logprobs[j]).exp()
                surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                d = ref[at, token] - logp[at, token]
                loss = loss - surrogate + args.kl_coef * (d.exp() - d - 1)
        (loss / total).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad])


def test_the_loss_covers_exactly_the_sampled_tokens_of_a_real_two_turn_trajectory(engine):
    env = partial(envs.make, "frozenlake")
    task = env().tasks("train", 1, 0)[0]
    move(engine.policy, scale=0.2)  # far enough that ending the turn is no longer a certainty, with a gradient of zero
    played = play(engine, env, [(task, 0, 2)] * 100, Sampling(max_tokens=8), seed=2)
    two = next(t for t in played if len(t.turns) == 2 and all(turn.valid for turn in t.turns))
    end = engine.codec.tokenizer.eos_token_id
    for turn in two.turns:
        assert turn.response_ids[-1] == end, "the end-of-turn token that the model sampled is part of the response"
        assert turn.response_ids.count(end) == 1 and len(turn.response_ids) == len(turn.logprobs)
        assert end in turn.prompt_ids, "the template's end-of-turn tokens are in the prompt, and carry no loss"
    args = grpo.Args(grad_clip=1e9, kl_coef=0.1)
    credit = [[1.0] * len(two.turns[0].response_ids), [-0.5] * len(two.turns[1].response_ids)]
    ours, _ = gradient_of(engine.policy, two.turns, credit, engine.pad, args)
    ours = ours.clone()
    by_hand = plain_gradient(engine.policy, two.turns, credit, args)
    assert torch.allclose(ours, by_hand, atol=1e-5 * by_hand.abs().max().item())
    without_end = plain_gradient(engine.policy, two.turns, credit, args, keep=lambda j, n: j < n - 1)
    assert not torch.allclose(ours, without_end, atol=1e-3 * by_hand.abs().max().item())


def test_sharing_equal_samples_is_exact(engine, batch):
    turns, advantages, args = batch
    move(engine.policy)
    ours, health = gradient_of(engine.policy, turns, advantages, engine.pad, args)
    ours = ours.clone()
    assert health["distinct_share"] < 1
    by_hand = plain_gradient(engine.policy, turns, advantages, args)
    assert torch.allclose(ours, by_hand, atol=1e-5 * by_hand.abs().max().item())


def test_each_distinct_sample_is_computed_once(engine, batch, monkeypatch):
    turns, advantages, args = batch
    rows = []
    plain = grpo.response_logprobs
    monkeypatch.setattr(grpo, "response_logprobs", lambda m, pairs, pad: rows.append(pairs) or plain(m, pairs, pad))
    gradient_of(engine.policy, turns, advantages, engine.pad, args)
    distinct = {(t.prompt_ids, t.response_ids) for t in turns}
    assert sum(map(len, rows)) == 2 * len(distinct) < 2 * len(turns)  # once for the policy, once for the reference


def test_on_policy_nothing_is_clipped_and_sampler_and_trainer_agree(engine, batch):
    turns, advantages, args = batch
    _, health = gradient_of(engine.policy, turns, advantages, engine.pad, args)
    assert (
        health["mismatch"] < 1e-5
        and health["approx_kl"] < 1e-6
        and health["clip_fraction"] == 0.0
        and health["kl"] == pytest.approx(0.0, abs=1e-6)
    )


def test_a_good_action_becomes_likelier_and_a_bad_one_less_likely(engine):
    env = partial(envs.make, "frozenlake")
    task = env().tasks("train", 1, 0)[0]
    turns = [t.turns[0] for t in play(engine, env, [(task, 0, 1)] * 40, Sampling(max_tokens=8), seed=0)]
    good = next(t for t in turns if t.valid)
    bad = next(t for t in turns if t.valid and t.action != good.action)
    optimizer = torch.optim.AdamW([p for p in engine.policy.parameters() if p.requires_grad], lr=1e-2)
    pairs = [Sample(t.prompt_ids, t.response_ids) for t in (good, bad)]
    before = grpo.response_logprobs(engine.policy, pairs, engine.pad).sum(1)
    credit = [[1.0] * len(good.response_ids), [-1.0] * len(bad.response_ids)]
    update(engine.policy, optimizer, [good, bad], credit, engine.pad, grpo.Args())
    after = grpo.response_logprobs(engine.policy, pairs, engine.pad).sum(1)
    assert after[0] > before[0] and after[1] < before[1]


def test_a_gradient_that_is_not_finite_stops_before_the_step(engine, batch):
    turns, _, args = batch
    weights = [p for p in engine.policy.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in weights]
    with pytest.raises(UsageError, match="not finite"):
        update(
            engine.policy,
            torch.optim.AdamW(weights),
            turns,
            [[math.nan] * len(t.response_ids) for t in turns],
            engine.pad,
            args,
        )
    assert all(torch.equal(b, p) for b, p in zip(before, weights, strict=True))


# ---- the loop ----


def arguments(base, tmp_path, **changes):
    return replace(
        grpo.Args(model=str(base), out=tmp_path, steps=4, tasks_per_step=2, group_size=4, train_tasks=20, lora_rank=4,
                  lora_alpha=8, env_args=("max_turns=6",)), **changes,
    )  # fmt: skip


def test_another_budget_distribution_changes_no_task_and_no_seed(base, tmp_path, engine):
    args = arguments(base, tmp_path)
    tasks = envs.make("frozenlake").tasks("train", 20, 0)
    full = grpo.play_groups(args, engine, tasks, full_budget, step=3)
    short = grpo.play_groups(args, engine, tasks, lambda t_max, rng: rng.randint(1, 3), step=3)
    assert [(t.task, t.seed) for g in full for t in g] == [(t.task, t.seed) for g in short for t in g]
    assert {t.budget for g in full for t in g} == {6} and {t.budget for g in short for t in g} <= {1, 2, 3}
    for group in full:
        assert len({t.task.id for t in group}) == 1 and len({t.seed for t in group}) == len(group) == 4


@pytest.mark.parametrize("change", [{"hidden_size": 48}, {"num_hidden_layers": 3}])
def test_an_adapter_of_another_model_is_refused(change, base, tmp_path, engine):
    config = Qwen3Config(**{**AutoConfig.from_pretrained(base).to_dict(), "layer_types": None, **change})
    other_base = tmp_path / "base"
    AutoModelForCausalLM.from_config(config).save_pretrained(other_base)
    engine.codec.tokenizer.save_pretrained(other_base)
    other = add_adapter(load_model(other_base)[0], rank=2, alpha=4, seed=0)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(UsageError, match="belongs to another model") as error:
        engine.load_adapter(tmp_path / "other")
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="no usable adapter"):
        engine.load_adapter(tmp_path / "nowhere")
