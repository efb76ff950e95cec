"""Acting: how a language model plays an environment. The one utility that every script of this project reuses.

    Task, budget  ->  prompt -> model -> response -> action -> environment -> observation -> prompt ...  ->  Trajectory

Two ideas are worth the reader's time here.

1. *The budget is in the prompt* (paper A, Table 2). The system message holds the total, the completed and the remaining
   number of turns and is rendered anew before every action. The last `history` turns follow as chat messages, then the
   observation.

2. *Tokens in, tokens out.* Each model call is one training sample, a `Turn`. The ids that the model sampled are the ids
   that are trained: they are never decoded and encoded again for their own loss (a tokenizer may merge differently the
   second time, and the loss would then be that of another answer). Earlier turns enter later prompts as text. Because
   every turn is a sample of its own, a chat template that drops old thinking cannot misalign anything.

What samples the responses is an engine (engine.py): anything with `generate` and `load_adapter`, see `Engine` below.
"""

import argparse
import re
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import tyro

from envs import Env, Task, UsageError

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


# ---- command lines ----


def run_cli(args_type: type, main: Callable[[Any], None], description: str) -> None:
    """Read a command line into a dataclass and run `main` on it. What the user did wrong is one line and exit code 2.

    A dataclass with PRESETS, {name: values of its fields}, is read twice: --preset names the defaults of all other options.
    """
    try:
        presets, options = getattr(args_type, "PRESETS", {}), {}
        if presets:
            first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            first.add_argument("--preset", nargs="?")
            chosen = first.parse_known_args()[0].preset
            options["default"] = args_type(**presets.get(chosen, {}))
        main(tyro.cli(args_type, description=description, **options))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(
            "\nstopped; what was saved is kept, and a training that had begun continues with --resume", file=sys.stderr
        )
        sys.exit(130)
