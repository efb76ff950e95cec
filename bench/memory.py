"""What fits on a GPU? A formula for the memory of LoRA training with vLLM beside it, and a check of its parts.

    python bench/memory.py             the table of the README
    python bench/memory.py --check     what autograd really keeps, against the formula

All in bytes; P parameters of the model, A of the adapter, h hidden size, I width of the MLP, q and kv widths of the queries
and of the keys, V vocabulary, n tokens in a micro-batch, of which r are response tokens:

    base      2 P                             bfloat16, frozen; the reference is the same weights with the adapter off
    adapter   16 A                            float32: weight, gradient, and Adam's two moments
    update    2 h layers n                    one checkpoint per layer and token (--gradient-checkpointing)
              + (28 h + 10 I + 12 q + 8 kv) n     the one layer that is computed again, with PEFT's float32 copies
              + 12 V r                        logits of response positions: bfloat16, float32, log-softmax and gradients
    sampling  2 P + 4 kv layers tokens        vLLM's own copy of the base, and keys and values of all sequences
    reserve   1.5 GiB                         CUDA's context and fragmentation, for the trainer, and as much for vLLM

vLLM sleeps during the update, so the peak is base + adapter + reserve + the larger of update and sampling. Not in the
formula: attention without a fused kernel (n^2), pictures, PPO's critic (as large as the policy).
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine import DEVICE, Sample, lora_config, response_logprobs  # noqa: E402
from rollout import run_cli  # noqa: E402

GIB = 2**30
RESERVE = 1.5 * GIB
GPUS = {"24 GB": 24e9, "48 GB": 48e9, "80 GB": 80e9, "141 GB": 141e9}
ATTENTION = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
MODELS = {
    "Qwen3-4B": Qwen3Config(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
                            tie_word_embeddings=True, **ATTENTION),
    "Qwen3-8B": Qwen3Config(hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
                            tie_word_embeddings=False, **ATTENTION),
    "Qwen3-14B": Qwen3Config(hidden_size=5120, intermediate_size=17_408, num_hidden_layers=40, num_attention_heads=40,
                             tie_word_embeddings=False, **ATTENTION),
}  # fmt: skip


@dataclass
class Args:
    """What fits on a GPU."""

    rank: int = 32
    """Rank of the adapter."""
    length: int = 2048
    """Tokens of a prompt with its response, half of which are response tokens."""
    check: bool = False
    """Measure the formula's parts instead."""


def parameters(config: Qwen3Config, rank: int) -> tuple[int, int]:
    """(P, A), counted on a model without weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        total = model.num_parameters()
        adapted = get_peft_model(model, lora_config(model, rank, 2 * rank))
    return total, sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def layer_bytes(config: Qwen3Config) -> int:
    """What autograd keeps of one layer for one token, while that layer is computed again."""
    q, kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    return 28 * config.hidden_size + 10 * config.intermediate_size + 12 * q + 8 * kv


def token_bytes(config: Qwen3Config) -> float:
    """The update, for one token of a micro-batch of which every second one is a response token."""
    checkpoints = 2 * config.hidden_size * config.num_hidden_layers
    return checkpoints + layer_bytes(config) + 12 * config.vocab_size / 2


def table(rank: int, length: int) -> str:
    lines = [f"| GPU | {' | '.join(MODELS)} |", "|---|" + "---|" * len(MODELS)]
    for gpu, memory in GPUS.items():
        cells = []
        for config in MODELS.values():
            total, adapter = parameters(config, rank)
            left = memory - RESERVE - 2 * total - 16 * adapter
            tokens = int(left / token_bytes(config)) // 1024 * 1024
            kv = 4 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
            sequences = int((left - RESERVE - 2 * total) / (kv * length))
            share = min(0.95, (left - 0.5 * RESERVE) / memory)
            if tokens < length:
                cells.append("does not fit")
            elif sequences < 1:
                cells.append(f"`--micro-tokens {tokens} --engine hf`")
            else:
                cells.append(f"`--micro-tokens {tokens} --gpu-memory {share:.2f}`, {sequences} at a time")
        lines.append(f"| {gpu} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kept_bytes(config: Qwen3Config, tokens: int, responses: int, checkpointing: bool) -> int:
    """What autograd keeps of a forward pass, weights not counted."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(DEVICE)
    policy = get_peft_model(model, lora_config(model, 4, 8)).train(checkpointing)
    if checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, torch.Tensor] = {}  # by storage: views of one tensor are one

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    sample = Sample(tuple(range(tokens - responses)), tuple(range(responses)))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = response_logprobs(policy, [sample], 0)
    del result
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def check() -> str:
    """The parts that can be seen from outside, measured as differences between two small models."""
    small = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4,
             "head_dim": 64, "tie_word_embeddings": True}  # fmt: skip
    one, two = (Qwen3Config(**small, vocab_size=500, num_hidden_layers=n) for n in (1, 2))
    wide = Qwen3Config(**small, vocab_size=1000, num_hidden_layers=1)
    n, r = 256, 64
    rows = {
        "one layer, computed again": (
            layer_bytes(one),
            (kept_bytes(two, n, r, False) - kept_bytes(one, n, r, False)) / n,
        ),
        "one checkpoint": (2 * 256, (kept_bytes(two, n, r, True) - kept_bytes(one, n, r, True)) / n),
        "a logit, until the backward pass": (
            4.0,
            (kept_bytes(wide, n, r, True) - kept_bytes(one, n, r, True)) / (500 * (r + 1)),
        ),
    }
    return "\n".join(
        ["| bytes per token | formula | measured |", "|---|---|---|"]
        + [f"| {name} | {formula:.0f} | {measured:.1f} |" for name, (formula, measured) in rows.items()]
    )


def main(args: Args) -> None:
    print(check() if args.check else table(args.rank, args.length))


if __name__ == "__main__":
    run_cli(Args, main, __doc__)
