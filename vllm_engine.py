"""vLLM: sampling many times faster on a GPU, from weights that are not the ones in training.

The Hugging Face engine samples from the very module that is being trained. vLLM has its own copy of the base model, keeps
keys and values in pages, and applies LoRA adapters that it loads from disk. Two things can then go wrong without a sound,
and both end in training on samples of another policy than one believes:

- *A stale adapter.* vLLM knows an adapter by its integer id, and its prefix cache knows it by name and path. Written
  anew under the old id, the new weights are never loaded; under a new id but the old name and path, prompts that are in
  the cache are answered from the old policy's keys and values. So every adapter gets a new name, a new id and a new
  folder, the one before is removed, and the prefix cache is emptied. That this works is tested once at the start of
  every process, with two canaries (`check_swaps`).
- *A mismatch.* Other kernels, other rounding: the log-prob of a token in the sampler is not quite that in the trainer.
  The difference is logged at every step ("mismatch"), and `--is-cap` weighs each token by the truncated ratio of the
  two (`grpo.update`).

On a GPU the two share the memory: vLLM sleeps while the update runs (its weights wait in the CPU's memory, its cache is
dropped) and wakes up for the next rollout. Left out on purpose: pictures, pipeline parallelism, a server of its own.
"""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from math import exp
from pathlib import Path
from random import Random

import torch
from peft import get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from chat import Codec, Completion, Prompt, Sampling
from engine import DEVICE, DTYPE, end_tokens, lora_config, misfit, saved_shapes
from envs import UsageError

# Before vLLM is imported: nothing is reported to anybody, and its log holds errors only. It works inside this process,
# where its end is ours; only several GPUs need processes of their own.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
if DEVICE == "cpu":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default it takes most of the memory
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

CONTEXT = 16_384  # tokens of prompt and response together, where the model can take as many: a bound for the cache


class VLLMEngine:
    """Samples with vLLM from a base model, and from one LoRA adapter on it at a time."""

    own_weights = True

    def __init__(
        self, base: str | Path, rank: int = 16, thinking: bool = False, parallel: int = 1, memory: float = 0.5
    ):
        """`rank` is the largest an adapter may have, `parallel` the number of GPUs that share the model, and `memory` the
        share of each one's memory that vLLM may take. Raises UsageError when vLLM cannot load the model."""
        # What `open_vllm` asks: can this one serve another training or evaluation?
        self.made_of, self.rank = (str(base), parallel, memory), rank
        self.folder = tempfile.TemporaryDirectory(prefix="adapters-")  # removed with the engine
        self.lora: LoRARequest | None = None  # None: the base model
        self.swaps, self.seen, self.asleep = 0, set(), False
        try:
            config = AutoConfig.from_pretrained(base)
            text = config.get_text_config()
            # Who had the context extended wants all of it.
            extended = (getattr(text, "rope_parameters", None) or {}).get("rope_type") == "yarn"
            self.context = text.max_position_embeddings if extended else min(text.max_position_embeddings, CONTEXT)
            # Only the names and shapes of the adapter's layers, without a single weight: what `load_adapter` compares with
            # and what the canaries are made after.
            with torch.device("meta"):
                plain = AutoModelForCausalLM.from_config(config)
                self.adapted = get_peft_model(plain, lora_config(plain, rank, 2 * rank))
            self.tokenizer = AutoTokenizer.from_pretrained(base)
            try:
                self.ends = end_tokens(GenerationConfig.from_pretrained(base))
            except OSError:  # a model may come without one
                self.ends = end_tokens(GenerationConfig.from_model_config(config))
            self.think(thinking)
            with torch.random.fork_rng():  # starting vLLM reseeds torch
                self.llm = LLM(
                    model=str(base),
                    dtype=str(DTYPE).removeprefix("torch."),
                    max_model_len=self.context,
                    tensor_parallel_size=parallel,
                    gpu_memory_utilization=memory,
                    enable_lora=True,
                    max_loras=1,
                    max_cpu_loras=1,
                    max_lora_rank=next(r for r in (8, 16, 32, 64, 128, 256, 320, 512) if r >= rank),
                    enable_prefix_caching=True,
                    # The log-probs of the distribution that is sampled from: by default temperature and top-p are left out.
                    logprobs_mode="processed_logprobs",
                    # Sampling is ours alone: a model's own defaults (top-k 20, say) would be another distribution.
                    generation_config="vllm",
                    enable_sleep_mode=DEVICE == "cuda",
                    enforce_eager=DEVICE == "cpu",
                    # A prompt that is prefilled in pieces makes vLLM rewind the generator of a seeded request, which a
                    # generator on the CPU cannot do.
                    **(
                        {"enable_chunked_prefill": False, "max_num_batched_tokens": self.context}
                        if DEVICE == "cpu"
                        else {}
                    ),
                    use_tqdm_on_load=False,
                )
        except (OSError, ValueError, RuntimeError, StopIteration) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise UsageError(f"vLLM cannot load {str(base)!r}: {lines[0][:300]}") from None

    def think(self, thinking: bool) -> None:
        """Have the model think before it answers, or not, from now on."""
        self.codec = Codec(self.tokenizer, self.ends, thinking)
        self.pad = self.codec.pad

    # ---- sampling ----

    def generate(self, prompts: list[Prompt], sampling: Sampling, seed: int) -> list[Completion]:
        """One sampled response per prompt, in order. The end-of-turn token a response was ended with is part of it."""
        rng = Random(f"vllm {seed}")
        wanted = {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_tokens}
        # logprobs=0: none of the most likely tokens, only the sampled one.
        wanted |= {"stop_token_ids": sorted(self.codec.ends), "logprobs": 0, "detokenize": False}
        # A seed for each request: what it samples does not depend on what it is batched with.
        outputs = self.ask(
            [p.ids for p in prompts], [SamplingParams(**wanted, seed=rng.getrandbits(62)) for _ in prompts]
        )
        answers = [output.outputs[0] for output in outputs]
        return [
            Completion(
                tuple(answer.token_ids),
                tuple(at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids, strict=True)),
                answer.finish_reason == "stop",
            )
            for answer in answers
        ]

    def ask(self, prompts: list[tuple[int, ...]], params: list[SamplingParams]) -> list:
        """vLLM's own outputs for prompts given as token ids."""
        self.wake()
        asked = [TokensPrompt(prompt_token_ids=list(ids)) for ids in prompts]
        return self.llm.generate(asked, params, lora_request=self.lora, use_tqdm=False)

    @contextmanager
    def base(self) -> Iterator[None]:
        """Within it the engine samples from the base model, its adapter off."""
        on, self.lora = self.lora, None
        try:
            yield
        finally:
            self.lora = on

    # ---- adapters ----

    def follow(self, policy) -> None:
        """Sample from now on with the present weights of the policy in training."""
        folder = self.new_folder()
        policy.save_pretrained(folder)
        self.swap(folder)

    def load_adapter(self, path: Path) -> None:
        """Sample from now on with the adapter saved in a folder, instead of any that was on before.

        Raises UsageError when there is none, or when it was made for another model.
        """
        ours, theirs = get_peft_model_state_dict(self.adapted), saved_shapes(path)
        # All but the rank must be the same: A is [rank, in], B is [out, rank].
        outer = {name: shape[1] if "lora_A" in name else shape[0] for name, shape in theirs.items()}
        if outer != {name: w.shape[1] if "lora_A" in name else w.shape[0] for name, w in ours.items()}:
            raise misfit(path)
        # A copy, since the folder that vLLM is told must never have held another adapter.
        self.swap(Path(shutil.copytree(path, self.new_folder())))

    def new_folder(self) -> Path:
        self.swaps += 1
        return Path(self.folder.name) / f"adapter-{self.swaps}"

    def swap(self, folder: Path) -> None:
        """Replace the adapter in use by the one in a folder that vLLM has never heard of."""
        new = LoRARequest(folder.name, self.swaps, str(folder))
        identity = {new.lora_name, new.lora_int_id, new.lora_path}
        if identity & self.seen:
            raise UsageError(f"vLLM knows one of {identity} already, and would go on with the adapter of before")
        self.seen |= identity
        self.clear()
        self.llm.llm_engine.add_lora(new)
        self.lora = new
        if self.llm.llm_engine.list_loras() != {new.lora_int_id}:
            raise UsageError("vLLM did not forget the adapter of before")

    def clear(self) -> None:
        """Back to the base model: forget the adapter, and every cached prefix that was computed with it."""
        self.wake()
        if self.lora:
            self.llm.llm_engine.remove_lora(self.lora.lora_int_id)
            shutil.rmtree(self.lora.lora_path)
            self.lora = None
        if not self.llm.reset_prefix_cache():
            raise UsageError("vLLM did not empty its prefix cache")

    # ---- memory ----

    def rest(self) -> None:
        """Give the GPU's memory up until the next `generate`. Level 1 of vLLM's sleep keeps the weights, in the CPU's
        memory; level 2 would drop them, and an adapter needs its base."""
        if DEVICE == "cuda" and not self.asleep:
            self.llm.sleep(level=1)
            self.asleep = True

    def wake(self) -> None:
        if self.asleep:
            torch.cuda.empty_cache()  # what the update is done with: torch would keep it for itself
            self.llm.wake_up()
            self.asleep = False

    def close(self) -> None:
        """Stop vLLM and give everything back."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        self.folder.cleanup()
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


# ---- is what is sampled from what was loaded? ----


def write_canary(engine: VLLMEngine, seed: int) -> None:
    """Load an adapter of large random weights: its answers are unlike those of the base and of any other seed."""
    rng = torch.Generator().manual_seed(seed)
    weights = {
        # A keeps the size of what comes in, B makes it large: the change is of the order of the layer's own output.
        name: torch.randn(w.shape, generator=rng) * (w.shape[1] ** -0.5 if "lora_A" in name else 0.5)
        for name, w in get_peft_model_state_dict(engine.adapted).items()
    }
    folder = engine.new_folder()
    engine.adapted.peft_config["default"].save_pretrained(folder)
    save_file(weights, folder / "adapter_model.safetensors")
    engine.swap(folder)


def overlap(one: dict[int, float], other: dict[int, float]) -> float:
    """The probability mass that two distributions have in common, each given as the log-probs of its most likely tokens
    and scaled to sum to 1. A token at the end of one list that just missed the other costs what it weighs: very little."""
    mass, other_mass = (sum(map(exp, likely.values())) for likely in (one, other))
    return sum(min(exp(one[t]) / mass, exp(other[t]) / other_mass) for t in one.keys() & other.keys())


def check_swaps(engine: VLLMEngine, seed: int = 0) -> None:
    """Prove that an adapter which is swapped in is the one that answers. Raises UsageError when it is not.

    The prefix cache keeps whole blocks of tokens, 16 on a GPU and 128 on a CPU. The prompts are longer than three of them,
    and their blocks are shown to be in use: on shorter ones nothing would ever be cached and the test would pass by
    mistake. Each of two canaries must answer unlike what was there before, and just as it does once more after the cache
    was emptied. Several prompts, since on one of them two policies may well agree.
    """
    block = engine.llm.llm_engine.vllm_config.cache_config.block_size
    length = min(3 * block + 1, engine.context - 1)
    rng = Random(f"canary {seed}")
    words = engine.adapted.config.get_text_config().vocab_size
    prompts = [tuple(rng.randrange(words) for _ in range(length)) for _ in range(8)]

    def answer() -> tuple[list[dict[int, float]], int]:
        """For each prompt the log-probs of the 20 most likely next tokens; and how many prompt tokens came from the cache,
        in the prompt with the fewest."""
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, detokenize=False)
        outputs = engine.ask(prompts, [params] * len(prompts))
        likely = [{t: at.logprob for t, at in output.outputs[0].logprobs[0].items()} for output in outputs]
        return likely, min(output.num_cached_tokens for output in outputs)

    def common(one: list[dict[int, float]], other: list[dict[int, float]]) -> float:
        return sum(map(overlap, one, other)) / len(prompts)

    def stale(what: str) -> UsageError:
        return UsageError(
            f"vLLM samples from a stale adapter: {what}. Nothing was trained; use --engine hf, or the pinned vLLM"
        )

    # Half precision moves a few hundredths of the mass about, a canary most of it. But large random weights may by chance
    # lead where the policy before was led: then another is tried.
    base = before = answer()[0]
    canaries = count(seed + 1)
    for _ in range(2):
        for _ in range(5):
            write_canary(engine, next(canaries))
            first = answer()[0]
            if common(before, first) < 0.8:
                break
        else:
            raise stale("five other adapters in a row answered like the one before them")
        again, cached = answer()
        if not cached > 0:
            raise UsageError("vLLM's prefix cache is not in use, so the canary of stale adapters proves nothing")
        engine.llm.reset_prefix_cache()
        for what, other in (("from the cache", again), ("computed anew", answer()[0])):
            if common(first, other) < 0.8:
                raise stale(f"the same adapter, {what}, answered {common(first, other):.0%} like itself")
        before = first
    engine.clear()
    if common(base, answer()[0]) < 0.8:
        raise stale("with all adapters gone it does not answer like the base")


_engine: VLLMEngine | None = None


def open_vllm(base: str | Path, rank: int, thinking: bool, parallel: int, memory: float) -> VLLMEngine:
    """The one vLLM of this process, sampling from the base. It is kept, since it takes long to start: trainings and
    evaluations on the same base share it. A new one is checked first (`check_swaps`)."""
    global _engine
    if _engine is not None and (_engine.made_of != (str(base), parallel, memory) or _engine.rank < rank):
        _engine.close()
        _engine = None
    if _engine is None:
        started = VLLMEngine(base, max(rank, 16), thinking, parallel, memory)  # 16: so that most adapters fit at once
        check_swaps(started)
        _engine = started
    _engine.think(thinking)
    _engine.clear()
    return _engine
