"""Process rewards: a number for every single step, from an oracle or from an LLM judge (paper A, 5.1 and B.6).

Outcome-only RL says whether the trajectory succeeded. A process reward says of each turn how good its action was:

    oracle   r_t = Q*(s_t, a_t), the exact value of the action with the turns left (gamma 0.95, finite horizon), from
             the environment's `action_quality`. The raw value and not a ratio to the best: a step taken when success is
             out of reach earns 0, however clever. An answer that held no action earns 0.
    judge    r_t = score / 10, an integer from 0 to 10 by a language model that sees the task, the history, the observation,
             the turns left and the proposed action (paper A, Table 3).

How a step reward enters the gradient is the algorithm's business: GRPO adds its group-normalised value to the advantage
of its own turn (`grpo.process_advantages`), PPO adds it to the reward of the turn's last response token
(`ppo.token_rewards`).

    python grpo.py --env frozenlake --process-reward oracle
    python grpo.py --env frozenlake --process-reward judge --judge.model NAME --judge.base-url http://localhost:8000/v1

Paper A's finding to keep in mind: with the oracle, tight budgets stop hurting; a judge, however strong, is no oracle.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from api import ChatAPI, Endpoint, side_by_side
from envs import Env, UsageError
from rollout import Trajectory
from runs import make_folder


def oracle(trajectory: Trajectory, env: Env) -> list[float]:
    """Exact quality of each turn's action, one float per turn (paper A, 3.3).

    The states are rebuilt by replaying the recorded seed and actions from `reset`: nothing of the live game has to be
    kept. Raises UsageError where the environment has no exact measure.
    """
    env.reset(trajectory.task, trajectory.seed)
    qualities = []
    for turn in trajectory.turns:
        quality = 0.0
        if turn.action is not None:
            quality = env.action_quality(turn.action, turn.turns_left)
            if quality is None:
                raise UsageError(f"{env.name} has no exact action values: use --process-reward judge, or none")
            env.step(turn.action)
        qualities.append(quality)
    env.close()
    return qualities


# ---- the judge ----

# Paper A, Table 3, word for word. The score is mapped to [0, 1] by dividing by 10.
JUDGE_SYSTEM = """\
You are evaluating one action taken by an agent in an interactive task.
Given the task, interaction history, current observation, and remaining interaction budget, rate the proposed action \
with an integer from 0 to 10. Evaluate its correctness, relevance, and expected contribution to completing the task \
efficiently. Necessary intermediate steps can receive full credit. Do not reward verbosity or redundant actions."""

JUDGE_INPUT = """\
Task: {task}
Interaction history: {history}
Current observation: {observation}
Remaining turns, including this action: {remaining_turns}
Action to evaluate: {action}

OUTPUT FORMAT
Output only one integer from 0 to 10, with no explanation."""


@dataclass
class JudgeOptions(Endpoint):
    """The judge of --process-reward judge."""

    model: str = ""
    """Name of the judging model (paper: GPT-5.6-Sol)."""
    history: int = 8
    """Earlier turns that the judge is shown."""


def parse_score(text: str) -> float | None:
    """ "7" -> 0.7. None for anything but one integer from 0 to 10: a judge that explains itself was not asked to, and a
    parser that looks for a number finds the 10 in "out of 10"."""
    match = re.fullmatch(r"\s*(10|[0-9])\s*", text)
    return int(match[1]) / 10 if match else None


class Judge:
    """Scores each action before its execution with a language model (paper A, B.6)."""

    def __init__(self, chat: ChatAPI, history: int = 8):
        self.chat, self.history = chat, history

    def questions(self, trajectory: Trajectory, env: Env) -> list[list[dict[str, str]]]:
        """The chat messages that ask for each turn's score."""
        asked = []
        for t, turn in enumerate(trajectory.turns):
            earlier = trajectory.turns[max(0, t - self.history) : t]
            text = JUDGE_INPUT.format(
                task=env.instruction,
                history="\n".join(f"{e.observation}\n-> {e.response}" for e in earlier) or "(none)",
                observation=turn.observation,
                remaining_turns=turn.turns_left,
                action=turn.response if turn.action is None else turn.action,
            )
            asked.append([{"role": "system", "content": JUDGE_SYSTEM}, {"role": "user", "content": text}])
        return asked

    def score(self, messages: list[dict[str, str]]) -> float | None:
        """One score in [0, 1]; None when the judge talks nonsense three times in a row."""
        answers = (self.chat.ask(messages, attempt)[0] for attempt in range(3))
        return next((score for score in map(parse_score, answers) if score is not None), None)

    def __call__(self, trajectories: list[Trajectory], env: Env) -> list[list[float | None]]:
        """One score per turn per trajectory; equal questions are asked once. UsageError when the endpoint stays down."""
        asked = [self.questions(t, env) for t in trajectories]
        distinct = {q[1]["content"]: q for questions in asked for q in questions}
        answers = side_by_side(self.score, distinct.values(), self.chat.endpoint.parallel)
        scores = dict(zip(distinct, answers, strict=True))
        return [[scores[q[1]["content"]] for q in questions] for questions in asked]


# ---- for the training loop ----


def has_oracle(env: Env) -> bool:
    """Whether an environment knows exact action values."""
    env.reset(env.tasks("val", 1, 0)[0], seed=0)
    known = env.action_quality("", 1) is not None
    env.close()
    return known


def check(kind: str, options: JudgeOptions, new_env: Callable[[], Env]) -> None:
    """Refuse step rewards that cannot be given, before anything is trained. Raises UsageError."""
    if kind == "oracle" and not has_oracle(new_env()):
        raise UsageError(f"{new_env().name} has no exact action values: use --process-reward judge, or none")
    if kind != "judge":
        return
    if not options.model:
        raise UsageError("a judge needs the name of a model: --judge.model NAME (and --judge.base-url)")
    options.check("judge")
    if options.history < 0:
        raise UsageError(f"judge: history must not be negative, not {options.history}")


def scorer(
    kind: str, options: JudgeOptions, new_env: Callable[[], Env], out: Path
) -> Callable[[list[Trajectory]], dict[str, float]]:
    """A function that gives every turn of a batch its `process_reward` and returns diagnostics; `kind` is none, oracle or
    judge. The judge's answers are kept in `out`/judge.sqlite."""
    if kind == "none":
        return lambda trajectories: {}
    if kind == "oracle":
        score = lambda trajectories: [oracle(t, new_env()) for t in trajectories]  # noqa: E731
    else:
        chat = ChatAPI(options.model, options, make_folder(out) / "judge.sqlite")
        judge, env = Judge(chat, options.history), new_env()
        score = lambda trajectories: judge(trajectories, env)  # noqa: E731

    def give(trajectories: list[Trajectory]) -> dict[str, float]:
        scores = score(trajectories)
        for trajectory, own in zip(trajectories, scores, strict=True):
            for turn, reward in zip(trajectory.turns, own, strict=True):
                turn.process_reward = reward
        given = [s for own in scores for s in own if s is not None]
        total = sum(map(len, scores))
        return {"process_reward": sum(given) / max(1, len(given)), "unscored_turns": 1 - len(given) / max(1, total)}

    return give
