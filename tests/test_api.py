"""Endpoints: a real HTTP server that behaves as badly as servers do, and the engine that evaluates what is behind it."""

import json
import sqlite3
import time
from functools import partial

import pytest

import budgetmix
import envs
import evaluate
from api import APIEngine, ChatAPI, Endpoint
from chat import Prompt, Sampling, TextCodec
from envs import UsageError
from rollout import play
from warmstart import ModelArgs

lake = partial(envs.make, "frozenlake", size=3, max_turns=4)


def engine(server, out, **options) -> APIEngine:
    patience = {"timeout": 5.0, "retries": 3, "parallel": 4} | options
    return APIEngine(ModelArgs(model="openai:m", out=out, endpoint=Endpoint(server.url, **patience)))


def prompt(**more) -> Prompt:
    return TextCodec().encode([{"role": "user", "content": "P"} | more])


def reply(text, finish_reason="stop", **more) -> bytes:
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text}} | more
    return json.dumps(
        {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    ).encode()


def test_it_plays_and_sends_what_the_paper_says(server, tmp_path):
    server.behave = lambda n, body: (200, "Let me see. <action>right</action>")
    task = lake().tasks("train", 1, 0)[0]
    (t,) = play(engine(server, tmp_path), lake, [(task, 0, 3)], Sampling(0.6, 0.9, 50), seed=0, history=1)
    (_, first), (_, second) = server.requests[:2]
    assert first["model"] == "m" and (first["temperature"], first["top_p"], first["max_tokens"]) == (0.6, 0.9, 50)
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert "Number of turns remaining: 3." in first["messages"][0]["content"]
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert t.turns[0].action == "right" and t.turns[0].valid and t.turns[0].response_ids == () == t.turns[0].logprobs


@pytest.mark.parametrize(
    "raw, problem",
    [
        (reply("<action>right</action>", "length"), "cut off by the length limit"),
        (reply(None), "holds no <action>"),
        (reply("<think>right? <action>right</action>"), "never closed"),
        (reply("", "content_filter"), "holds no <action>"),
    ],
)
def test_answers_that_are_no_action_cost_a_turn(raw, problem, server, tmp_path):
    server.behave = lambda n, body: (200, raw)
    (t,) = play(engine(server, tmp_path), lake, [(lake().tasks("train", 1, 0)[0], 0, 2)], Sampling(), seed=0)
    assert t.stop == "budget" and not any(turn.valid for turn in t.turns)
    assert problem in server.requests[1][1]["messages"][-1]["content"]


BAD = {
    "500": (500, "down"),
    "429 with Retry-After": (429, "slow down"),
    "cut-off JSON": (200, reply("<action>right</action>")[:60]),
    "no choices": (200, json.dumps({"id": "x", "object": "chat.completion", "choices": []}).encode()),
    "no JSON at all": (200, b"<html>bad gateway</html>"),
    "no UTF-8": (200, b'{"choices": "\xff\xfe"}'),
    "JSON without a bottom": (200, b"[" * 100_000),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_answers_are_asked_for_again(bad, server, tmp_path):
    server.behave = lambda n, body: BAD[bad] if n == 1 else (200, "<action>right</action>")
    started = time.monotonic()
    answers = engine(server, tmp_path).generate([prompt()], Sampling(), seed=0)
    assert answers[0].text == "<action>right</action>" and len(server.requests) == 2
    if "Retry-After" in bad:
        assert time.monotonic() - started > 0.9, "the server said one second"


def test_the_address_may_come_from_the_environment_and_no_key_is_needed(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "")
    api = APIEngine(ModelArgs(model="openai:m", out=tmp_path))
    assert api.generate([prompt()], Sampling(), 0)[0].text == "7" and "max_tokens" in server.requests[0][1]
    monkeypatch.setenv("OPENAI_BASE_URL", "http://me:secret@127.0.0.1:1/v1")
    with pytest.raises(UsageError, match="must not hold a password") as error:
        ChatAPI("m", Endpoint(), tmp_path / "secret.sqlite")
    assert "secret" not in str(error.value) and not (tmp_path / "secret.sqlite").exists()
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "schlüssel")
    with pytest.raises(UsageError, match="OPENAI_API_KEY holds characters that no key has"):
        APIEngine(ModelArgs(model="openai:m", out=tmp_path))


def test_text_that_is_no_text_is_kept_as_far_as_it_can_be(server, tmp_path):
    server.behave = lambda n, body: (200, "a\ud800b <action>right</action>")
    api = engine(server, tmp_path)
    texts = [api.generate([prompt()], Sampling(), 0)[0].text for _ in range(2)]
    assert texts == ["a?b <action>right</action>"] * 2 and len(server.requests) == 1


def test_a_stalling_server_is_asked_again(server, tmp_path):
    def behave(n, body):
        if n == 1:
            time.sleep(1.0)
        return 200, "<action>right</action>"

    server.behave = behave
    assert engine(server, tmp_path, timeout=0.3).generate([prompt()], Sampling(), 0)[0].finished


@pytest.mark.parametrize("bad", BAD)
def test_an_endpoint_that_stays_down_is_a_clear_stop_and_nothing_is_paid_twice(bad, server, tmp_path, command, capsys):
    """It answers for a while, then breaks, then works: the evaluation ends where an undisturbed one does."""
    words = (
        "base",
        "--model",
        "openai:m",
        "--endpoint.base-url",
        server.url,
        "--endpoint.parallel",
        1,
        "--max-tokens",
        9,
    )
    words += ("--endpoint.retries", 0, "--env-args", "size=3", "max_turns=4", "--eval-tasks", 3, "--n", 2, "--k", 2)

    def honest(n, body):
        turn = body["messages"][0]["content"].split("remaining: ")[1]
        return 200, f"<action>{'right' if int(turn[0]) % 2 else 'down'}</action>"

    server.behave = honest
    assert command(evaluate, *words, "--out", tmp_path / "straight") == 0
    undisturbed, table = len(server.requests), capsys.readouterr().out.split("| base |")[1]

    server.requests.clear()
    server.behave = lambda n, body: honest(n, body) if n <= 5 else BAD[bad]
    assert command(evaluate, *words, "--out", tmp_path / "broken") == 2
    error = capsys.readouterr().err.splitlines()[-1]  # before it stands what the progress bar drew
    assert error.startswith("error: no answer from http://127.0.0.1") and "the same command goes on" in error
    tried = len(server.requests) - 5
    server.behave = honest
    assert command(evaluate, *words, "--out", tmp_path / "broken") == 0
    assert capsys.readouterr().out.split("| base |")[1] == table
    assert len(server.requests) - tried == undisturbed, "the five answers of before the break were not asked for again"


def test_equal_prompts_are_different_samples(server, tmp_path):
    server.behave = lambda n, body: (200, f"answer {n}")
    api = engine(server, tmp_path)
    texts = [c.text for c in api.generate([prompt()] * 5, Sampling(), seed=0)]
    assert len(set(texts)) == 5
    assert [c.text for c in api.generate([prompt()] * 5, Sampling(), seed=0)] == texts and len(server.requests) == 5
    assert not set(texts) & {c.text for c in api.generate([prompt()] * 5, Sampling(), seed=1)}


def test_openais_own_models_are_told_the_limit_by_its_new_name(server, tmp_path):
    api = engine(server, tmp_path)
    api.chat.base_url = None  # as if the server were OpenAI's
    api.generate([prompt()], Sampling(max_tokens=7), 0)
    assert server.requests[0][1]["max_completion_tokens"] == 7 and "max_tokens" not in server.requests[0][1]


def test_pictures_are_sent_as_data(server, tmp_path):
    engine(server, tmp_path).generate([prompt(image=b"\x89PNG")], Sampling(), 0)
    (image, text) = server.requests[0][1]["messages"][0]["content"]
    assert image == {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
    assert text == {"type": "text", "text": "P"}


def test_the_key_comes_from_the_environment_and_is_kept_nowhere(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-123")
    engine(server, tmp_path).generate([prompt()], Sampling(), 0)
    assert server.requests[0][0] == "Bearer sk-secret-123"
    assert all(b"sk-secret-123" not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_what_cannot_be_done_with_an_endpoint_is_said_at_the_start(server, tmp_path, command, capsys):
    assert command(budgetmix, "--model", "openai:m", "--out", tmp_path) == 2
    assert (
        "openai:m is behind an endpoint and cannot be trained: evaluate it with evaluate.py" in capsys.readouterr().err
    )
    for words, message in (
        (("--endpoint.base-url", "http://me:pw@host/v1"), "--endpoint.base-url must not hold a password"),
        (
            ("--endpoint.base-url", "http://127.0.0.1:abc/v1"),
            "--endpoint.base-url must be like http://localhost:8000/v1",
        ),
        (("--endpoint.base-url", "notaurl"), "must be like http://localhost:8000/v1, not 'notaurl'"),
        (("--endpoint.parallel", 0), "endpoint: parallel must be at least 1"),
        (("--endpoint.timeout", "nan"), "timeout above 0"),
    ):
        assert command(evaluate, "base", "--model", "openai:m", "--out", tmp_path, *words) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(UsageError, match="takes no adapter"):
        engine(server, tmp_path).load_adapter(tmp_path)
    assert not server.requests


@pytest.mark.parametrize("damage", ["no database", "damaged pages", "another table"])
def test_a_file_that_cannot_keep_answers_is_named(damage, server, tmp_path):
    file = tmp_path / "answers.sqlite"
    if damage == "no database":
        file.write_text("no database, but long enough to be looked at" * 50)
    elif damage == "another table":
        sqlite3.connect(file).execute("create table replies (question text primary key, answer text)")
    else:
        engine(server, tmp_path).generate([prompt()], Sampling(), 0)
        whole = file.read_bytes()
        file.write_bytes(whole[:100] + b"x" * (len(whole) - 100))
    with pytest.raises(UsageError, match="cannot use .*answers.sqlite to keep the answers in .* move it away"):
        engine(server, tmp_path).generate([prompt()], Sampling(), 1)
