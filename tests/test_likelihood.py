"""Likelihoods against plain forward passes, and the matching of trajectories by hand."""

from functools import partial

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import envs
from chat import Sampling
from envs import Task
from likelihood import (
    Likelihoods,
    Scored,
    action_nll,
    at_progress,
    length_matched,
    llr_cells,
    llr_gap,
    matched_llr,
    plausible,
    score,
    score_trajectories,
)
from rollout import Trajectory, Turn, play

lake = partial(envs.make, "frozenlake", max_turns=6)


@pytest.fixture
def moved(policy):
    """A policy whose adapter says something else than its base."""
    model, tokenizer = policy
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model, tokenizer


@pytest.fixture
def played(engine):
    games = [(task, seed, 6) for seed, task in enumerate(lake().tasks("train", 8, 0))]
    return play(engine, lake, games, Sampling(max_tokens=8), seed=0, history=2)


def by_hand(model, turn: Turn) -> list[float]:
    """Token log-probs of one response by a plain forward pass over prompt and response."""
    logits = model(torch.tensor([turn.prompt_ids + turn.response_ids])).logits[0].double()
    logp = logits[len(turn.prompt_ids) - 1 : -1].log_softmax(-1)
    return logp.gather(1, torch.tensor(turn.response_ids)[:, None]).squeeze(1).tolist()


def test_per_turn_log_probs_equal_a_full_forward_pass_on_three_turns(engine, played):
    trajectory = next(t for t in played if len(t.turns) >= 3)
    three = trajectory.turns[:3]
    assert len({len(t.prompt_ids) for t in three}) > 1, "padding must be at work"
    for turn, row in zip(three, score(engine.policy, three, engine.pad), strict=True):
        assert row.tolist() == pytest.approx(by_hand(engine.policy, turn), abs=2e-5)
        # Sampled at temperature 1 and top-p 1, so the sampler's own log-probs are the same numbers.
        assert row.tolist() == pytest.approx(list(turn.logprobs), abs=2e-5)
    again = score(engine.policy, three * 5, engine.pad, batch=2)
    assert [len(row) for row in again] == [len(t.response_ids) for t in three] * 5


def test_a_model_against_itself_has_llr_zero(engine, played):
    # A fresh adapter changes nothing: with it on and off the policy is the same model.
    for scored in score_trajectories(engine.policy, played, engine.pad):
        assert np.abs(scored.llr).max() < 1e-5 and len(scored.llr) == len(scored.trajectory.turns)


def test_the_llr_of_an_adapter_is_the_difference_of_two_independent_scorings(moved, played, base, tmp_path):
    policy, tokenizer = moved
    policy.save_pretrained(tmp_path / "adapter")
    alone = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    trained = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    trained = PeftModel.from_pretrained(trained, tmp_path / "adapter").eval()
    for scored in score_trajectories(policy, played, tokenizer.pad_token_id):
        ratio = [sum(by_hand(trained, t)) - sum(by_hand(alone, t)) for t in scored.trajectory.turns]
        assert scored.llr.tolist() == pytest.approx(np.cumsum(ratio).tolist(), abs=2e-4)
        assert scored.tokens == sum(len(t.response_ids) for t in scored.trajectory.turns)
        with_action = [t for t in scored.trajectory.turns if t.action_span]
        expected = [-sum(by_hand(alone, t)[t.action_span[0] : t.action_span[1]]) for t in with_action]
        assert scored.nll.tolist() == pytest.approx(expected, abs=2e-4)


def test_the_nll_counts_action_tokens_only():
    turn = Turn((1,), (2, 3, 4, 5), (0.0,) * 4, "", "", "up", (1, 3), True, 0.0, None, 1)
    assert action_nll(turn, np.array([-0.1, -0.2, -0.4, -0.8])) == pytest.approx(0.6)


def test_progress_by_hand():
    llr = np.array([1.0, 2.0, 4.0, 8.0])
    assert at_progress(llr, 2).tolist() == [2.0, 8.0]
    assert at_progress(llr, 8).tolist() == [1, 1, 2, 2, 4, 4, 8, 8]
    assert at_progress(np.array([3.0]), 4).tolist() == [3.0] * 4


def scored(task: str, tokens: int, llr: float = 0.0, success: bool = True, nll=()) -> Scored:
    trajectory = Trajectory(Task(task, "test", None), 0, 9, success=success)
    return Scored(trajectory, np.array([llr]), np.array(nll), np.ones(len(nll)), tokens)


def test_matching_by_length_by_hand():
    base = [scored("a", n) for n in (10, 20, 21, 50)] + [scored("b", 7)]
    trained = [scored("a", n) for n in (11, 18, 23, 56)] + [scored("c", 7)]
    # 10 and 11 differ by 1 of 11: within 10 %. 20 and 18: 2 of 20. 21 and 23: 2 of 23. 50 and 56: 6 of 56 is more.
    pairs = length_matched(base, trained)
    assert [(a.tokens, b.tokens) for a, b in pairs] == [(10, 11), (20, 18), (21, 23)]
    assert length_matched(base[:1], [scored("a", 10), scored("a", 10)])[0][0] is base[0], "each in one pair at most"
    assert len(length_matched([scored("a", 10)] * 1, [scored("a", 10)] * 2)) == 1


def test_as_many_pairs_as_can_be():
    rng = np.random.default_rng(0)
    for _ in range(200):
        ours, theirs = ([int(x) for x in rng.integers(5, 40, size=5)] for _ in range(2))

        def most(a, b):  # by trying everything
            if not a:
                return 0
            fits = [i for i, x in enumerate(b) if abs(a[0] - x) <= 0.1 * max(a[0], x)]
            return max([most(a[1:], b), *(1 + most(a[1:], b[:i] + b[i + 1 :]) for i in fits)])

        assert len(length_matched([scored("a", n) for n in ours], [scored("a", n) for n in theirs])) == most(
            ours, theirs
        )


def test_summaries_by_hand():
    result = Likelihoods(
        [[scored("a", 10, -1.0), scored("a", 10, -3.0), scored("b", 4, 9.0, success=False)]],
        [[scored("a", 10, 5.0), scored("b", 4, 7.0), scored("c", 4, 100.0, success=False)]],
        ["base"],
    )
    assert llr_cells(result.trained, result.bases, lambda s: s.llr[-1])[0] == 6.0, "failures are left out"
    assert llr_gap(result)[0] == 7.0, "only task a was solved by both: 5 - (-1 - 3) / 2"
    (mean, low, high), pairs = matched_llr(result)
    assert pairs == 1 and mean in (6.0, 8.0) and np.isnan([low, high]).all(), "one pair has no interval"
    nothing = Likelihoods([[scored("a", 1, success=False)]], [[scored("a", 1)]], ["base"])
    assert np.isnan(matched_llr(nothing)[0]).all() and np.isnan(llr_gap(nothing)).all()


def test_plausible_actions_by_hand():
    base = [scored("a", 1, nll=np.linspace(0, 1, 1001))]  # its 95th percentile is 0.95
    trained = [scored("a", 1, nll=[0.01, 0.03, 0.5, 0.94]), scored("b", 1, nll=[0.96, 2.0, 0.9, -3.0])]
    assert plausible(Likelihoods([base], [trained], ["base"]))[0] == 6 / 8, "less surprising is no objection"
    assert np.isnan(plausible(Likelihoods([[scored("a", 1)]], [trained], ["base"]))).all(), "a base without any action"
