"""Engines: what turns prompts into sampled responses, and the log-probabilities that training needs of the same model.

An engine is anything with `generate(prompts, sampling, seed) -> list[Completion]` and `load_adapter(path)` (the protocol
stands in rollout.py). Here is the one over Hugging Face transformers, with its policy: a causal language model, frozen,
and a LoRA adapter; `open_engine` chooses between it and vLLM (vllm_engine.py), vision.py and api.py. The rest of the
project does not care which engine it is given.

*Compute each prompt once.* The members of a group play the same task, so at the first turn all their prompts are equal
and on small games many later ones too. The engine prefills each distinct prompt once and samples from it as often as
needed; the update does the same with distinct (prompt, response) pairs (`micro_batches`).

*Sampler and trainer agree.* Both run the same module in evaluation mode; left-padding, positions and masks are made by
one function, so that the log-probs of a token do not depend on what it was batched with.
"""

import importlib.util
import re
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging

from chat import Codec, Completion, Prompt, Sampling, Sight
from envs import UsageError
from rollout import Turn

# Loading a model is no news: its bars and reports would push the run's own off the screen. Errors still arrive.
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


# ---- the policy: a causal language model with a LoRA adapter ----


# float32 on a CPU; on a GPU bfloat16, with PEFT keeping the adapter, all that is trained, in float32.
DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def load_model(name: str | Path, vision: bool = False):
    """(model, tokenizer) of a Hugging Face folder or model name, in evaluation mode; with `vision` an image-text-to-text
    model and its processor. Raises UsageError if that fails."""
    reader, kind = (AutoProcessor, AutoModelForImageTextToText) if vision else (AutoTokenizer, AutoModelForCausalLM)
    try:
        tokenizer = reader.from_pretrained(name)
        model = kind.from_pretrained(name, dtype=DTYPE)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise UsageError(
            f"cannot load the model {str(name)!r}, neither as a folder nor by name: {str(error).strip().splitlines()[0]}"
        ) from None
    if model.num_parameters() < 1_000_000:
        # Matrices this small are done before a second thread has woken up; on a busy machine two threads ran 2 to 9
        # times slower.
        torch.set_num_threads(1)
    forget_dropout(model)
    if vision:
        forbid_pictures(model)
        # `generate` fills in from here what it is not told, and a model's habits (min-p, say) would change what is sampled.
        model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    return model.to(DEVICE).eval(), tokenizer


def forget_dropout(model) -> None:
    """Sampler, trainer and reference must be one function. They are in evaluation mode, but gradient checkpointing needs
    the training mode, in which a model that has dropout would be another function at every call."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def forbid_pictures(model) -> None:
    """Make it impossible to sample a placeholder of images: a response that held one would ask for a picture that does
    not exist. Done to the logits, so that sampler, trainer and reference are still one distribution."""
    named = {k: v for k, v in model.config.to_dict().items() if k.endswith(("_token_id", "_token_index"))}
    ids = sorted({v for k, v in named.items() if isinstance(v, int) and re.match("image|video|vision", k)})
    output = model.get_output_embeddings()
    ids = [i for i in ids if 0 <= i < output.out_features]
    output.register_forward_hook(
        lambda module, inputs, logits: logits.index_fill(-1, torch.tensor(ids, device=logits.device), -1e9)
    )


def end_tokens(generation: GenerationConfig) -> Collection[int]:
    """The ids that end a response: a chat model may have several end-of-turn tokens."""
    ends = generation.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def add_adapter(model, rank: int, alpha: int, seed: int) -> PeftModel:
    """The trainable policy: the model, frozen, with a fresh LoRA adapter on all linear layers of its language part.

    A fresh adapter's B matrices are zero, so the policy starts as the model itself; switching the adapter off
    (`policy.disable_adapter()`) gives the reference policy at any time without a second copy of the weights.
    """
    torch.manual_seed(seed)  # the adapter's A matrices are random
    return get_peft_model(model, lora_config(model, rank, alpha)).eval()


def lora_config(model, rank: int, alpha: int) -> LoraConfig:
    """LoRA on all linear layers but the output layer. What a vision model sees with stays as it is: a game is learnt by
    deciding better, not by seeing better."""
    layers: str | list[str] = "all-linear"
    if type(model) in AutoModelForImageTextToText._model_mapping.values():
        language = {id(module) for module in model.get_decoder().modules()}
        layers = [n for n, m in model.named_modules() if id(m) in language and isinstance(m, torch.nn.Linear)]
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=layers, task_type="CAUSAL_LM")


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


class Sample(NamedTuple):
    """What a forward pass needs of a turn."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    sight: Sight | None = None


def model_inputs(samples: list[Sample], pad: int, model) -> dict[str, torch.Tensor]:
    """The arguments of a forward pass over prompts with their responses, padded on the left."""
    device = model.device
    ids, mask, positions = pad_left([s.prompt + s.response for s in samples], pad, device)
    inputs, sights = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}, [s.sight for s in samples]
    if sights[0] is None:
        return inputs
    if any(hasattr(module, "get_rope_index") for module in model.modules()):
        del inputs["position_ids"]  # to such a model an image is two-dimensional: it counts for itself, from the mask
    for name in sights[0].tensors:
        inputs[name] = torch.cat([sight.tensors[name] for sight in sights]).to(device)
    for name in sights[0].per_token:
        rows = [s.sight.per_token[name] + (0,) * len(s.response) for s in samples]  # a response holds no images
        inputs[name] = pad_left(rows, 0, device)[0]
    return inputs


def response_logprobs(model, samples: list[Sample], pad: int) -> torch.Tensor:
    """Log-probabilities of the response tokens of N samples at temperature 1: [N, R], where R is the longest response;
    shorter ones are right-aligned and the columns before them hold no meaning (mask them).

    Only the last R + 1 positions go through the output layer: the logits of prompt tokens carry no loss, and for a real
    vocabulary they are the largest tensor of the whole step.
    """
    inputs = model_inputs(samples, pad, model)
    longest = max(len(s.response) for s in samples)
    out = model(**inputs, use_cache=False, logits_to_keep=longest + 1)
    logits = out.logits[:, :-1].float()  # [N, R, V]: the logit at a position predicts the token after it
    return logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, -longest:, None]).squeeze(-1)


def micro_batches(turns: list[Turn], rows: int, tokens: int) -> list[tuple[list[Sample], list[int], list[int]]]:
    """Split a batch into (samples [U], members [M], rows [M]): distinct samples, the indices of all turns that they
    stand for, and for each of those the row of its sample. At most `rows` samples and, padding included, `tokens`
    tokens each (but always one sample): what memory has to hold is tokens.

    Equal samples are common, because members of a group meet the same states. Each distinct one goes through a model
    once, and its output is *indexed* by all the turns that share it (`output[rows]`): autograd then sums their
    gradients, which is the same number as computing them one by one, for any advantages and any loss.
    """
    owners: dict[Sample, list[int]] = {}
    for i, turn in enumerate(turns):
        owners.setdefault(Sample(turn.prompt_ids, turn.response_ids, turn.sight), []).append(i)
    batches: list[list[Sample]] = []
    # Like lengths together: little padding. The one added last is the longest of its batch.
    for sample in sorted(owners, key=lambda s: len(s.prompt) + len(s.response)):
        longest = len(sample.prompt) + len(sample.response)
        if not batches or len(batches[-1]) == rows or (len(batches[-1]) + 1) * longest > tokens:
            batches.append([])
        batches[-1].append(sample)
    return [
        (samples, [i for s in samples for i in owners[s]], [row for row, s in enumerate(samples) for _ in owners[s]])
        for samples in batches
    ]


def saved_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the weights of a saved adapter. Raises UsageError when there is none."""
    try:
        with safe_open(path / "adapter_model.safetensors", "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"no usable adapter in {path}: {error}") from None


def misfit(path: Path) -> UsageError:
    """What to raise when the adapter in a folder cannot go on the base model."""
    return UsageError(
        f"the adapter in {path} is damaged or belongs to another model than the base: its layers do not fit"
    )


class HFEngine:
    """Sampling with Hugging Face transformers from the very module that is being trained: nothing to synchronise.

    Why not `model.generate`: it computes a prompt as often as it is sampled from. Here each distinct prompt of the call
    is prefilled once, its key-value cache rows are copied for the requests that share it, and rows leave the batch when
    they end.
    """

    own_weights = False

    def __init__(self, policy, tokenizer, rows: int = 2048, prompts: int = 128, thinking: bool = False):
        """At most `prompts` distinct prompts are prefilled and `rows` responses sampled side by side."""
        self.policy, self.rows, self.prompts = policy, rows, prompts
        self.codec = self._codec(tokenizer, thinking)
        self.context = policy.config.get_text_config().max_position_embeddings
        self.pad, self.ends = self.codec.pad, self.codec.ends

    def _codec(self, tokenizer, thinking: bool) -> Codec:
        return Codec(tokenizer, end_tokens(self.policy.generation_config), thinking)

    def base(self) -> AbstractContextManager:
        """Within it the engine samples from the base model, its adapter off."""
        return self.policy.disable_adapter() if isinstance(self.policy, PeftModel) else nullcontext()

    def follow(self, policy) -> None:
        """Nothing to do: the policy in training is the very module that samples."""

    def rest(self) -> None:
        """Nothing to do: there is one set of weights, and the update needs it."""

    def load_adapter(self, path: Path) -> None:
        """Sample from now on with the adapter saved in a folder, instead of any that was on before.

        Raises UsageError when there is none, or when it was made for another model.
        """
        saved = saved_shapes(path)
        model = self.policy.unload() if isinstance(self.policy, PeftModel) else self.policy
        try:
            policy = PeftModel.from_pretrained(model, path).eval()
            fits = {name: tuple(w.shape) for name, w in get_peft_model_state_dict(policy).items()} == saved
        except (RuntimeError, ValueError):  # PEFT's own complaint about other shapes or layers, dozens of lines long
            fits = False
        if not fits:  # missing layers PEFT only warns about, and would leave at random values
            raise misfit(path)
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
    def generate(self, prompts: list[Prompt], sampling: Sampling, seed: int) -> list[Completion]:
        """One sampled response per prompt, in order. The end-of-turn token a response was ended with is part of it."""
        rng = torch.Generator(self.policy.device).manual_seed(seed)
        requests: dict[tuple[int, ...], list[int]] = {}  # distinct prompt -> the requests that want a sample from it
        for i, prompt in enumerate(prompts):
            requests.setdefault(prompt.ids, []).append(i)
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


def token_logprobs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution that is sampled from, as log-probabilities: logits [N, V] after temperature and top-p: [N, V]."""
    logp = (logits.float() / sampling.temperature).log_softmax(-1)
    if sampling.top_p < 1.0:
        # Nucleus: keep the smallest set of most likely tokens whose mass reaches top_p. A token stays if the mass
        # *before* it is below top_p, so the most likely one always stays.
        ordered, order = logp.sort(descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        logp = logp.scatter(-1, order, ordered.masked_fill(before >= sampling.top_p, -torch.inf)).log_softmax(-1)
    return logp


def sample_tokens(logits: torch.Tensor, sampling: Sampling, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row of logits [N, V]: (tokens [N], log-probabilities [N] under the distribution sampled from)."""
    logp = token_logprobs(logits, sampling)
    token = torch.multinomial(logp.exp(), 1, generator=rng)
    return token.squeeze(1), logp.gather(1, token).squeeze(1)


# ---- which engine ----


@cache
def announce(text: str) -> None:
    """Print a line, once in the life of the process."""
    print(text)


def choose_engine(args) -> str:
    """ "api", "vision", "vllm" or "hf" for the model named in the arguments (warmstart.ModelArgs), saying which and why."""
    installed = importlib.util.find_spec("vllm") is not None
    if args.model.startswith("openai:"):
        choice, why = "api", "an endpoint answers"
    elif args.observation == "image":
        choice, why = "vision", "pictures go through the model's Hugging Face processor"
    elif args.engine != "auto":
        choice, why = args.engine, "as asked for"
    elif args.model == "embedded":
        choice, why = "hf", "the embedded model is too small for vLLM to be faster"
    elif DEVICE == "cpu":
        choice, why = "hf", "there is no GPU, and on a CPU vLLM is no faster"
    elif not installed:
        choice, why = "hf", "vLLM would be faster: pip install -r requirements-vllm.txt"
    else:
        choice, why = "vllm", "there is a GPU, and vLLM is installed"
    names = {"api": "API", "vision": "Hugging Face, with pictures", "vllm": "vLLM", "hf": "Hugging Face"}
    announce(f"engine: {names[choice]} ({why})")
    return choice


def open_engine(args, base: str | Path, policy=None, tokenizer=None, rank: int = 1):
    """The engine that samples from a base model, or in training from the policy that is given with its tokenizer. `rank`
    is the largest that an adapter will have."""
    kind = choose_engine(args)
    # Imported here, because each drags in what the others do not need: vLLM alone takes ten seconds, and is optional.
    if kind == "api":
        from api import APIEngine

        return APIEngine(args)
    if kind == "vllm":
        from vllm_engine import open_vllm

        return open_vllm(base, rank, args.thinking, args.tensor_parallel, args.gpu_memory)
    if policy is None:
        policy, tokenizer = load_model(base, kind == "vision")
    if kind == "vision":
        from vision import VisionEngine

        return VisionEngine(policy, tokenizer, args.sample_batch, thinking=args.thinking)
    return HFEngine(policy, tokenizer, args.sample_batch, thinking=args.thinking)
