"""Acting: how a language model plays an environment. The one utility that every script of this project reuses.

    Task, budget  ->  prompt -> model -> response -> action -> environment -> observation -> prompt ...  ->  Trajectory

Three ideas are worth the reader's time here.

1. *The budget is in the prompt* (paper A, Table 2). The system message holds the total, the completed and the remaining
   number of turns and is rendered anew before every action. The last `history` turns follow as chat messages, then the
   observation.

2. *Tokens in, tokens out.* Each model call is one training sample, a `Turn`. The ids that the model sampled are the ids
   that are trained: they are never decoded and encoded again for their own loss (a tokenizer may merge differently the
   second time, and the loss would then be that of another answer). Earlier turns enter later prompts as text. Because
   every turn is a sample of its own, a chat template that drops old thinking cannot misalign anything.

3. *Compute each prompt once.* The members of a group play the same task, so at the first turn all their prompts are
   equal and on small games many later ones too. The Hugging Face engine below prefills each distinct prompt once and
   samples from it as often as needed.

An engine is anything with `generate(prompts, sampling, seed) -> list[Completion]` and `load_adapter(path)`. Here is the
one over Hugging Face transformers; the rest of the project does not care which one it is given.
"""

import json
import os
import re
import sqlite3
import sys
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import openai
import torch
import tyro
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from envs import Env, Task, UsageError

# Loading a model is no news: its bars and reports would push the run's own off the screen. Errors still arrive.
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

# Paper A, Table 2, word for word.
SYSTEM_PROMPT = """\
You are an agent interacting with the {environment} task under a finite interaction budget. One interaction turn \
consists of one action from you followed by one observation from the environment.
Maximum number of interaction turns: {max_turns}.
Number of turns already completed: {current_turn}.
Number of turns remaining: {remaining_turns}.
Follow the task-specific instruction below. At each turn, output exactly one action in the required format. Do not \
output multiple actions in one turn, and do not assume that additional turns will be available after the budget is \
exhausted.

TASK-SPECIFIC INSTRUCTION
{instruction}

ACTION FORMAT
Output exactly one action in the following format:
{action_format}"""


# ---- what flows through the project ----


@dataclass(frozen=True)
class Sampling:
    """Training samples at temperature 1.0 and top-p 1.0 (paper A, A.2); evaluation at 0.6 and 0.9 (B.1)."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 16


@dataclass(frozen=True)
class Completion:
    """One sampled response. `logprobs[j]` is the log-probability of `ids[j]` under the distribution it was sampled
    from, that is after temperature and top-p. `finished` is False when the length limit cut it off before an
    end-of-turn token."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool


@dataclass
class Turn:
    """One model call: one training sample. `state` and `turns_left` (B - t, this turn included) are those before the
    action; `action_span` is the range of `response_ids` that holds the action text, None when there is no action in the
    response."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    observation: str
    response: str
    action: str | None
    action_span: tuple[int, int] | None
    valid: bool
    reward: float
    state: Hashable
    turns_left: int
    process_reward: float | None = None  # a step reward from process_rewards.py, where one was asked for


@dataclass
class Trajectory:
    """One played episode. `reward` is the sum of the turn rewards; `stop` says why it ended: success, failure (the
    environment ended it), budget (turns exhausted) or context (the next prompt would not fit into the model's
    context)."""

    task: Task
    seed: int
    budget: int
    turns: list[Turn] = field(default_factory=list)
    success: bool = False
    reward: float = 0.0
    stop: str = "budget"

    def record(self) -> dict:
        """A JSON-ready record for trajectories.jsonl: task, outcome, and the text, ids and log-probs of each turn."""
        told = ("observation", "response", "action", "action_span", "valid", "reward", "turns_left", "prompt_ids",
                "response_ids", "logprobs", "process_reward")  # fmt: skip
        head = {k: getattr(self, k) for k in ("seed", "budget", "success", "reward", "stop")}
        turns = [{k: getattr(turn, k) for k in told} for turn in self.turns]
        return {"task": self.task.id, "split": self.task.split, **head, "turns": turns}


# ---- prompt and parser ----


def render_prompt(
    env: Env, budget: int, completed: int, recent: list[tuple[str, str]], observation: str
) -> list[dict[str, str]]:
    """The chat messages of the next turn: Table 2 with the counters of now, the recent (observation, response) pairs,
    and the observation to answer."""
    system = SYSTEM_PROMPT.format(
        environment=env.name,
        max_turns=budget,
        current_turn=completed,
        remaining_turns=budget - completed,
        instruction=env.instruction,
        action_format=env.action_format,
    )
    messages = [{"role": "system", "content": system}]
    for earlier, response in recent:
        messages += [{"role": "user", "content": earlier}, {"role": "assistant", "content": response}]
    return [*messages, {"role": "user", "content": observation}]


# The notices are fixed sentences, so that the embedded tokenizer can hold each as one token.
NOTICES = {
    "cut off": "Invalid response: it was cut off by the length limit. The turn is spent.\n",
    "thinking": "Invalid response: the thinking was never closed. The turn is spent.\n",
    "missing": "Invalid response: it holds no <action>...</action>. The turn is spent.\n",
    "several": "Invalid response: it holds more than one <action>. The turn is spent.\n",
    "trailing": "Invalid response: there is text after </action>. The turn is spent.\n",
}


def parse_action(response: str) -> tuple[tuple[int, int] | None, str]:
    """Find the action of a response: ((start, end), "") with the character span between <action> and </action>,
    stripped of outer white space, or (None, key of NOTICES).

    The format is parsed, not guessed at. A parser that takes the first word it knows turns "not up, but down" into
    "up". Free text may come before the action (models reason aloud); an <action> inside thinking is only a thought;
    nothing may follow.
    """
    start = response.rfind("</think>") + len("</think>") if "</think>" in response else 0
    if "<think>" in response[start:]:
        return None, "thinking"
    if response.count("<action>", start) > 1 or response.count("</action>", start) > 1:
        return None, "several"
    match = re.compile("<action>(.*?)</action>", re.DOTALL).search(response, start)
    if match is None or not match[1].strip():
        return None, "missing"
    if response[match.end() :].strip():
        return None, "trailing"
    first = match.start(1) + len(match[1]) - len(match[1].lstrip())
    return (first, first + len(match[1].strip())), ""


class Codec:
    """Text <-> ids for one tokenizer, remembering what it has seen: the same prompts and responses come again and again."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        if tokenizer.chat_template is None:
            raise UsageError("this model's tokenizer has no chat template: use an instruction-tuned model")
        # Model and environment text is data: a special token spelt out in it must not become one and forge a chat turn.
        self.specials = re.compile("|".join(map(re.escape, tokenizer.all_special_tokens)))
        self._encode = lru_cache(maxsize=200_000)(self._render_and_encode)
        self.read = lru_cache(maxsize=200_000)(self._read)

    def encode(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        return self._encode(tuple((m["role"], m["content"]) for m in messages))

    def _render_and_encode(self, messages: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        chat = [{"role": role, "content": self.specials.sub("", content)} for role, content in messages]
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _read(self, ids: tuple[int, ...], finished: bool) -> tuple[str, tuple[int, int] | None, str | None, str]:
        """(response text, action span in tokens, action, key of NOTICES) of a sampled response."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        if not finished:
            return text, None, None, "cut off"
        characters, problem = parse_action(text)
        if characters is None:
            return text, None, None, problem

        # From the end, because the action ends the response. Compared by text and not by length: half of a multi-byte
        # character decodes to several replacement characters. A token that holds part of the action counts whole (in
        # the embedded tokenizer "<action>left</action>" is a single token).
        start, end = characters
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        last = len(ids)
        while decode(ids[: last - 1])[:end] == text[:end]:
            last -= 1
        first = last - 1
        while not text[:start].startswith(decode(ids[:first])):
            first -= 1
        return text, (first, last), text[start:end], ""


# ---- the game loop ----


@dataclass(frozen=True)
class State:
    """A moment before an action, told so that it can be rebuilt: the game by replaying the actions that reached it from
    `reset` with the same seed (never by copying a live object), the prompt by the texts that stood in it. `spent` counts
    the turns completed, answers that were no action included; `recent` are the last (observation, response) pairs."""

    task: Task
    seed: int
    budget: int
    spent: int = 0
    actions: tuple[str, ...] = ()
    recent: tuple[tuple[str, str], ...] = ()
    observation: str | None = None  # None: the first one, that of `reset`

    @property
    def turns_left(self) -> int:
        return self.budget - self.spent


class Episode:
    """One trajectory in progress: an environment, a budget, and the turns so far. It starts at any state, and its
    trajectory holds the turns that were played from there."""

    def __init__(self, env: Env, codec: Codec, start: State, history: int = 0):
        if start.turns_left < 1:
            raise UsageError(f"a budget must be at least 1 turn, not {start.turns_left}")
        self.env, self.codec, self.history = env, codec, history
        self.trajectory = Trajectory(start.task, start.seed, start.budget)
        self.spent, self.actions, self.recent = start.spent, list(start.actions), list(start.recent)
        first = env.reset(start.task, start.seed)
        self.observation = first if start.observation is None else start.observation
        for action in start.actions:
            env.step(action)
        self.done = False

    @property
    def turns_left(self) -> int:
        return self.trajectory.budget - self.spent

    def state(self) -> State:
        t = self.trajectory
        told = tuple(self.actions), tuple(self.recent), self.observation
        return State(t.task, t.seed, t.budget, self.spent, *told)

    def prompt(self) -> tuple[int, ...]:
        messages = render_prompt(self.env, self.trajectory.budget, self.spent, self.recent, self.observation)
        return self.codec.encode(messages)

    def act(self, prompt: tuple[int, ...], completion: Completion) -> None:
        """Spend one turn on a response: parse it, play its action, record the turn, and see whether the episode is over."""
        trajectory, state, turns_left = self.trajectory, self.env.state(), self.turns_left
        text, span, action, problem = self.codec.read(completion.ids, completion.finished)
        before, reward, valid = self.observation, 0.0, False
        if action is None:
            # The environment never hears of it, but the turn is gone and the agent is told why. Stripping an older
            # notice first keeps the prompt from growing when it happens twice in a row.
            self.observation = NOTICES[problem] + re.sub("|".join(map(re.escape, NOTICES.values())), "", before)
        else:
            step = self.env.step(action)
            self.actions.append(action)
            self.observation, reward, valid = step.observation, step.reward, step.valid
            if step.done:
                trajectory.success, trajectory.stop = step.success, "success" if step.success else "failure"
                self.done = True
        ids, logprobs = completion.ids, completion.logprobs
        turn = Turn(prompt, ids, logprobs, before, text, action, span, valid, reward, state, turns_left)
        trajectory.turns.append(turn)
        trajectory.reward += reward
        self.spent += 1
        self.recent = [*self.recent, (before, text)][-self.history :] if self.history else []
        if self.done or self.turns_left == 0:
            # Exhausting the budget without success: stop stays "budget", the reward what was earned (0 here; paper A,
            # A.4).
            self.end(trajectory.stop)

    def end(self, stop: str) -> None:
        self.trajectory.stop, self.done = stop, True
        self.env.close()


class Engine(Protocol):
    """Turns prompts into sampled responses. `context` is the most tokens that prompt and response may have together."""

    context: int
    codec: Codec

    def generate(self, prompts: list[tuple[int, ...]], sampling: Sampling, seed: int) -> list[Completion]: ...

    def load_adapter(self, path: Path) -> None: ...


def play(
    engine: Engine,
    new_env: Callable[[], Env],
    games: list[tuple[Task, int, int]],
    sampling: Sampling,
    seed: int,
    history: int = 0,
) -> list[Trajectory]:
    """Play games, given as (task, episode seed, budget), side by side; one Trajectory each, in the order given.

    `seed` drives the sampling of tokens. The same arguments give the same trajectories (on one machine: another batch
    shape or processor may round a logit differently).
    """
    return play_from(engine, new_env, [State(*game) for game in games], sampling, seed, history)


def play_from(
    engine: Engine, new_env: Callable[[], Env], states: list[State], sampling: Sampling, seed: int, history: int = 0
) -> list[Trajectory]:
    """`play`, from states in the middle of games, each with the turns it has left."""
    episodes = [Episode(new_env(), engine.codec, state, history) for state in states]
    turn = 0
    while live := [e for e in episodes if not e.done]:
        prompts = [e.prompt() for e in live]
        fits = [len(p) + sampling.max_tokens <= engine.context for p in prompts]
        for episode, fit in zip(live, fits, strict=True):
            if not fit:
                episode.end("context")
        ready = [(e, p) for e, p, fit in zip(live, prompts, fits, strict=True) if fit]
        # A seed of its own for every turn; an engine is not asked when no prompt is left that fits.
        completions = engine.generate([p for _, p in ready], sampling, (seed * 100_003 + turn) % 2**63) if ready else []
        for (episode, prompt), completion in zip(ready, completions, strict=True):
            episode.act(prompt, completion)
        turn += 1
    return [e.trajectory for e in episodes]


# ---- the policy: a causal language model with a LoRA adapter ----


def load_model(name: str | Path):
    """(model, tokenizer) of a Hugging Face folder or model name, in evaluation mode. Raises UsageError if that fails."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(
            f"cannot load the model {str(name)!r}, neither as a folder nor by name: {str(error).splitlines()[0]}"
        ) from None
    if model.num_parameters() < 1_000_000:
        # Matrices this small are done before a second thread has woken up; on a busy machine two threads ran 2 to 9
        # times slower.
        torch.set_num_threads(1)
    # eval(): there is no dropout to switch on for training, and sampler and trainer must compute the same function.
    return model.to(device).eval(), tokenizer


def add_adapter(model, rank: int, alpha: int, seed: int) -> PeftModel:
    """The trainable policy: the model, frozen, with a fresh LoRA adapter on all its linear layers.

    A fresh adapter's B matrices are zero, so the policy starts as the model itself; switching the adapter off
    (`policy.disable_adapter()`) gives the reference policy at any time without a second copy of the weights.
    """
    torch.manual_seed(seed)  # the adapter's A matrices are random
    lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora).eval()


def pad_left(sequences: list[tuple[int, ...]], pad: int, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, attention mask, positions), each [N, L]. Padding on the left makes all sequences end at the same column, so
    the response tokens of a whole batch are the last columns; positions count real tokens only, so padding changes
    nothing."""
    longest = max(map(len, sequences))
    ids = torch.tensor([[pad] * (longest - len(s)) + list(s) for s in sequences], device=device)
    mask = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in sequences], device=device)
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def right_aligned(rows: list[tuple[float, ...]], device) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, mask), each [N, R]: per-token values of responses of different lengths, aligned like `response_logprobs`."""
    longest = max(map(len, rows))
    values = torch.tensor([[0.0] * (longest - len(r)) + list(r) for r in rows], device=device)
    mask = torch.tensor([[0.0] * (longest - len(r)) + [1.0] * len(r) for r in rows], device=device)
    return values, mask


def response_logprobs(model, samples: list[tuple[tuple[int, ...], tuple[int, ...]]], pad: int) -> torch.Tensor:
    """Log-probabilities of the response tokens of N (prompt ids, response ids) samples at temperature 1: [N, R], where
    R is the longest response; shorter ones are right-aligned and the columns before them hold no meaning (mask them).

    Only the last R + 1 positions go through the output layer: the logits of prompt tokens carry no loss, and for a real
    vocabulary they are the largest tensor of the whole step.
    """
    ids, mask, positions = pad_left([p + r for p, r in samples], pad, model.device)
    longest = max(len(r) for _, r in samples)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=longest + 1)
    logits = out.logits[:, :-1].float()  # [N, R, V]: the logit at a position predicts the token after it
    return logits.log_softmax(-1).gather(-1, ids[:, -longest:, None]).squeeze(-1)


def micro_batches(turns: list[Turn], size: int) -> list[tuple[list[tuple], list[int], list[int]]]:
    """Split a batch into (pairs [U], members [M], rows [M]): distinct (prompt ids, response ids) pairs, the indices of
    all turns that they stand for, and for each of those the row of its pair.

    Equal pairs are common, because members of a group meet the same states. Each distinct pair goes through a model
    once, and its output is *indexed* by all the turns that share it (`output[rows]`): autograd then sums their
    gradients, which is the same number as computing them one by one, for any advantages and any loss.
    """
    owners: dict[tuple, list[int]] = {}
    for i, turn in enumerate(turns):
        owners.setdefault((turn.prompt_ids, turn.response_ids), []).append(i)
    distinct = sorted(owners, key=lambda pair: len(pair[0]) + len(pair[1]))  # like lengths together: little padding
    batches = [distinct[i : i + size] for i in range(0, len(distinct), size)]
    return [
        (pairs, [i for p in pairs for i in owners[p]], [row for row, p in enumerate(pairs) for _ in owners[p]])
        for pairs in batches
    ]


class HFEngine:
    """Sampling with Hugging Face transformers from the very module that is being trained: nothing to synchronise.

    Why not `model.generate`: it computes a prompt as often as it is sampled from. Here each distinct prompt of the call
    is prefilled once, its key-value cache rows are copied for the requests that share it, and rows leave the batch when
    they end.
    """

    def __init__(self, policy, tokenizer, rows: int = 2048, prompts: int = 128):
        """At most `prompts` distinct prompts are prefilled and `rows` responses sampled side by side."""
        self.policy, self.codec, self.rows, self.prompts = policy, Codec(tokenizer), rows, prompts
        self.context = policy.config.max_position_embeddings
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        ends = policy.generation_config.eos_token_id  # a chat model may have several end-of-turn tokens
        self.ends = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}

    def load_adapter(self, path: Path) -> None:
        """Sample from now on with the adapter saved in a folder, instead of any that was on before.

        Raises UsageError when there is none, or when it was made for another model.
        """
        try:
            with safe_open(path / "adapter_model.safetensors", "pt") as file:
                saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UsageError(f"no usable adapter in {path}: {error}") from None
        model = self.policy.unload() if isinstance(self.policy, PeftModel) else self.policy
        try:
            policy = PeftModel.from_pretrained(model, path).eval()
            fits = {name: tuple(w.shape) for name, w in get_peft_model_state_dict(policy).items()} == saved
        except (RuntimeError, ValueError):  # PEFT's own complaint about other shapes or layers, dozens of lines long
            fits = False
        if not fits:  # missing layers PEFT only warns about, and would leave at random values
            raise UsageError(
                f"the adapter in {path} is damaged or belongs to another model than the base: its layers do not fit"
            )
        self.policy = policy

    def _chunks(self, requests: dict[tuple[int, ...], list[int]]) -> list[list[tuple[tuple[int, ...], list[int]]]]:
        """Split {prompt: requests} into batches that respect both limits; neighbours of like length need little padding."""
        chunks: list[list] = [[]]
        room = self.rows
        for prompt in sorted(requests, key=len):
            for first in range(0, len(requests[prompt]), self.rows):
                wanted = requests[prompt][first : first + self.rows]
                if len(wanted) > room or len(chunks[-1]) == self.prompts:
                    chunks.append([])
                    room = self.rows
                chunks[-1].append((prompt, wanted))
                room -= len(wanted)
        return chunks if chunks[0] else []

    @torch.no_grad()
    def generate(self, prompts: list[tuple[int, ...]], sampling: Sampling, seed: int) -> list[Completion]:
        """One sampled response per prompt, in order. The end-of-turn token a response was ended with is part of it."""
        rng = torch.Generator(self.policy.device).manual_seed(seed)
        requests: dict[tuple[int, ...], list[int]] = {}  # distinct prompt -> the requests that want a sample from it
        for i, prompt in enumerate(prompts):
            requests.setdefault(prompt, []).append(i)
        ids: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        finished = [False] * len(prompts)
        for chunk in self._chunks(requests):
            tokens, mask, positions = pad_left([prompt for prompt, _ in chunk], self.pad, self.policy.device)
            out = self.policy(
                input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1
            )
            owners = [i for _, wanted in chunk for i in wanted]
            copies = [row for row, (_, wanted) in enumerate(chunk) for _ in wanted]
            rows = torch.tensor(copies, device=self.policy.device)  # which prefilled row each request continues
            cache, length = out.past_key_values, positions[:, -1:] + 1
            cache.batch_select_indices(rows)
            logits, mask, length = out.logits[rows, -1], mask[rows], length[rows]
            for step in range(sampling.max_tokens):
                token, logp = sample_tokens(logits, sampling, rng)
                keep = []
                for row, (owner, t, lp) in enumerate(zip(owners, token.tolist(), logp.tolist(), strict=True)):
                    ids[owner].append(t)
                    logprobs[owner].append(lp)
                    finished[owner] = t in self.ends
                    if not finished[owner]:
                        keep.append(row)
                if not keep or step == sampling.max_tokens - 1:
                    break
                if len(keep) < len(owners):
                    owners = [owners[row] for row in keep]
                    rows = torch.tensor(keep, device=self.policy.device)
                    cache.batch_select_indices(rows)
                    token, mask, length = token[rows], mask[rows], length[rows]
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
                out = self.policy(
                    input_ids=token[:, None],
                    attention_mask=mask,
                    position_ids=length,
                    past_key_values=cache,
                    use_cache=True,
                )
                logits, length = out.logits[:, -1], length + 1
        return [Completion(tuple(i), tuple(p), f) for i, p, f in zip(ids, logprobs, finished, strict=True)]


def sample_tokens(logits: torch.Tensor, sampling: Sampling, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row of logits [N, V]: (tokens [N], log-probabilities [N] under the distribution sampled from)."""
    logp = (logits.float() / sampling.temperature).log_softmax(-1)
    if sampling.top_p < 1.0:
        # Nucleus: keep the smallest set of most likely tokens whose mass reaches top_p. A token stays if the mass
        # *before* it is below top_p, so the most likely one always stays.
        ordered, order = logp.sort(descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        logp = logp.scatter(-1, order, ordered.masked_fill(before >= sampling.top_p, -torch.inf)).log_softmax(-1)
    token = torch.multinomial(logp.exp(), 1, generator=rng)
    return token.squeeze(1), logp.gather(1, token).squeeze(1)


# ---- language models behind an endpoint ----


class ChatAPI:
    """Answers from any OpenAI-compatible endpoint, each distinct question asked once: answers are kept in a SQLite
    file.

    The key is read from OPENAI_API_KEY and kept nowhere. Transient failures (no connection, stalls, 429, 5xx) are
    retried by the client with growing pauses that honour Retry-After; when they persist, `ask` raises UsageError:
    everything answered so far is in the file, so the run can be resumed.
    """

    def __init__(self, model: str, base_url: str | None, cache: Path, timeout: float = 60.0, retries: int = 4):
        self.model, self.base_url = model, base_url
        key = os.environ.get("OPENAI_API_KEY", "none")  # local servers want no key, but the client wants some
        self.client = openai.OpenAI(api_key=key, base_url=base_url, timeout=timeout, max_retries=retries)
        self.lock = threading.Lock()  # one connection for all threads that ask side by side
        try:
            self.answers = sqlite3.connect(cache, check_same_thread=False)
            self.answers.execute("create table if not exists answers (question text primary key, answer text not null)")
        except sqlite3.Error as error:
            raise UsageError(f"cannot use {cache} to keep the answers in ({error}): move it away") from None

    def ask(self, messages: list[dict[str, str]], attempt: int = 0, **options: Any) -> str:
        """The text that the model answers to chat messages. `attempt` distinguishes repeated asking of one question."""
        question = json.dumps([self.base_url, self.model, messages, options, attempt])
        with self.lock:
            found = self.answers.execute("select answer from answers where question = ?", [question]).fetchone()
        if found:
            return found[0]
        try:
            reply = self.client.chat.completions.create(model=self.model, messages=messages, **options)
            answer = reply.choices[0].message.content or ""
            if not isinstance(answer, str):
                raise TypeError(f"the answer is no text but {type(answer).__name__}")
        except (openai.APIError, json.JSONDecodeError, AttributeError, IndexError, KeyError, TypeError) as error:
            # All but the first: a server that answers 200 with something that is no chat completion.
            where, what = self.base_url or "the OpenAI API", f"{type(error).__name__}: {error}".splitlines()[0][:200]
            raise UsageError(f"no answer from {where} ({what}); what was answered is kept, --resume goes on") from None
        with self.lock, self.answers:
            self.answers.execute("insert or replace into answers values (?, ?)", [question, answer])
        return answer


# ---- command lines ----


def run_cli(args_type: type, main: Callable[[Any], None], description: str) -> None:
    """Read a command line into a dataclass and run `main` on it. What the user did wrong is one line and exit code 2."""
    try:
        main(tyro.cli(args_type, description=description))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(
            "\nstopped; what was saved is kept, and a training that had begun continues with --resume", file=sys.stderr
        )
        sys.exit(130)
