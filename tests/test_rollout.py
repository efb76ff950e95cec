"""Acting: the prompt, the parser, the sampler against a plain forward pass, and the rules of the game loop."""

from functools import partial

import pytest

import envs
from chat import NOTICES, Codec, Completion, Sampling
from envs import Env, Step, Task, UsageError
from rollout import Episode, State, play, render_prompt

new_lake = partial(envs.make, "frozenlake", max_turns=6)


def a_task(seed=0) -> Task:
    return new_lake().tasks("train", 1, seed)[0]


# ---- prompt ----


def test_the_prompt_is_table_2_with_the_counters_of_now():
    system, user = render_prompt(new_lake(), budget=18, completed=5, recent=[], observation="P G")
    assert user == {"role": "user", "content": "P G"}
    assert system["role"] == "system"
    for sentence in (
        "You are an agent interacting with the FrozenLake task under a finite interaction budget. One interaction turn "
        "consists of one action from you followed by one observation from the environment.",
        "Maximum number of interaction turns: 18.",
        "Number of turns already completed: 5.",
        "Number of turns remaining: 13.",
        "Follow the task-specific instruction below. At each turn, output exactly one action in the required format. Do not "
        "output multiple actions in one turn, and do not assume that additional turns will be available after the budget is "
        "exhausted.",
        "TASK-SPECIFIC INSTRUCTION\nWalk over the ice",
        "ACTION FORMAT\nOutput exactly one action in the following format:\n<action>move</action>",
    ):
        assert sentence in system["content"]


def test_history_enters_as_text_and_only_the_last_turns(engine):
    episode = Episode(new_lake(), engine.codec, State(a_task(), 0, 6), history=2)
    encode = engine.codec.tokenizer.encode
    end = engine.codec.tokenizer.eos_token_id
    for word in ("jump", "hop", "skip"):
        ids = (*encode(f"<action>{word}</action>", add_special_tokens=False), end)
        episode.act(episode.prompt(), Completion(ids, (0.0,) * len(ids), True))
    text = engine.codec.tokenizer.decode(episode.prompt().ids)
    assert "jump" not in text and "<action>hop</action>" in text and "<action>skip</action>" in text
    assert text.count("<|im_start|>assistant\n") == 3  # two past turns and the one to come
    assert "Number of turns already completed: 3.\nNumber of turns remaining: 3." in text


# ---- the game loop ----


class Script:
    """An engine that says given sentences in turn: the game loop without a model."""

    context = 10_000

    def __init__(self, tokenizer, *sentences, finished=True):
        self.codec, self.sentences, self.finished, self.asked = Codec(tokenizer), list(sentences), finished, []

    def generate(self, prompts, sampling, seed):
        self.asked.append(prompts)
        said = self.sentences.pop(0)
        ids = tuple(self.codec.tokenizer.encode(said, add_special_tokens=False))
        return [Completion(ids, (0.0,) * len(ids), self.finished) for _ in prompts]

    def load_adapter(self, path):
        raise AssertionError("a script has no adapter")


def lake_task(*rows):
    return Task("by hand", "test", rows)


def test_success_failure_and_budget(policy):
    tokenizer = policy[1]
    corridor = lake_task("SFG", "HHH", "FFF")
    say = lambda *moves: Script(tokenizer, *(f"<action>{m}</action>" for m in moves))  # noqa: E731
    new_env = partial(envs.make, "frozenlake", size=3)
    (won,) = play(say("right", "right"), new_env, [(corridor, 0, 2)], Sampling(), 0)
    assert (won.success, won.reward, won.stop, len(won.turns)) == (True, 1.0, "success", 2)
    assert [t.turns_left for t in won.turns] == [2, 1] and [t.reward for t in won.turns] == [0.0, 1.0]
    assert [t.state for t in won.turns] == [0, 1], "the anchor is the state before the action"
    (fell,) = play(say("down"), new_env, [(corridor, 0, 5)], Sampling(), 0)
    assert (fell.success, fell.reward, fell.stop, len(fell.turns)) == (False, 0.0, "failure", 1)
    (late,) = play(say("right", "left"), new_env, [(corridor, 0, 2)], Sampling(), 0)
    assert (late.success, late.reward, late.stop, len(late.turns)) == (False, 0.0, "budget", 2)


def test_an_invalid_answer_costs_a_turn_and_says_why(policy):
    script = Script(
        policy[1], "up or down", "<action>up</action> then", "<action>jump</action>", "<action>left</action>"
    )
    (t,) = play(
        script, partial(envs.make, "frozenlake", size=3), [(lake_task("SFG", "HHH", "FFF"), 0, 4)], Sampling(), 0
    )
    assert [turn.valid for turn in t.turns] == [False, False, False, True]
    assert [turn.action for turn in t.turns] == [None, None, "jump", "left"]
    assert t.turns[1].observation == NOTICES["missing"] + t.turns[0].observation
    assert t.turns[2].observation == NOTICES["trailing"] + t.turns[0].observation, "the older notice is gone"
    assert t.turns[3].observation.startswith("Invalid action: it must be one of left, down, right, up.")
    assert t.stop == "budget"


def test_a_response_cut_off_by_the_length_limit_is_invalid_even_if_it_reads_well(policy):
    script = Script(policy[1], "<action>right</action>", finished=False)
    (t,) = play(
        script, partial(envs.make, "frozenlake", size=3), [(lake_task("SFG", "HHH", "FFF"), 0, 1)], Sampling(), 0
    )
    assert not t.turns[0].valid and t.turns[0].action is None and t.turns[0].action_span is None


def test_a_prompt_that_does_not_fit_ends_the_episode_as_context(policy):
    script = Script(policy[1])
    script.context = 20
    (t,) = play(script, new_lake, [(a_task(), 0, 3)], Sampling(max_tokens=8), 0)
    assert (t.stop, t.turns, t.success) == ("context", [], False) and script.asked == []


def test_play_keeps_the_order_of_the_games_and_closes_every_environment(engine):
    closed = []

    class Watched(type(new_lake())):
        def close(self):
            closed.append(self)

    tasks = new_lake().tasks("train", 4, 0)
    games = [(t, i, 1 + i) for i, t in enumerate(tasks)]
    played = play(engine, Watched, games, Sampling(max_tokens=8), seed=0)
    assert [(t.task, t.seed, t.budget) for t in played] == games
    assert all(1 <= len(t.turns) <= t.budget for t in played) and len(closed) == 4
    assert play(engine, Watched, [], Sampling(), 0) == []


def test_a_budget_below_one_turn_is_refused(engine):
    with pytest.raises(UsageError, match="a budget must be at least 1 turn, not 0"):
        play(engine, new_lake, [(a_task(), 0, 0)], Sampling(), 0)


def test_a_new_environment_is_its_contract_and_nothing_more(engine):
    class Echo(Env):
        name, max_turns, instruction, action_format = "Echo", 3, "Say yes.", "<action>yes</action>"

        def tasks(self, split, n, seed):
            return [Task(f"{split}-{i}", split, i) for i in range(n)]

        def reset(self, task, seed):
            return "?"

        def step(self, action):
            return Step("!", float(action == "yes"), action == "yes", action == "yes", valid=action == "yes")

        def state(self):
            return "?"

    (t,) = play(
        Script(engine.codec.tokenizer, "<action>yes</action>"),
        Echo,
        [(Echo().tasks("test", 1, 0)[0], 0, 3)],
        Sampling(),
        0,
    )
    assert t.success and Echo().min_turns(t.task) is None and Echo().action_quality("yes", 1) is None
