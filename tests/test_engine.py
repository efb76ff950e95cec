"""The Hugging Face engine: its sampler against a plain forward pass, the policy, and which engine is taken."""

import sys
from functools import partial

import pytest
import torch

import budgetmix
import engine as engine_module
import envs
from chat import Sampling
from engine import HFEngine, Sample, add_adapter, load_model, pad_left, response_logprobs, sample_tokens
from envs import Task, UsageError
from rollout import Episode, State
from warmstart import ModelArgs

new_lake = partial(envs.make, "frozenlake", max_turns=6)


def a_task(seed=0) -> Task:
    return new_lake().tasks("train", 1, seed)[0]


# ---- sampler ----


def test_log_probs_of_the_sampler_equal_a_fresh_forward_pass(engine):
    tasks = new_lake().tasks("train", 5, 0)
    prompts = [Episode(new_lake(), engine.codec, State(t, 0, b)).prompt() for t in tasks for b in (2, 11)] * 3
    for temperature in (1.0, 0.6):
        done = engine.generate(prompts, Sampling(temperature, 1.0, 8), seed=0)
        for prompt, completion in zip(prompts, done, strict=True):
            logits = (
                engine.policy(torch.tensor([prompt.ids + completion.ids])).logits[0, len(prompt.ids) - 1 : -1]
                / temperature
            )
            fresh = logits.log_softmax(-1).gather(1, torch.tensor(completion.ids)[:, None]).squeeze(1)
            assert fresh.tolist() == pytest.approx(list(completion.logprobs), abs=2e-5)
            assert completion.finished == (completion.ids[-1] == engine.codec.tokenizer.eos_token_id)


def test_nucleus_sampling_by_hand():
    # Probabilities .5 .3 .15 .05: top-p 0.9 keeps the first three (.5 + .3 < .9), renormalised by .95; 0.45 only the first.
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log().repeat(4000, 1)
    rng = torch.Generator().manual_seed(0)
    tokens, logp = sample_tokens(logits, Sampling(1.0, 0.9), rng)
    assert set(tokens.tolist()) == {0, 1, 3}
    assert {round(x, 4) for x in logp.exp().tolist()} == {round(p / 0.95, 4) for p in (0.5, 0.3, 0.15)}
    assert (tokens == 1).float().mean().item() == pytest.approx(0.5 / 0.95, abs=0.03)
    tokens, logp = sample_tokens(logits, Sampling(1.0, 0.45), rng)
    assert set(tokens.tolist()) == {1} and logp.abs().max() < 1e-6


def test_temperature_by_hand():
    # At temperature 1/2 probabilities are squared: .8 and .2 become .64 / .68 and .04 / .68.
    _, logp = sample_tokens(
        torch.tensor([[0.8, 0.2]]).log().repeat(300, 1), Sampling(0.5), torch.Generator().manual_seed(0)
    )
    assert {round(x, 4) for x in logp.exp().tolist()} == {round(0.64 / 0.68, 4), round(0.04 / 0.68, 4)}


def test_each_distinct_prompt_is_computed_once(engine):
    rows = []
    engine.policy.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    prompts = [Episode(new_lake(), engine.codec, State(t, 0, 6)).prompt() for t in new_lake().tasks("train", 3, 0)]
    engine.generate(prompts * 16, Sampling(max_tokens=1), seed=0)
    assert rows == [(3, max(len(p.ids) for p in prompts))]


def test_limits_on_rows_and_prompts_are_kept_and_every_request_is_answered(policy):
    small = HFEngine(*policy, rows=4, prompts=2)
    prompts = [Episode(new_lake(), small.codec, State(t, 0, 6)).prompt() for t in new_lake().tasks("train", 5, 0)]
    requests = {
        p.ids: list(range(i * 10, i * 10 + n)) for i, (p, n) in enumerate(zip(prompts, (1, 9, 2, 1, 3), strict=True))
    }
    chunks = small._chunks(requests)
    assert all(len(chunk) <= 2 and sum(len(wanted) for _, wanted in chunk) <= 4 for chunk in chunks)
    answered = {p: sorted(i for chunk in chunks for q, wanted in chunk if q == p for i in wanted) for p in requests}
    assert answered == requests
    done = small.generate([prompts[0]] * 9 + [prompts[1]] * 3, Sampling(max_tokens=8), seed=0)
    assert len(done) == 12 and all(c.ids for c in done)
    assert small.generate([], Sampling(), seed=0) == []


def test_members_that_share_a_prompt_are_still_sampled_apart(engine):
    prompt = Episode(new_lake(), engine.codec, State(a_task(), 0, 6)).prompt()
    answers = engine.generate([prompt] * 200, Sampling(max_tokens=8), seed=0)
    assert len({a.ids for a in answers}) > 3
    assert answers == engine.generate([prompt] * 200, Sampling(max_tokens=8), seed=0)
    assert answers != engine.generate([prompt] * 200, Sampling(max_tokens=8), seed=1)


def test_padding_changes_nothing(engine):
    short = Episode(new_lake(), engine.codec, State(a_task(), 0, 6)).prompt().ids
    ids, mask, positions = pad_left([(5, 6), (7, 8, 9, 10)], pad=0, device="cpu")
    assert ids.tolist() == [[0, 0, 5, 6], [7, 8, 9, 10]] and mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert positions.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    alone = response_logprobs(engine.policy, [Sample(short, (40, 41))], engine.pad)
    beside = response_logprobs(engine.policy, [Sample(short, (40, 41)), Sample(short * 2, (42, 43, 44))], engine.pad)
    assert beside.shape == (2, 3)  # right-aligned: the shorter response sits in the last two columns
    assert torch.allclose(alone[0], beside[0, 1:], atol=1e-5)


# ---- policy and command line ----


def test_a_fresh_adapter_is_the_base_model_itself(base):
    model, tokenizer = load_model(base)
    policy = add_adapter(model, rank=4, alpha=8, seed=0)
    ids = torch.tensor([tokenizer.encode("left: edge\n")])
    with torch.no_grad(), policy.disable_adapter():
        reference = policy(ids).logits
    assert torch.equal(policy(ids).logits, reference)
    again = add_adapter(load_model(base)[0], rank=4, alpha=8, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))


def test_a_saved_adapter_comes_back_the_same(base, tmp_path):
    model, tokenizer = load_model(base)
    policy = add_adapter(model, rank=4, alpha=8, seed=0)
    for p in policy.parameters():
        if p.requires_grad:
            p.data += 0.1
    policy.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([tokenizer.encode("left: edge\n")])
    other = HFEngine(*load_model(base))
    plain = other.policy(ids).logits
    for _ in range(2):  # a second load replaces the first, it does not add to it
        other.load_adapter(tmp_path / "adapter")
        assert torch.equal(policy(ids).logits, other.policy(ids).logits)
    assert not torch.allclose(plain, other.policy(ids).logits, atol=1e-3)


def test_models_that_cannot_be_used_are_named(base, tmp_path):
    with pytest.raises(UsageError, match="cannot load the model"):
        load_model(tmp_path / "nothing")
    model, tokenizer = load_model(base)
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        HFEngine(model, tokenizer)


# ---- which engine ----


@pytest.mark.parametrize(
    "settings, installed, gpu, choice, why",
    [
        ({}, True, True, "hf", "too small for vLLM to be faster"),
        ({"model": "Qwen/Qwen3-4B"}, True, True, "vllm", "there is a GPU, and vLLM is installed"),
        ({"model": "Qwen/Qwen3-4B"}, False, True, "hf", "pip install -r requirements-vllm.txt"),
        ({"model": "Qwen/Qwen3-4B"}, True, False, "hf", "there is no GPU"),
        ({"model": "Qwen/Qwen3-4B", "engine": "hf"}, True, True, "hf", "as asked for"),
        ({"engine": "vllm"}, True, False, "vllm", "as asked for"),
        ({"model": "openai:m"}, True, True, "api", "an endpoint answers"),
        ({"model": "x", "observation": "image"}, True, True, "vision", "pictures go through"),
    ],
)
def test_auto_says_which_engine_it_took_and_why(settings, installed, gpu, choice, why, monkeypatch, capsys):
    monkeypatch.setattr(engine_module.importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(engine_module, "DEVICE", "cuda" if gpu else "cpu")
    engine_module.announce.cache_clear()
    for _ in range(2):
        assert engine_module.choose_engine(ModelArgs(**settings)) == choice
    assert capsys.readouterr().out.count("engine: ") == 1, "once is enough"
    engine_module.announce.cache_clear()
    engine_module.choose_engine(ModelArgs(**settings))
    assert why in capsys.readouterr().out


def test_an_engine_that_cannot_be_had_is_said_before_anything_is_made(tmp_path, monkeypatch, command, capsys):
    monkeypatch.setattr(engine_module.importlib.util, "find_spec", lambda name: None)
    assert command(budgetmix, "--engine", "vllm", "--out", tmp_path / "new") == 2
    assert "vLLM is not installed: pip install -r requirements-vllm.txt" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "model, thinking, max_tokens, lr",
    [("embedded", False, 8, 1.5e-3), ("smollm2", False, 32, 2e-5), ("Qwen/Qwen3-4B", False, 512, 2e-5),
     ("Qwen/Qwen3-4B", True, 4096, 2e-5)],
)  # fmt: skip
def test_the_model_decides_some_defaults_and_what_is_typed_wins(model, thinking, max_tokens, lr, monkeypatch):
    def read(*words) -> budgetmix.Args:
        seen = []
        monkeypatch.setattr(sys, "argv", ["budgetmix.py", *words])
        budgetmix.run_cli(budgetmix.Args, seen.append, "")
        return seen[0]

    words = ("--model", model, *(("--thinking",) if thinking else ()))
    args = read(*words)
    assert (args.max_tokens, args.lr, args.model, args.thinking) == (max_tokens, lr, model, thinking)
    typed = read(*words, "--max-tokens", "7", "--lr", "0.5")
    assert (typed.max_tokens, typed.lr) == (7, 0.5)
    assert read("--preset", "results", *words).max_tokens == max_tokens


def test_a_folder_that_is_called_like_a_preset_is_still_a_model(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", ["budgetmix.py", "--model", "results"])
    budgetmix.run_cli(budgetmix.Args, seen.append, "")
    assert (seen[0].preset, seen[0].seeds) == ("quick", ())
    monkeypatch.setattr(sys, "argv", ["budgetmix.py", "--model", "smollm2"])
    budgetmix.run_cli(budgetmix.Args, seen.append, "")
    assert (seen[1].preset, seen[1].group_size) == ("smollm2", 5)


def test_the_papers_preset_is_the_papers_a2(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", ["budgetmix.py", "--preset", "paper", "--model", "Qwen/Qwen3-4B"])
    budgetmix.run_cli(budgetmix.Args, seen.append, "")
    (args,) = seen
    assert (args.model, args.preset, args.new_env().max_turns) == ("Qwen/Qwen3-4B", "paper", 70)
    assert (args.lr, args.weight_decay, args.kl_coef, args.clip, args.group_size) == (1e-6, 0.01, 0.001, 0.2, 16)
    assert (args.gigpo.omega, args.gigpo.gamma, args.ppo.value_clip) == (1.0, 0.95, 0.5)
    assert args.ppo.critic_lr in (0.0, 1e-5), "0: ten times the actor's"
