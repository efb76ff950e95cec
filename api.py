"""Models behind an endpoint: text in, text out, no log-probs. They can judge steps and be evaluated, not trained.

    python evaluate.py base --env frozenlake --model openai:MODEL --endpoint.base-url http://localhost:8000/v1

Any OpenAI-compatible server will do (vLLM's and llama.cpp's own are). Two things matter when answers cost money and
servers have bad days:

- *Every answer is kept*, in a SQLite file, the moment it arrives. An evaluation that was stopped asks the same questions
  when it is started again (they are numbered by what was sampled, see `APIEngine`), and pays for none of them twice.
- *Every failure is tried again, and then said.* No connection, stalls, 429 and 5xx are retried by the client, with
  growing pauses that honour Retry-After; a reply that is no chat completion (cut-off JSON, no choices) is asked for once
  more here. When they persist, the run stops with one line.
"""

import base64
import json
import os
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import tenacity

from chat import Completion, Prompt, Sampling, TextCodec
from envs import UsageError
from runs import make_folder

# What a server that answers 200 may send in place of a chat completion ends in one of these.
MALFORMED = (openai.APIResponseValidationError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass
class Endpoint:
    """Where models are asked, and how patiently."""

    base_url: str = ""
    """Address of an OpenAI-compatible server, for example http://localhost:8000/v1; empty: OpenAI's own. The key is read
    from OPENAI_API_KEY."""
    parallel: int = 8
    """Questions asked at a time."""
    timeout: float = 60.0
    """Seconds to wait for an answer."""
    retries: int = 4
    """How often a failed call is repeated, with growing pauses."""

    @property
    def address(self) -> str:
        """Where it is: without a base_url what OPENAI_BASE_URL says; empty: OpenAI's own."""
        return self.base_url or os.environ.get("OPENAI_BASE_URL", "")

    def check(self, name: str) -> None:
        """Refuse values that cannot be meant; `name` is that of the options. Raises UsageError."""
        if self.parallel < 1 or not self.timeout > 0 or self.retries < 0:
            raise UsageError(f"{name}: parallel must be at least 1, timeout above 0, retries not negative")
        if "@" in self.base_url:
            raise UsageError(f"--{name}.base-url must not hold a password (it would be stored): use OPENAI_API_KEY")
        try:
            url = urlsplit(self.base_url)
            usable = not self.base_url or (url.scheme in ("http", "https") and url.hostname and url.port != 0)
        except ValueError:  # a port that is no number
            usable = False
        if not usable:
            raise UsageError(f"--{name}.base-url must be like http://localhost:8000/v1, not {self.base_url!r}")


class ChatAPI:
    """Answers from any OpenAI-compatible endpoint, each distinct question asked once: answers are kept in a SQLite
    file. The key is read from OPENAI_API_KEY and kept nowhere."""

    def __init__(self, model: str, endpoint: Endpoint, cache: Path):
        self.model, self.endpoint = model, endpoint
        self.base_url = endpoint.address or None
        if "@" in endpoint.address:
            raise UsageError("OPENAI_BASE_URL must not hold a password (it would be stored): use OPENAI_API_KEY")
        key = os.environ.get("OPENAI_API_KEY") or "none"  # local servers want no key, but the client wants some
        if not key.isascii():
            raise UsageError("OPENAI_API_KEY holds characters that no key has")
        patience = {"timeout": endpoint.timeout, "max_retries": endpoint.retries}
        self.client = openai.OpenAI(api_key=key, base_url=self.base_url, **patience)
        self.lock = threading.Lock()  # one connection for all threads that ask side by side
        self.cache = cache
        try:
            self.answers = sqlite3.connect(cache, timeout=60.0, check_same_thread=False)
        except sqlite3.Error as error:
            raise self._unusable(error) from None
        self._keep("create table if not exists replies (question text primary key, answer text not null, finished int)")

    def ask(self, messages: list[dict[str, Any]], attempt: int | str = 0, **options: Any) -> tuple[str, bool]:
        """(the text that the model answers to chat messages, whether it came to its end). `attempt` distinguishes repeated
        asking of one question. Raises UsageError when there is no answer to be had."""
        question = json.dumps([self.base_url, self.model, messages, options, attempt])
        found = self._keep("select answer, finished from replies where question = ?", question)
        if found:
            return found[0][0], bool(found[0][1])
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(MALFORMED),
            stop=tenacity.stop_after_attempt(self.endpoint.retries + 1),
            wait=tenacity.wait_exponential(0.5, max=8.0),
            reraise=True,
        )
        try:
            answer, finished = again(self._request, messages, options)
        except (openai.APIError, *MALFORMED) as error:
            where, what = self.base_url or "the OpenAI API", f"{type(error).__name__}: {error}".splitlines()[0][:200]
            raise UsageError(
                f"no answer from {where} ({what}); what was answered is kept: the same command goes on, a training's with "
                "--resume"
            ) from None
        self._keep("insert or replace into replies values (?, ?, ?)", question, answer, finished)
        return answer, finished

    def _keep(self, statement: str, *values: Any) -> list[tuple]:
        """Run one statement on the file of answers, whole or not at all. Returns its rows."""
        try:
            with self.lock, self.answers:
                return self.answers.execute(statement, values).fetchall()
        except sqlite3.Error as error:  # damaged, locked by another process, a full disk
            raise self._unusable(error) from None

    def _unusable(self, error: sqlite3.Error) -> UsageError:
        return UsageError(f"cannot use {self.cache} to keep the answers in ({error}): move it away")

    def _request(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[str, bool]:
        choice = self.client.chat.completions.create(model=self.model, messages=messages, **options).choices[0]
        answer = choice.message.content or ""
        if not isinstance(answer, str):
            raise TypeError(f"the answer is no text but {type(answer).__name__}")
        answer = answer.encode(errors="replace").decode()  # half a surrogate pair is no text that could be kept
        return answer, choice.finish_reason != "length"


def side_by_side(ask: Callable[[Any], Any], questions: Iterable[Any], parallel: int) -> list[Any]:
    """ask(q) for every question, `parallel` at a time, in their order. The first failure stops everything."""
    with ThreadPoolExecutor(parallel) as pool:
        jobs = [pool.submit(ask, question) for question in questions]
        try:
            return [job.result() for job in jobs]
        except BaseException:  # Ctrl-C too
            pool.shutdown(cancel_futures=True)  # one endpoint, one verdict: do not wait for thousands of time-outs
            raise


class APIEngine:
    """An engine for evaluation: its model has neither token ids nor log-probs nor adapters."""

    context = sys.maxsize  # only the server knows

    def __init__(self, args):
        """`args` are warmstart.ModelArgs with a model named openai:NAME."""
        make_folder(args.out)
        name = args.model.removeprefix("openai:")
        self.chat, self.codec = ChatAPI(name, args.endpoint, args.out / "answers.sqlite"), TextCodec()

    def generate(self, prompts: list[Prompt], sampling: Sampling, seed: int) -> list[Completion]:
        """One sampled response per prompt, in order, several asked for at a time. Equal prompts are numbered, and with
        the seed of the call the number names a sample: asked again after a stop, it is the one already paid for."""
        # OpenAI's own models know the limit under its new name only, most other servers under the old one only.
        limit = "max_tokens" if self.chat.base_url else "max_completion_tokens"
        options = {"temperature": sampling.temperature, "top_p": sampling.top_p, limit: sampling.max_tokens}
        chats, times, met = [[as_sent(m) for m in p.messages] for p in prompts], [], Counter()
        for chat in chats:
            question = json.dumps(chat)
            times.append(met[question])
            met[question] += 1

        def ask(i: int) -> Completion:
            text, finished = self.chat.ask(chats[i], f"{seed} {times[i]}", **options)
            return Completion((), (), finished, text)

        return side_by_side(ask, range(len(chats)), self.chat.endpoint.parallel)

    def load_adapter(self, path: Path) -> None:
        raise UsageError("a model behind an endpoint takes no adapter: name a model whose weights are here")


def as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A chat message in OpenAI's format, its picture as a data URL."""
    if "image" not in message:
        return message
    url = "data:image/png;base64," + base64.b64encode(message["image"]).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": message["content"]}]
    return {"role": message["role"], "content": parts}
