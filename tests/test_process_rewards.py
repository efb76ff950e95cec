"""Step rewards: the oracle against the environment, the judge against a real HTTP server that misbehaves."""

import json
import signal
import time
from dataclasses import replace
from functools import partial

import pytest

import envs
import grpo
from api import ChatAPI, Endpoint
from chat import Sampling
from envs import Task, UsageError
from grpo import GroupCredit, process_advantages
from process_rewards import Judge, JudgeOptions, check, oracle, parse_score, scorer
from rollout import Trajectory, Turn, play

CORRIDOR = Task("corridor", "test", ("SFG", "HHH", "FFF"))
new_lake = partial(envs.make, "frozenlake", size=3, max_turns=6)


def trajectory(*actions, budget=4, seed=0):
    """What `play` would record of these actions in the corridor."""
    env, made = new_lake(), Trajectory(CORRIDOR, seed, budget)
    observation = env.reset(CORRIDOR, seed)
    for t, action in enumerate(actions):
        state, before = env.state(), observation
        step = env.step(action) if action is not None else None
        observation, reward = (step.observation, step.reward) if step else (before, 0.0)
        response = f"<action>{action}</action>" if action else "mumble"
        made.turns.append(
            Turn((1,), (2, 3), (-0.1, -0.1), before, response, action, None, bool(step), reward, state, budget - t)
        )
        made.reward += reward
    return made


# ---- the oracle ----


def test_the_oracle_is_raw_q_star_of_each_action_with_the_turns_that_were_left():
    # Four turns left: bumping into the wall wastes one, then two steps reach the goal: 0.95^2. An answer without an
    # action earns 0. Two left, one step from the start: 0.95. One left: the goal itself, 1.
    assert oracle(trajectory("left", None, "right", "right"), new_lake()) == pytest.approx([0.95**2, 0.0, 0.95, 1.0])
    # Out of reach: with one turn left no step from the start can succeed. The value is 0, not "as good as any other".
    assert oracle(trajectory("right", budget=1), new_lake()) == [0.0]
    assert oracle(trajectory("jump", budget=4), new_lake()) == [0.0]


def test_the_oracle_replays_real_trajectories_to_the_states_they_were_in(engine):
    slippery = partial(envs.make, "frozenlake", slip=0.3)
    games = [(task, seed, 8) for seed, task in enumerate(slippery().tasks("train", 6, 0))]
    for played in play(engine, slippery, games, Sampling(max_tokens=8), seed=0):
        env = slippery()
        env.reset(played.task, played.seed)
        expected = []
        for turn in played.turns:
            assert env.state() == turn.state, "the slips come from the recorded seed"
            expected.append(0.0 if turn.action is None else env.action_quality(turn.action, turn.turns_left))
            if turn.action is not None:
                env.step(turn.action)
        assert oracle(played, slippery()) == expected


def test_an_environment_without_exact_values_says_so():
    fog = partial(envs.make, "frozenlake-fog", size=3)
    with pytest.raises(UsageError, match="FrozenLake-Fog has no exact action values: use --process-reward judge"):
        oracle(trajectory("right"), fog())


# ---- from step rewards to advantages ----


def test_two_turns_of_one_trajectory_get_different_advantages(tmp_path):
    group = [trajectory("left", "right", "right"), trajectory("down")]
    diagnostics = scorer("oracle", JudgeOptions(), new_lake, tmp_path)(group)
    rewards = [[turn.process_reward for turn in t.turns] for t in group]
    assert rewards == [pytest.approx([0.95**2, 0.95, 1.0]), [0.0]]
    assert diagnostics == {"process_reward": pytest.approx((0.95**2 + 1.95) / 4), "unscored_turns": 0.0}
    # Normalised over the four scored turns of the group, then added to the outcome's advantage (+-0.7071 for 1 and 0).
    flat = [0.95**2, 0.95, 1.0, 0.0]
    mean = sum(flat) / 4
    std = (sum((x - mean) ** 2 for x in flat) / 3) ** 0.5
    credit = GroupCredit(replace(ARGS, process_reward="oracle", process_weight=2.0), "", 0).turn_advantages(group)
    outcome = 2**-0.5
    assert credit[0] == pytest.approx([outcome + 2.0 * (x - mean) / std for x in flat[:3]], rel=1e-4)
    assert credit[1] == pytest.approx([-outcome - 2.0 * mean / std], rel=1e-4)
    assert credit[0][0] != credit[0][2]


def test_turns_without_a_score_get_no_step_credit():
    group = [trajectory("left", "right"), trajectory("right")]
    group[0].turns[0].process_reward, group[1].turns[0].process_reward = 1.0, 0.0
    assert process_advantages(group) == [pytest.approx([2**-0.5, 0.0], rel=1e-4), pytest.approx([-(2**-0.5)], rel=1e-4)]
    assert process_advantages([trajectory("left")]) == [[0.0]]


# ---- the judge ----


@pytest.mark.parametrize("text, score", [("7", 0.7), (" 10\n", 1.0), ("0", 0.0), ("3", 0.3)])
def test_scores(text, score):
    assert parse_score(text) == score


@pytest.mark.parametrize(
    "text", ["", "11", "-1", "7.5", "7/10", "Score: 7", "7 of 10", "seven", "07", "1 0", "7\n8", "٧", "100"]
)
def test_anything_but_one_integer_is_no_score(text):
    assert parse_score(text) is None


ARGS = grpo.Args(env_args=("size=3", "max_turns=6"))


def chat(server, tmp_path, **options):
    return ChatAPI("m", Endpoint(server.url, **{"timeout": 5.0, "retries": 1} | options), tmp_path / "cache.sqlite")


def test_the_judge_sees_table_3_and_scores_every_turn(server, tmp_path):
    played = trajectory("left", None, "right")
    assert Judge(chat(server, tmp_path))([played], new_lake()) == [[0.7, 0.7, 0.7]]
    (system, user) = server.requests[-1][1]["messages"]
    assert system["content"].startswith(
        "You are evaluating one action taken by an agent in an interactive task.\nGiven the"
    )
    assert system["content"].endswith("Do not reward verbosity or redundant actions.")
    asked = {body["messages"][1]["content"] for _, body in server.requests}
    assert len(asked) == 3
    last = next(text for text in asked if "Remaining turns, including this action: 2" in text)
    assert "Task: Walk over the ice" in last and "-> <action>left</action>" in last and "-> mumble" in last
    assert "Current observation: P . G" in last and "Action to evaluate: right" in last
    assert last.endswith("Output only one integer from 0 to 10, with no explanation.")
    assert next(t for t in asked if "including this action: 4" in t).count("Interaction history: (none)") == 1
    assert "Action to evaluate: mumble" in next(t for t in asked if "including this action: 3" in t)


def test_each_question_is_asked_once_and_answers_survive_the_process(server, tmp_path):
    played = [trajectory("left", "right"), trajectory("left", "right"), trajectory("left", "left")]
    first = Judge(chat(server, tmp_path))(played, new_lake())
    assert len(server.requests) == 3, "six turns, three different questions"
    server.behave = lambda n, body: (500, "down")
    assert Judge(chat(server, tmp_path))(played, new_lake()) == first
    assert len(server.requests) == 3
    # Another model is another question.
    with pytest.raises(UsageError):
        Judge(ChatAPI("other", Endpoint(server.url, timeout=5.0, retries=0), tmp_path / "cache.sqlite"))(
            played, new_lake()
        )


def test_calls_run_side_by_side_but_never_more_than_allowed(server, tmp_path):
    def slow(n, body):
        time.sleep(0.1)
        return 200, "5"

    server.behave = slow
    played = [trajectory(*["left"] * n, budget=n) for n in range(1, 5)]
    Judge(chat(server, tmp_path, parallel=3))(played, new_lake())
    assert server.most == 3 and len(server.requests) == 10


def test_nonsense_is_asked_again_and_then_left_without_a_score(server, tmp_path):
    server.behave = lambda n, body: (200, "I would say 7 out of 10." if n == 1 else "8")
    judge = Judge(chat(server, tmp_path))
    assert judge([trajectory("left")], new_lake()) == [[0.8]]
    server.behave = lambda n, body: (200, "as an AI model")
    assert judge([trajectory("right")], new_lake()) == [[None]]
    assert len(server.requests) == 2 + 3


def test_errors_are_retried(server, tmp_path):
    server.behave = lambda n, body: (500, "oops") if n == 1 else (200, "4")
    assert Judge(chat(server, tmp_path))([trajectory("left")], new_lake()) == [[0.4]]
    started = time.perf_counter()
    server.behave = lambda n, body: (429, "slow down") if n == 3 else (200, "6")
    assert Judge(chat(server, tmp_path))([trajectory("right")], new_lake()) == [[0.6]]
    assert time.perf_counter() - started >= 1.0, "Retry-After says one second"


@pytest.mark.parametrize(
    "answer",
    [(500, "down"), (401, b'{"error": {"message": "no such key"}}'), (200, b"<html>hello</html>"), (200, b"{"), (200, b"{}"),
     (200, b'{"choices": []}'), (200, b'{"choices": {"a": 1}}'), (200, 7), (200, ["7"])],
)  # fmt: skip
def test_an_endpoint_that_stays_down_is_a_clear_stop_and_keeps_what_was_answered(answer, server, tmp_path):
    def behave(n, body):
        return (200, "9") if "including this action: 4" in body["messages"][1]["content"] else answer

    server.behave = behave
    judge = Judge(chat(server, tmp_path, retries=0, parallel=1))
    with pytest.raises(UsageError, match=r"no answer from http://127.0.0.1:\d+/v1 .*the same command goes on") as error:
        judge([trajectory("left", "right")], new_lake())
    assert "\n" not in str(error.value)
    server.behave = lambda n, body: (200, "1")
    assert judge([trajectory("left", "right")], new_lake()) == [[0.9, 0.1]], "the first answer was kept"


def test_a_server_that_stalls_runs_into_the_timeout(server, tmp_path):
    server.behave = lambda n, body: time.sleep(1.5) or (200, "5")
    started = time.perf_counter()
    with pytest.raises(UsageError, match="APITimeoutError"):
        Judge(chat(server, tmp_path, timeout=0.3, retries=0))([trajectory("left")], new_lake())
    assert time.perf_counter() - started < 1.4


def test_a_run_with_a_judge_stops_clearly_and_resumes(server, base, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    args = replace(
        ARGS, model=str(base), out=tmp_path, steps=2, tasks_per_step=2, group_size=2, train_tasks=10, lora_rank=4,
        lora_alpha=8, process_reward="judge", judge=JudgeOptions(server.url, model="m", parallel=4, timeout=5.0, retries=0),
    )  # fmt: skip
    server.behave = lambda n, body: (200, str(len(body["messages"][1]["content"]) % 11))
    straight = grpo.train(args, tmp_path / "straight")
    (tmp_path / "judge.sqlite").unlink()
    asked = len(server.requests)
    working = server.behave
    server.behave = lambda n, body: working(n, body) if n < asked + 6 else (503, "maintenance")
    with pytest.raises(UsageError, match="no answer from"):
        grpo.train(args, tmp_path / "run")
    server.behave = working
    run = grpo.train(replace(args, resume=(tmp_path / "run" / "config.json").exists()), tmp_path / "run")
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        ours, theirs = ((folder / name).read_text().splitlines() for folder in (run, straight))
        for one, other in zip(ours, theirs, strict=True):
            timing = ("rollout_s", "step_s", "turns_per_s")
            one, other = ({k: v for k, v in json.loads(x).items() if k not in timing} for x in (one, other))
            assert one == other
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["process_reward"] > 0
    assert server.requests[-1][0] == "Bearer secret-key"
    kept = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert b"secret-key" not in kept, "the key is sent and nowhere kept"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("judge", JudgeOptions(), "--judge.model"),
        ("judge", JudgeOptions(model="m", parallel=0), "parallel must be at least 1"),
        ("judge", JudgeOptions(model="m", timeout=float("nan")), "timeout above 0"),
        ("judge", JudgeOptions(model="m", base_url="http://me:secret@host/v1"), "must not hold a password"),
    ],
)
def test_step_rewards_that_cannot_be_given_are_refused_at_the_start(kind, options, message):
    with pytest.raises(UsageError, match=message):
        check(kind, options, new_lake)


def test_the_oracle_is_refused_at_the_start_where_there_is_none(base, tmp_path):
    args = grpo.Args(env="frozenlake-fog", model=str(base), out=tmp_path, process_reward="oracle")
    with pytest.raises(UsageError, match="FrozenLake-Fog has no exact action values"):
        grpo.train(args, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ctrl_c_does_not_wait_for_the_queue(server, tmp_path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored

    def behave(n, body):
        if n == 2:
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)
        return 200, "5"

    server.behave = behave
    with pytest.raises(KeyboardInterrupt):
        Judge(chat(server, tmp_path, parallel=1))([trajectory(*["left"] * 30, budget=30)], new_lake())
    assert len(server.requests) < 10


def test_a_cache_that_is_no_database_is_named(tmp_path):
    (tmp_path / "cache.sqlite").write_text("no database, but long enough to be looked at" * 50)
    with pytest.raises(UsageError, match="cannot use .*cache.sqlite"):
        ChatAPI("m", Endpoint("http://127.0.0.1:1/v1"), tmp_path / "cache.sqlite")
