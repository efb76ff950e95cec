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

Between messages and tokens stands chat.py; what samples the responses is an engine, see `Engine` below: Hugging Face
(engine.py), vLLM (vllm_engine.py), or an API (api.py).
"""

import argparse
import re
import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import tyro

from chat import NOTICES, Completion, Prompt, Sampling, Sight, TextCodec
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


@dataclass
class Turn:
    """One model call: one training sample. `state` and `turns_left` (B - t, this turn included) are those before the
    action; `action_span` is the range of `response_ids` that holds the action text, None when there is no action in the
    response; `cut_off` says that the length limit ended the response. `picture` is what the agent was shown besides the
    text (PNG bytes) and `sight` the same as the model's tensors, both None for a model that only reads."""

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
    cut_off: bool = False
    picture: bytes | None = None
    sight: Sight | None = None
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
    facts: dict[str, float] = field(default_factory=dict)  # what else an episode counts, by name (search_agent.Metrics)

    def record(self) -> dict:
        """A JSON-ready record for trajectories.jsonl: task, outcome, and the text, ids and log-probs of each turn."""
        told = ("observation", "response", "action", "action_span", "valid", "cut_off", "reward", "turns_left",
                "prompt_ids", "response_ids", "logprobs", "process_reward")  # fmt: skip
        head = {k: getattr(self, k) for k in ("seed", "budget", "success", "reward", "stop")}
        turns = [{k: getattr(turn, k) for k in told} for turn in self.turns]
        return {"task": self.task.id, "split": self.task.split, **head, **self.facts, "turns": turns}


# ---- the prompt ----


def render_prompt(
    env: Env,
    budget: int,
    completed: int,
    recent: list[tuple[str, str]],
    observation: str,
    picture: bytes | None = None,
) -> list[dict[str, Any]]:
    """The chat messages of the next turn: Table 2 with the counters of now, the recent (observation, response) pairs,
    and the observation to answer, with its picture where there is one (earlier turns are told in text alone)."""
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
    return [*messages, {"role": "user", "content": observation} | ({"image": picture} if picture else {})]


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
    picture: bytes | None = None

    @property
    def turns_left(self) -> int:
        return self.budget - self.spent


class Episode:
    """One trajectory in progress: an environment, a budget, and the turns so far. It starts at any state, and its
    trajectory holds the turns that were played from there.

    This is the loop of paper A. An agent with another protocol overrides what the model is asked (`prompt`), how a response
    is understood (`act`), and what is decided when all is played (`settle`); search_agent.py does."""

    least_budget = 1

    def __init__(self, env: Env, codec: TextCodec, start: State, history: int = 0):
        if start.turns_left < self.least_budget:
            raise UsageError(
                f"a budget must be at least {self.least_budget} turn{'s' * (self.least_budget != 1)}, not {start.turns_left}"
            )
        self.env, self.codec, self.history = env, codec, history
        self.trajectory = Trajectory(start.task, start.seed, start.budget)
        self.spent, self.actions, self.recent = start.spent, list(start.actions), list(start.recent)
        first = env.reset(start.task, start.seed)
        self.observation = first if start.observation is None else start.observation
        for action in start.actions:
            env.step(action)
        self.picture = env.picture()
        self.done = False

    @property
    def turns_left(self) -> int:
        return self.trajectory.budget - self.spent

    def state(self) -> State:
        t = self.trajectory
        told = tuple(self.actions), tuple(self.recent), self.observation, self.picture
        return State(t.task, t.seed, t.budget, self.spent, *told)

    def prompt(self) -> Prompt:
        told = self.spent, self.recent, self.observation, self.picture
        return self.codec.encode(render_prompt(self.env, self.trajectory.budget, *told))

    def act(self, prompt: Prompt, completion: Completion) -> None:
        """Spend one turn on a response: parse it, play its action, record the turn, and see whether the episode is over."""
        trajectory, state, turns_left = self.trajectory, self.env.state(), self.turns_left
        text, span, action, problem = self.codec.read(completion)
        before, seen, reward, valid = self.observation, self.picture, 0.0, False
        if action is None:
            # The environment never hears of it, but the turn is gone and the agent is told why. Stripping an older
            # notice first keeps the prompt from growing when it happens twice in a row.
            self.observation = NOTICES[problem] + re.sub("|".join(map(re.escape, NOTICES.values())), "", before)
        else:
            step = self.env.step(action)
            self.actions.append(action)
            self.observation, self.picture = step.observation, self.env.picture()
            reward, valid = step.reward, step.valid
            if step.done:
                trajectory.success, trajectory.stop = step.success, "success" if step.success else "failure"
                self.done = True
        read = before, text, action, span, valid, reward, state, turns_left
        shown = not completion.finished, seen, prompt.sight
        turn = Turn(prompt.ids, completion.ids, completion.logprobs, *read, *shown)
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

    @classmethod
    def settle(cls, episodes: list["Episode"]) -> None:
        """Called once when all episodes of a batch have ended, for what is better decided for all at once."""


class Engine(Protocol):
    """Turns prompts into sampled responses. `context` is the most tokens that prompt and response may have together."""

    context: int
    codec: TextCodec

    def generate(self, prompts: list[Prompt], sampling: Sampling, seed: int) -> list[Completion]:
        """One sampled response per prompt, in order. The end-of-turn token a response was ended with is part of it."""

    def load_adapter(self, path: Path) -> None:
        """Sample from now on with the PEFT adapter saved in a folder, instead of any that was on before."""


class TrainedEngine(Engine, Protocol):
    """What training and analysis ask of an engine besides. `own_weights`: it samples from a copy of the weights."""

    own_weights: bool

    def base(self) -> AbstractContextManager:
        """Within it the engine samples from the base model, its adapter off."""

    def follow(self, policy) -> None:
        """Sample from now on with the present weights of the policy in training."""

    def rest(self) -> None:
        """Give memory up until the next `generate`."""


def play(
    engine: Engine,
    new_env: Callable[[], Env],
    games: list[tuple[Task, int, int]],
    sampling: Sampling,
    seed: int,
    history: int = 0,
    episode_type: type[Episode] = Episode,
) -> list[Trajectory]:
    """Play games, given as (task, episode seed, budget), side by side; one Trajectory each, in the order given.

    `seed` drives the sampling of tokens. The same arguments give the same trajectories (on one machine: another batch
    shape or processor may round a logit differently).
    """
    return play_from(engine, new_env, [State(*game) for game in games], sampling, seed, history, episode_type)


def play_from(
    engine: Engine,
    new_env: Callable[[], Env],
    states: list[State],
    sampling: Sampling,
    seed: int,
    history: int = 0,
    episode_type: type[Episode] = Episode,
) -> list[Trajectory]:
    """`play`, from states in the middle of games, each with the turns it has left."""
    episodes = [episode_type(new_env(), engine.codec, state, history) for state in states]
    turn = 0
    while live := [e for e in episodes if not e.done]:
        prompts = [e.prompt() for e in live]
        fits = [len(p.ids) + sampling.max_tokens <= engine.context for p in prompts]
        for episode, fit in zip(live, fits, strict=True):
            if not fit:
                episode.end("context")
        ready = [(e, p) for e, p, fit in zip(live, prompts, fits, strict=True) if fit]
        # A seed of its own for every turn; an engine is not asked when no prompt is left that fits.
        completions = engine.generate([p for _, p in ready], sampling, (seed * 100_003 + turn) % 2**63) if ready else []
        for (episode, prompt), completion in zip(ready, completions, strict=True):
            episode.act(prompt, completion)
        turn += 1
    episode_type.settle(episodes)
    return [e.trajectory for e in episodes]


# ---- command lines ----


def run_cli(args_type: type, main: Callable[[Any], None], description: str) -> None:
    """Read a command line into a dataclass and run `main` on it. What the user did wrong is one line and exit code 2.

    Some defaults depend on other options: a preset names them, and the model and whether it thinks decide a few
    (`__post_init__`). So these are read first, and the defaults made of them; --help shows those in force. A model that
    has a preset of its own name takes it.
    """
    try:
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for option in ("preset", "model"):
            first.add_argument(f"--{option}", nargs="?")
        first.add_argument("--thinking", action=argparse.BooleanOptionalAction)
        known = getattr(args_type, "__dataclass_fields__", {})  # analysis.py reads a union of several
        given = {k: v for k, v in vars(first.parse_known_args()[0]).items() if k in known and v is not None}
        presets, model = getattr(args_type, "PRESETS", {}), given.get("model")
        of_model = model if model in presets and presets[model].get("model") == model else None
        preset = given.pop("preset", of_model)
        if preset in presets:
            given = presets[preset] | given | {"preset": preset}
        options = {"default": args_type(**given)} if given else {}
        main(tyro.cli(args_type, description=description, **options))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(
            "\nstopped; what was saved is kept, and a training that had begun continues with --resume", file=sys.stderr
        )
        sys.exit(130)
