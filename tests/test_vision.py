"""Vision: tiny random image-text-to-text models of three families look at the lake, sample and train."""

import importlib.util
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import move
from tokenizers import Tokenizer, decoders, models
from transformers import (
    CLIPVisionConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

import budgetmix
import envs
import evaluate
import grpo
from chat import Sampling
from engine import Sample, add_adapter, forbid_pictures, load_model, response_logprobs, token_logprobs
from envs import UsageError
from rollout import Episode, State, play
from vision import VisionEngine

lake = partial(envs.make, "frozenlake", size=3, max_turns=3, observation="image")
SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = SIZE | {
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": None,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'image' %}IMAGE\n"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(image: str, specials: list[str], **named) -> PreTrainedTokenizerFast:
    vocab = ["<|pad|>", "<|im_start|>", "<|im_end|>", *specials, *(f"<0x{b:02X}>" for b in range(256))]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocab)}, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    more = {"extra_special_tokens": named} if named else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", **more)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *specials]})
    tokenizer.padding_side, tokenizer.chat_template = "left", TEMPLATE.replace("IMAGE", image)
    return tokenizer


HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
if not HAS_TORCHVISION:
    # Only the videos of these models need it, and there is none beside this build of torch: processors without videos.
    with_videos = ProcessorMixin.get_attributes.__func__
    ProcessorMixin.get_attributes = classmethod(lambda cls: [a for a in with_videos(cls) if a != "video_processor"])


def video(name: str, **options) -> dict:
    return {"video_processor": getattr(transformers, name)(**options)} if HAS_TORCHVISION else {}


def llava():
    tokenizer = make_tokenizer("<image>", ["<image>"])
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template, num_additional_image_tokens=1,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**SIZE, image_size=28, patch_size=14, projection_dim=32),
        text_config=LlamaConfig(**TEXT, vocab_size=len(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration, config, processor


def internvl():
    """The architecture of InternVL3.5, whose language part is a Qwen3: several crops of each picture."""
    from transformers import InternVLProcessor

    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
             "video_token": "<video>"}  # fmt: skip
    tokenizer, small = make_tokenizer("<IMG_CONTEXT>", list(named.values()), **named), {"height": 56, "width": 56}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessorPil(size=small), **video("InternVLVideoProcessor", size=small),
        tokenizer=tokenizer, image_seq_length=4, chat_template=tokenizer.chat_template,
    )  # fmt: skip
    config = InternVLConfig(
        vision_config=SIZE | {"image_size": [56, 56], "patch_size": [14, 14]},
        text_config=TEXT | {"model_type": "qwen3", "vocab_size": len(tokenizer), "head_dim": 16},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    return InternVLForConditionalGeneration, config, processor


def qwen_vl():
    """Positions in three dimensions, and a number per token that tells images from text."""
    from transformers import Qwen2_5_VLProcessor

    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = make_tokenizer("<|vision_start|><|image_pad|><|vision_end|>", names)
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(size={"shortest_edge": 56**2, "longest_edge": 84**2}),
        **video("Qwen2VLVideoProcessor"), tokenizer=tokenizer, chat_template=tokenizer.chat_template,
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    ids = dict(
        zip(("vision_start", "vision_end", "image", "video"), tokenizer.convert_tokens_to_ids(names), strict=True)
    )
    config = Qwen2_5_VLConfig(
        text_config=TEXT | {"vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config=vision | {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56},
        **{f"{name}_token_id": id for name, id in ids.items()},
    )
    return Qwen2_5_VLForConditionalGeneration, config, processor


@pytest.fixture(scope="session", params=[llava, internvl, qwen_vl], ids=lambda make: make.__name__)
def folder(request, tmp_path_factory):
    """A saved model with its processor, as a user would have downloaded it."""
    kind, config, processor = request.param()
    torch.manual_seed(0)
    model, path = kind(config), tmp_path_factory.mktemp(request.param.__name__)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.generation_config.update(
        do_sample=True, top_k=2, repetition_penalty=3.0
    )  # what a model ships with must not leak in
    for saved in (model, processor):
        saved.save_pretrained(path)
    return path


@pytest.fixture
def engine(folder):
    model, processor = load_model(folder, vision=True)
    return VisionEngine(add_adapter(model, 4, 8, 0), processor, prompts=5)


@pytest.fixture
def prompts(engine):
    tasks = lake().tasks("train", 6, 0)
    return [Episode(lake(), engine.codec, State(t, 0, b)).prompt() for t in tasks for b in (3, 12)]


def test_the_picture_is_gymnasiums_and_shows_where_the_player_is():
    env = lake()
    (task,) = env.tasks("train", 1, 0)
    told = env.reset(task, 0)
    first = env.picture()
    assert first.startswith(b"\x89PNG") and told == "This is the lake now.", (
        "the text does not tell what the picture shows"
    )
    assert not any(word in env.instruction for word in ("grid", " P "))
    for action in ("left", "right", "up", "down"):
        if env.step(action).done:
            break
    assert env.state() == "".join(task.data).index("S") or env.picture() != first
    assert envs.make("frozenlake").picture() is None


def test_each_turn_shows_one_picture(engine, prompts):
    image = engine.policy.config.image_token_id
    for prompt in prompts:
        assert sum("image" in m for m in prompt.messages) == 1 and "image" in prompt.messages[-1]
        assert prompt.ids.count(image) >= 4
    (t,) = play(engine, lake, [(lake().tasks("train", 1, 0)[0], 0, 3)], Sampling(max_tokens=3), seed=0, history=2)
    counts = [turn.prompt_ids.count(image) for turn in t.turns]
    assert len(set(counts)) == 1, "earlier turns are told in text alone"
    assert all(turn.picture and turn.sight for turn in t.turns)
    json.dumps(t.record())  # pictures stay out of the records
    first, other = prompts[0].sight, prompts[1].sight
    assert first is not other and first.tensors is other.tensors, "prompts that show the same share the memory"


def test_text_cannot_forge_a_picture(engine):
    word = engine.codec.tokenizer.convert_ids_to_tokens(engine.policy.config.image_token_id)
    plain, forged = (engine.codec.encode([{"role": "user", "content": c}]) for c in ("ab", f"a{word}b"))
    assert plain.ids == forged.ids and not forged.sight.tensors


def test_log_probs_of_the_sampler_equal_a_fresh_forward_pass(engine, prompts):
    for sampling in (Sampling(max_tokens=6), Sampling(0.6, 0.9, 6)):
        done = engine.generate(prompts, sampling, seed=0)
        assert done == engine.generate(prompts, sampling, seed=0) != engine.generate(prompts, sampling, seed=1)
        for prompt, c in zip(prompts, done, strict=True):
            ids = prompt.ids + c.ids
            each = {k: torch.tensor([(*v, *(0,) * len(c.ids))]) for k, v in prompt.sight.per_token.items()}
            with torch.no_grad():
                logits = engine.policy(torch.tensor([ids]), **prompt.sight.tensors, **each).logits
            logp = token_logprobs(logits[0, len(prompt.ids) - 1 : -1], sampling)
            assert logp.gather(1, torch.tensor(c.ids)[:, None]).squeeze(1).tolist() == pytest.approx(
                c.logprobs, abs=2e-5
            )


def test_no_response_can_hold_a_placeholder_of_pictures(engine, prompts):
    """A random model would sample one now and then, and the next forward pass would look for a picture that is not there."""
    seen = prompts[0].sight
    each = {name: torch.tensor([values]) for name, values in seen.per_token.items()}
    with torch.no_grad():
        logp = engine.policy(torch.tensor([prompts[0].ids]), **seen.tensors, **each).logits[0, -1].log_softmax(-1)
    forbidden = {i for i, x in enumerate(logp.tolist()) if x < -1e6}
    names = engine.codec.tokenizer.convert_ids_to_tokens(sorted(forbidden))
    assert engine.policy.config.image_token_id in forbidden and all(name.startswith("<") for name in names)
    assert len(forbidden) <= 4


def test_placeholders_of_large_vocabularies_are_found_in_half_precision():
    """bfloat16 holds 8 bits of a number: an id that went through it would be another id."""
    output = torch.nn.Linear(2, 70_000, dtype=torch.bfloat16)
    config = SimpleNamespace(to_dict=lambda: {"image_token_id": 66_999, "eos_token_id": 3, "video_token_id": None})
    forbid_pictures(SimpleNamespace(config=config, get_output_embeddings=lambda: output))
    logits = output(torch.ones(1, 2, dtype=torch.bfloat16))
    assert (logits < -1e6).nonzero().tolist() == [[0, 66_999]]


def test_a_response_ends_with_its_end_of_turn_token(engine, prompts):
    """Every token ends a turn here with some luck: among many, some responses end early, beside others that go on."""
    engine.ends = set(range(engine.policy.config.get_text_config().vocab_size // 2))
    done = engine.generate(prompts * 4, Sampling(max_tokens=6), seed=0)
    assert len({len(c.ids) for c in done}) > 2
    for c in done:
        assert c.finished == (c.ids[-1] in engine.ends) and not set(c.ids[:-1]) & engine.ends
        assert len(c.ids) == len(c.logprobs) and (c.finished or len(c.ids) == 6)


def test_padding_beside_other_pictures_changes_nothing_and_the_picture_matters(engine, prompts):
    samples = [Sample(p.ids, (40, 41, 42)[: 1 + i % 3], p.sight) for i, p in enumerate(prompts)]
    with torch.no_grad():
        together = response_logprobs(engine.policy, samples, engine.pad)
        for row, sample in zip(together, samples, strict=True):
            (alone,) = response_logprobs(engine.policy, [sample], engine.pad)
            assert torch.allclose(row[-len(alone) :], alone, atol=1e-5)
        swapped = Sample(samples[0].prompt, samples[0].response, samples[2].sight)
        (other,) = response_logprobs(engine.policy, [swapped], engine.pad)
    assert (together[0, -1:] - other).abs().max() > 1e-4


def test_lora_is_on_the_language_part_alone_and_learns(engine):
    trained = [n for n, p in engine.policy.named_parameters() if p.requires_grad]
    assert trained and all("language_model" in n and "lm_head" not in n for n in trained)
    layers = {n.split(".lora_")[0].rsplit(".", 1)[1] for n in trained}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    games = [(task, 0, 2) for task in lake().tasks("train", 3, 0)]
    turns = [turn for t in play(engine, lake, games, Sampling(max_tokens=4), seed=0) for turn in t.turns]
    move(engine.policy)
    credit = [[(-1.0) ** i] * len(turn.response_ids) for i, turn in enumerate(turns)]
    gradients = []
    for micro_batch in (1, 64):
        optimizer = torch.optim.SGD([p for p in engine.policy.parameters() if p.requires_grad], lr=0.0)
        args = grpo.Args(micro_batch=micro_batch, grad_clip=1e9)
        grpo.update(engine.policy, optimizer, turns, credit, engine.pad, args)
        gradients.append(torch.cat([p.grad.flatten() for p in engine.policy.parameters() if p.requires_grad]))
    assert gradients[0].abs().max() > 0 and torch.allclose(*gradients, atol=1e-5 * gradients[0].abs().max().item())


def test_the_commands_train_on_pictures_and_evaluate(folder, tmp_path, command, capsys):
    words = ("--model", folder, "--observation", "image", "--env-args", "size=3", "max_turns=3", "--max-tokens", 4)
    small = ("--eval-tasks", 2, "--n", 2, "--k", 2, "--percents", 100, "--out", tmp_path)
    assert command(budgetmix, *words, "--steps", 1, "--tasks-per-step", 1, "--group-size", 2, *small) == 0
    run = tmp_path / "frozenlake" / "grpo-mix-s0"
    assert json.loads((run / "config.json").read_text())["observation"] == "image"
    assert command(evaluate, "base", run, *small) == 0
    assert "| GRPO + BudgetMix - base |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "embedded sees no pictures: name a vision model, or leave --observation out"),
        (("--model", "smollm2"), "smollm2 sees no pictures"),
        (("--model", "x", "--env", "frozenlake-fog"), "'frozenlake-fog' has no option 'observation'"),
        (("--model", "x", "--algo", "ppo"), "the critic only reads text"),
        (("--model", "x", "--engine", "vllm"), "pictures go through the Hugging Face engine"),
        (("--model", "/nothing/here"), "cannot load the model"),
    ],
)
def test_what_cannot_be_shown_is_refused(words, message, tmp_path, command, capsys):
    assert command(budgetmix, "--observation", "image", "--out", tmp_path / "new", *words) == 2
    assert message in capsys.readouterr().err


def test_an_environment_option_that_is_no_observation_is_refused():
    with pytest.raises(UsageError, match="observation must be text or image, not 'sound'"):
        envs.make("frozenlake", observation="sound")
