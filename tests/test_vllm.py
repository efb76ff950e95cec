"""vLLM itself, on a CPU, with the tiny model: the same answers as Hugging Face before and after swaps, and the traps of
hot-swapping adapters sprung and caught. Needs vLLM (.ci/vllm-cpu); without it everything here is reported as skipped."""

import importlib.util
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import move, save_base

import envs
import evaluate
import grpo
from chat import Sampling
from engine import HFEngine, Sample, add_adapter, load_model, response_logprobs, token_logprobs
from envs import UsageError
from rollout import Episode, State, play

if importlib.util.find_spec("vllm") is None:
    pytest.skip("skipped: vLLM not installed", allow_module_level=True)

from vllm.lora.request import LoRARequest  # noqa: E402

import vllm_engine  # noqa: E402
from vllm_engine import VLLMEngine, check_swaps, open_vllm, overlap, write_canary  # noqa: E402

pytestmark = pytest.mark.slow
lake = partial(envs.make, "frozenlake", max_turns=6)
GREEDY = Sampling(top_p=1e-9, max_tokens=8)  # a nucleus so small that only the most likely token is in it


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), hidden=64)  # vLLM's CPU attention knows no heads narrower than 32


@pytest.fixture
def vllm(base) -> VLLMEngine:
    return open_vllm(base, 8, False, 1, 0.5)


@pytest.fixture
def prompts(vllm):
    """64 different ones."""
    found = [
        Episode(lake(), vllm.codec, State(task, 0, budget)).prompt()
        for task in lake().tasks("train", 32, 0)
        for budget in (3, 6)
    ]
    assert len({p.ids for p in found}) == 64
    return found


def largest_gap(policy, prompts, completions, pad) -> float:
    """Between the engine's log-probs and those of a forward pass of the policy."""
    with torch.no_grad():
        ours = response_logprobs(policy, [Sample(p.ids, c.ids) for p, c in zip(prompts, completions, strict=True)], pad)
    return max(
        abs(x - y)
        for row, c in zip(ours.tolist(), completions, strict=True)
        for x, y in zip(row[len(row) - len(c.ids) :], c.logprobs, strict=True)
    )


# ---- the same answers as Hugging Face ----


def test_same_tokens_and_log_probs_as_hugging_face_before_and_after_two_swaps(vllm, policy, prompts):
    policy, tokenizer = policy
    hf, seen = HFEngine(policy, tokenizer), []
    for swaps in range(3):
        if swaps:
            move(policy, scale=0.3)
            vllm.follow(policy)
        ours, theirs = (engine.generate(prompts, GREEDY, seed=0) for engine in (vllm, hf))
        assert [c.ids for c in ours] == [c.ids for c in theirs]
        assert [c.finished for c in ours] == [c.finished for c in theirs]
        sampled = vllm.generate(prompts, Sampling(max_tokens=8), seed=swaps)
        assert largest_gap(policy, prompts, sampled, vllm.pad) < 2e-3
        seen.append([c.ids for c in ours])
    assert seen[0] != seen[1] != seen[2], "the swaps changed nothing: the comparison would show nothing"
    with vllm.base(), policy.disable_adapter():
        assert largest_gap(policy, prompts, vllm.generate(prompts, Sampling(max_tokens=8), 0), vllm.pad) < 2e-3


def test_log_probs_are_those_of_the_distribution_sampled_from(vllm, base, prompts):
    model, _ = load_model(base)
    sampling = Sampling(0.6, 0.9, 1)
    for prompt, completion in zip(prompts, vllm.generate(prompts, sampling, seed=3), strict=True):
        with torch.no_grad():
            logp = token_logprobs(model(torch.tensor([prompt.ids])).logits[0, -1:], sampling)
        assert logp[0, completion.ids[0]].item() == pytest.approx(completion.logprobs[0], abs=2e-3)


def test_a_sample_depends_on_the_seed_alone_and_not_on_its_batch(vllm, prompts):
    again = [vllm.generate(prompts, Sampling(max_tokens=8), seed) for seed in (0, 0, 1)]
    assert again[0] == again[1] != again[2]
    same = vllm.generate([prompts[0]] * 50, Sampling(max_tokens=8), 0)
    assert len({c.ids for c in same}) > 3, "equal prompts are sampled apart"
    assert [c.ids for c in vllm.generate(prompts[:5], Sampling(max_tokens=8), 0)] == [c.ids for c in again[0][:5]]


def test_more_prompts_than_are_prefilled_at_a_time_are_all_answered(vllm, prompts):
    """On a CPU vLLM cannot prefill the prompt of a seeded request in pieces."""
    many = prompts * 5
    assert sum(len(p.ids) for p in many) > 4 * vllm.context
    assert all(c.ids for c in vllm.generate(many, Sampling(max_tokens=8), seed=0))


def test_the_length_limit_is_told(vllm, prompts):
    (cut,) = vllm.generate(prompts[:1], Sampling(max_tokens=1), 0)
    assert not cut.finished and len(cut.ids) == 1 and vllm.codec.read(cut).problem == "cut off"
    whole = next(c for c in vllm.generate(prompts, Sampling(max_tokens=64), 0) if c.finished)
    assert whole.ids[-1] in vllm.codec.ends, "the end-of-turn token that the model sampled is part of the response"


# ---- training ----


def arguments(base, out, **options) -> grpo.Args:
    small = {"steps": 3, "tasks_per_step": 4, "group_size": 8, "train_tasks": 8, "max_tokens": 8, "lr": 0.02}
    return grpo.Args(model=str(base), out=out, env_args=("max_turns=8",), engine="vllm", **small | options)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_three_steps_of_generate_train_swap_and_a_killed_run_resumes_to_the_same(vllm, base, tmp_path, monkeypatch):
    run = grpo.train(arguments(base, tmp_path), tmp_path / "straight")
    rows = metrics(run)
    assert len(rows) == 3 and all(row["mismatch"] < 1e-3 and row["truncated"] == 0 for row in rows)
    assert rows[-1]["kl"] > 0 and rows[0]["kl"] < 1e-6, "it started at the base and left it"
    assert json.loads((run / "config.json").read_text())["engine"] == "VLLMEngine"

    saved = grpo.save_checkpoint

    def die_after_step_2(folder, learners, step):
        saved(folder, learners, step)
        if step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(grpo, "save_checkpoint", die_after_step_2)
    with pytest.raises(KeyboardInterrupt):
        grpo.train(arguments(base, tmp_path), tmp_path / "killed")
    monkeypatch.undo()
    resumed = grpo.train(arguments(base, tmp_path, resume=True), tmp_path / "killed")
    timed = {"rollout_s", "step_s", "turns_per_s"}
    assert [{k: v for k, v in row.items() if k not in timed} for row in metrics(resumed)] == [
        {k: v for k, v in row.items() if k not in timed} for row in rows
    ]


def test_training_on_a_stale_policy_would_show_in_the_mismatch(vllm, base, tmp_path, monkeypatch):
    """The engine is left at the base while the policy moves: the metric is there to show exactly this."""
    monkeypatch.setattr(VLLMEngine, "follow", lambda engine, policy: None)
    rows = metrics(grpo.train(arguments(base, tmp_path), tmp_path / "stale"))
    assert rows[0]["mismatch"] < 1e-3 < 0.01 < rows[2]["mismatch"]


def test_trained_runs_are_evaluated_with_vllm(vllm, base, tmp_path, command, capsys):
    run = grpo.train(arguments(base, tmp_path), tmp_path / "run")
    words = ("base", run, "--out", tmp_path, "--engine", "vllm", "--eval-tasks", 3, "--n", 2, "--k", 2)
    assert command(evaluate, *words) == 0
    assert "| GRPO - base |" in capsys.readouterr().out
    assert command(evaluate, *words[:-1], 1) == 0, "and what was sampled is there to be read"


# ---- stale adapters ----


def rewrite_in_place(engine, folder):
    """The new weights under the old name, id and path, as if the folder were read again."""
    engine.clear_was_forgotten = True
    new = LoRARequest("adapter", 10_000, str(folder.parent / "in-place"))
    Path(new.lora_path).mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.replace(Path(new.lora_path) / file.name)
    engine.llm.llm_engine.add_lora(new)
    engine.lora = new


def same_name_and_path(engine, folder):
    """A new id: the weights are loaded. But the prefix cache knows adapters by name and path."""
    path = folder.parent / "same"
    path.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.replace(path / file.name)
    new = LoRARequest("adapter", 20_000 + engine.swaps, str(path))
    engine.llm.llm_engine.add_lora(new)
    engine.lora = new


def never(engine, folder):
    """The swap is forgotten."""


@pytest.mark.parametrize("careless", [rewrite_in_place, same_name_and_path, never])
def test_the_canary_catches_a_stale_adapter(careless, vllm, monkeypatch):
    check_swaps(vllm, seed=40)  # as it is, it passes
    monkeypatch.setattr(VLLMEngine, "swap", careless)
    monkeypatch.setattr(VLLMEngine, "clear", lambda engine: setattr(engine, "lora", None))
    with pytest.raises(UsageError, match="vLLM samples from a stale adapter: .* Nothing was trained"):
        check_swaps(vllm, seed=50)
    monkeypatch.undo()
    vllm.lora = None
    for number in vllm.llm.llm_engine.list_loras():
        vllm.llm.llm_engine.remove_lora(number)
    vllm.clear()
    check_swaps(vllm, seed=60)


def test_two_answers_are_the_same_if_their_mass_is():
    flat = dict.fromkeys(range(20), -3.0)
    assert overlap(flat, flat) == pytest.approx(1.0)
    assert overlap(flat, {t + 1: -3.0 for t in range(20)}) == pytest.approx(0.95), "the last of 20 equals is another"
    assert overlap(flat, {t + 20: -3.0 for t in range(20)}) == 0.0
    # Probabilities .9 and .1 against .5 and .5, however far the listed ones are from summing to 1.
    one, other = {7: math.log(0.45), 8: math.log(0.05)}, {7: math.log(0.5), 8: math.log(0.5)}
    assert overlap(one, other) == overlap(other, one) == pytest.approx(0.6)


def test_a_model_without_a_generation_config_is_served_too(base, tmp_path):
    shutil.copytree(base, tmp_path / "plain")
    (tmp_path / "plain" / "generation_config.json").unlink()
    assert open_vllm(tmp_path / "plain", 8, False, 1, 0.5).codec.ends == HFEngine(*load_model(base)).ends


def test_one_vllm_serves_trainings_and_evaluations_of_any_smaller_rank(vllm, base):
    assert open_vllm(base, 1, False, 1, 0.5) is vllm and open_vllm(base, 16, True, 1, 0.5) is vllm
    assert vllm.codec.thinking and not open_vllm(base, 8, False, 1, 0.5).codec.thinking


def test_the_canary_wants_to_see_the_cache_in_use(vllm, monkeypatch):
    monkeypatch.setattr(
        vllm.llm.llm_engine.vllm_config.cache_config, "block_size", 0
    )  # so the prompt has a single token
    with pytest.raises(UsageError, match="prefix cache is not in use, so the canary of stale adapters proves nothing"):
        check_swaps(vllm, seed=70)
    monkeypatch.undo()
    vllm.clear()


def test_every_swap_has_a_new_name_id_and_folder_and_the_old_adapter_is_gone(vllm):
    kept: list[LoRARequest] = []
    for seed in range(80, 83):
        write_canary(vllm, seed)
        kept.append(vllm.lora)
        assert vllm.llm.llm_engine.list_loras() == {vllm.lora.lora_int_id}
        assert [Path(request.lora_path).exists() for request in kept] == [False] * (len(kept) - 1) + [True]
    for part in ("lora_name", "lora_int_id", "lora_path"):
        assert len({getattr(request, part) for request in kept}) == 3
    with pytest.raises(UsageError, match="vLLM knows one of"):
        vllm.swap(Path(kept[-1].lora_path))
    assert vllm.lora is kept[-1]


def test_an_adapter_of_another_model_is_refused_and_the_one_in_use_stays(vllm, base, tmp_path):
    write_canary(vllm, 90)
    before = vllm.lora
    model, _ = load_model(base)
    del model.model.layers[1]
    add_adapter(model, rank=2, alpha=4, seed=0).save_pretrained(tmp_path / "shallow")
    for folder, message in ((tmp_path / "nothing", "no usable adapter"), (tmp_path / "shallow", "layers do not fit")):
        with pytest.raises(UsageError, match=message):
            vllm.load_adapter(folder)
    assert vllm.lora is before


def test_another_base_takes_the_place_of_the_first_and_one_that_is_none_is_refused(vllm, base, tmp_path):
    model, tokenizer = load_model(base)
    move(model, scale=0.1)
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    other = open_vllm(tmp_path / "other", 8, False, 1, 0.5)
    assert other is not vllm and open_vllm(tmp_path / "other", 8, False, 1, 0.5) is other
    games = [(task, 0, 3) for task in lake().tasks("train", 4, 0)]
    assert all(t.turns for t in play(other, lake, games, Sampling(max_tokens=8), seed=0))
    with pytest.raises(UsageError, match="vLLM cannot load '.*nothing'"):
        open_vllm(tmp_path / "nothing", 8, False, 1, 0.5)


# ---- vLLM's own server, through the API engine ----


def test_vllms_own_server_answers_the_api_engine(base, tmp_path, command, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = (
        "--served-model-name",
        "tiny",
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--enforce-eager",
        "--dtype",
        "float32",
    )
    with open(tmp_path / "server.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *map(str, (base, *words))],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        for _ in range(240):
            assert server.poll() is None, (tmp_path / "server.log").read_text()[-2000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except OSError:
                time.sleep(0.5)
        asked = (
            "base",
            "--model",
            "openai:tiny",
            "--endpoint.base-url",
            f"http://127.0.0.1:{port}/v1",
            "--max-tokens",
            8,
        )
        small = ("--env-args", "max_turns=4", "--eval-tasks", 3, "--n", 2, "--k", 2, "--out", tmp_path)
        assert command(evaluate, *asked, *small) == 0
        first = capsys.readouterr().out
    finally:
        server.terminate()
        server.wait()
    assert "| base |" in first
    for samples in (tmp_path / "samples").iterdir():
        samples.unlink()
    assert command(evaluate, *asked, *small) == 0, "with the server gone every answer comes from the file"
    assert capsys.readouterr().out.split("| base |")[1] == first.split("| base |")[1]
    vllm_engine._engine = None
