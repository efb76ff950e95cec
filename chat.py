"""Chat: what goes into a language model and what comes out, for one tokenizer and its chat template.

    messages --template--> text --tokenizer--> prompt ids --model--> response ids --> text --parser--> one action

The parser is strict, because guessing rewards the wrong thing, and the reading of responses is careful in three places
that go wrong without a sound:

- *Thinking* is not the answer. A model may open it itself (Qwen3), or its template may have opened it at the end of the
  prompt (DeepSeek-R1's distillates), so that only the closing `</think>` is in the response; in some tokenizers the
  markers are special tokens and vanish when they are decoded. An action inside the thinking is only a thought; thinking
  that never closes holds no answer. Of earlier turns only what came after the thinking is shown again, whatever the
  template does.
- *The length limit.* A response that was cut off is no answer, even if an action can be read in it.
- *Data is not control.* A control token spelt out in model or environment text is removed before rendering: it would
  forge a chat turn.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import TemplateError

from envs import UsageError


@dataclass(frozen=True)
class Sampling:
    """Training samples at temperature 1.0 and top-p 1.0 (paper A, A.2); evaluation at 0.6 and 0.9 (B.1)."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 16


@dataclass(frozen=True, eq=False)
class Sight:
    """What a vision model's processor made of the images of one prompt, by the names that the model takes: `tensors` of
    pixels, images in the first dimension, and `per_token` one number for each prompt token. Compared by identity, since
    comparing pixels would take longer than the little it saves: a codec makes one of the same prompt only once."""

    tensors: dict[str, Any]
    per_token: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Prompt:
    """What one model call is asked. `messages` are the chat itself, with the images as PNG bytes under "image": an API is
    sent these. `ids` is the rendered prompt and `sight` its images as tensors: a local model reads these."""

    messages: tuple[dict[str, Any], ...]
    ids: tuple[int, ...] = ()
    sight: Sight | None = None


@dataclass(frozen=True)
class Completion:
    """One sampled response. `logprobs[j]` is the log-probability of `ids[j]` under the distribution it was sampled
    from, that is after temperature and top-p. `finished` is False when the length limit cut it off before an
    end-of-turn token. From an API there is only `text`."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool
    text: str = ""


class Reading(NamedTuple):
    """A response understood: its text, the range of its tokens that holds the action, the action, or why there is none."""

    text: str
    span: tuple[int, int] | None
    action: str | None
    problem: str  # a key of NOTICES, or ""


# The notices are fixed sentences, so that the embedded tokenizer can hold each as one token.
NOTICES = {
    "cut off": "Invalid response: it was cut off by the length limit. The turn is spent.\n",
    "thinking": "Invalid response: the thinking was never closed. The turn is spent.\n",
    "missing": "Invalid response: it holds no <action>...</action>. The turn is spent.\n",
    "several": "Invalid response: it holds more than one <action>. The turn is spent.\n",
    "trailing": "Invalid response: there is text after </action>. The turn is spent.\n",
}
THINK, END_THINK = "<think>", "</think>"


def after_thinking(response: str, opened: bool = False) -> int | None:
    """Where the answer begins: behind the last thinking, or None when it never ends. `opened` says that the prompt has
    opened it already."""
    start = response.rfind(END_THINK) + len(END_THINK) if END_THINK in response else 0
    return None if THINK in response[start:] or (opened and not start) else start


def parse_action(response: str, opened: bool = False) -> tuple[tuple[int, int] | None, str]:
    """Find the action of a response: ((start, end), "") with the character span between <action> and </action>,
    stripped of outer white space, or (None, key of NOTICES).

    The format is parsed, not guessed at. A parser that takes the first word it knows turns "not up, but down" into
    "up". Free text may come before the action (models reason aloud); an <action> inside thinking is only a thought;
    nothing may follow.
    """
    start = after_thinking(response, opened)
    if start is None:
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


class TextCodec:
    """For models behind an endpoint: the messages go out as they are, and there is only text to read."""

    opened = False  # the prompt never begins the thinking

    def encode(self, messages: list[dict[str, Any]], begun: str = "") -> Prompt:
        """A prompt. `begun` is how the response to it begins: words that are put into the model's mouth."""
        chat = [m | {"content": self._spoken(m["content"])} if m["role"] == "assistant" else m for m in messages]
        return Prompt((*chat, *([{"role": "assistant", "content": begun}] if begun else [])))

    def read(self, completion: Completion) -> Reading:
        if not completion.finished:
            return Reading(completion.text, None, None, "cut off")
        characters, problem = parse_action(completion.text)
        action = completion.text[slice(*characters)] if characters else None
        return Reading(completion.text, None, action, problem)

    def _spoken(self, response: str, opened: bool = False) -> str:
        """What of a response is shown again: what came after the thinking."""
        start = after_thinking(response, opened)
        if start is None:
            return ""
        return response[start:].lstrip() if start else response


class Codec(TextCodec):
    """Text <-> ids for one tokenizer, remembering what it has seen: the same prompts and responses come again and again.

    `ends` are the ids that end a turn besides the tokenizer's own; `thinking` asks a template that can (Qwen3's) to have
    the model think first, or not to. Raises UsageError for a model without a chat template.
    """

    remembered = 20_000  # prompts: with a history each may hold thousands of tokens

    def __init__(self, tokenizer, ends: Collection[int] = (), thinking: bool = False, template=None):
        """`template` renders the chat: the tokenizer itself, or a vision model's processor."""
        self.tokenizer, self.thinking, self.template = tokenizer, thinking, template or tokenizer
        if self.template.chat_template is None:
            raise UsageError(
                "this model's tokenizer has no chat template: use an instruction-tuned model, or give a base model the "
                "plain template of the README"
            )
        self.ends = {*ends, tokenizer.eos_token_id} - {None}
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        # Control tokens: those marked special, and any other that the template itself is written in (DeepSeek's turn
        # markers are not marked).
        added = {str(token): id for id, token in tokenizer.added_tokens_decoder.items()}
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= set(tokenizer.all_special_tokens)  # the few that have a name
        control = special | {t for t in added if t.strip() and t in self.template.chat_template}
        self.control = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))))
        # `unread` are the ids that are left out of a response's text: control tokens and ends, as usual. But not the markers
        # of thinking, even where a tokenizer calls them special: without them thinking and answer run together.
        markers = {added.get(THINK), added.get(END_THINK)}
        self.unread = {*tokenizer.convert_tokens_to_ids(sorted(special)), *self.ends} - markers
        try:
            asked = self._render([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
        except TemplateError as error:
            raise UsageError(f"this model's chat template cannot render a system message: {error}") from None
        self.opened = asked.rstrip().endswith(THINK)  # the template itself opens the thinking, at the end of the prompt
        self._encode = lru_cache(maxsize=self.remembered)(self._render_and_encode)
        self._read = lru_cache(maxsize=self.remembered)(self._decode_and_parse)

    def encode(self, messages: list[dict[str, Any]], begun: str = "") -> Prompt:
        return self._encode(tuple((m["role"], m["content"]) for m in messages), begun)

    def read(self, completion: Completion) -> Reading:
        return self._read(completion.ids, completion.finished)

    def _render(self, messages: list[dict[str, Any]]) -> str:
        """The whole prompt as text. Templates without a switch for thinking ignore that argument."""
        return self.template.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, enable_thinking=self.thinking
        )

    def _shown(self, role: str, content: str) -> str:
        """What of a message may stand in a prompt."""
        shown = self._spoken(content, self.opened) if role == "assistant" else content
        while (clean := self.control.sub("", shown)) != shown:  # what is left and right of one may make another
            shown = clean
        return shown

    def _render_and_encode(self, messages: tuple[tuple[str, str], ...], begun: str) -> Prompt:
        chat = tuple({"role": role, "content": self._shown(role, content)} for role, content in messages)
        # Encoded apart, so that the tokens of what is begun are those with which a response itself would begin.
        ids = self.tokenizer.encode(self._render(list(chat)), add_special_tokens=False)
        if begun:
            ids += self.tokenizer.encode(END_THINK * self.opened + begun, add_special_tokens=False)
        return Prompt((*chat, *([{"role": "assistant", "content": begun}] if begun else [])), tuple(ids))

    def _text(self, ids: tuple[int, ...]) -> str:
        return self.tokenizer.decode([i for i in ids if i not in self.unread], skip_special_tokens=False)

    def _decode_and_parse(self, ids: tuple[int, ...], finished: bool) -> Reading:
        text = self._text(ids)
        if not finished:
            return Reading(text, None, None, "cut off")
        characters, problem = parse_action(text, self.opened)
        if characters is None:
            return Reading(text, None, None, problem)

        # From the end, because the action ends the response. Compared by text and not by length: half of a multi-byte
        # character decodes to several replacement characters. A token that holds part of the action counts whole (in
        # the embedded tokenizer "<action>left</action>" is a single token).
        start, end = characters
        last = len(ids)
        while self._text(ids[: last - 1])[:end] == text[:end]:
            last -= 1
        first = last - 1
        while not text[:start].startswith(self._text(ids[:first])):
            first -= 1
        return Reading(text, (first, last), text[start:end], "")
