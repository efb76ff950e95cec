"""Engines: what turns prompts into sampled responses, and the log-probabilities that training needs of the same model.

An engine is anything with `generate(prompts, sampling, seed) -> list[Completion]` and `load_adapter(path)` (the protocol
stands in rollout.py). Here is the one over Hugging Face transformers, with its policy: a causal language model, frozen,
and a LoRA adapter. The rest of the project does not care which engine it is given.

*Compute each prompt once.* The members of a group play the same task, so at the first turn all their prompts are equal
and on small games many later ones too. The engine prefills each distinct prompt once and samples from it as often as
needed; the update does the same with distinct (prompt, response) pairs (`micro_batches`).

*Sampler and trainer agree.* Both run the same module in evaluation mode; left-padding, positions and masks are made by
one function, so that the log-probs of a token do not depend on what it was batched with.
"""

import json
import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import openai
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from envs import UsageError
from rollout import Codec, Completion, Sampling, Turn

# Loading a model is no news: its bars and reports would push the run's own off the screen. Errors still arrive.
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


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
