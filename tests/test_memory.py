"""The memory formula of bench/memory.py against what autograd keeps."""

import pytest
from transformers import Qwen3Config

import grpo
from bench.memory import GPUS, MODELS, RESERVE, check, kept_bytes, layer_bytes, parameters, table, token_bytes


def test_the_formula_is_what_autograd_keeps():
    rows = [line.split("|")[2:4] for line in check().splitlines()[2:]]
    assert len(rows) == 3
    for formula, measured in rows:
        assert float(measured) == pytest.approx(float(formula), rel=0.06)


def test_another_shape_is_foreseen_too():
    """The coefficients were fitted on other shapes than this."""
    shape = {"hidden_size": 128, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 1,
             "head_dim": 48, "vocab_size": 300}  # fmt: skip
    one, two = (Qwen3Config(**shape, num_hidden_layers=n) for n in (1, 2))
    measured = (kept_bytes(two, 192, 16, False) - kept_bytes(one, 192, 16, False)) / 192
    assert measured == pytest.approx(layer_bytes(one), rel=0.06)


def test_the_models_are_counted_right_and_the_table_grows_with_the_gpu():
    billions = {name: round(parameters(config, 8)[0] / 1e9, 1) for name, config in MODELS.items()}
    assert billions == {"Qwen3-4B": 4.0, "Qwen3-8B": 8.2, "Qwen3-14B": 14.8}
    # LoRA of rank r on a [in, out] layer has r (in + out) weights: q, k, v, o, and the three of the MLP, in 36 layers.
    h, i, q, kv = 2560, 9728, 4096, 1024
    assert parameters(MODELS["Qwen3-4B"], 8)[1] == 36 * 8 * (2 * (h + q) + 2 * (h + kv) + 3 * (h + i))
    # What is typed without any of the options below fits: 4B on 24 GB, 8B on 48 GB, 14B on 80 GB.
    for gpu, name in (("24 GB", "Qwen3-4B"), ("48 GB", "Qwen3-8B"), ("80 GB", "Qwen3-14B")):
        typed, (total, adapter) = grpo.Args(model="Qwen/" + name), parameters(MODELS[name], 8)
        assert typed.gradient_checkpointing
        update = 2 * total + 16 * adapter + typed.micro_tokens * token_bytes(MODELS[name]) + RESERVE
        sampling = 2 * total + 16 * adapter + RESERVE + typed.gpu_memory * GPUS[gpu]
        assert update < GPUS[gpu] and sampling < GPUS[gpu]
        assert 2 * total + RESERVE < typed.gpu_memory * GPUS[gpu], "and vLLM's own copy fits into its share"
    lines = table(8, 2048).splitlines()
    assert len(lines) == 2 + len(GPUS) and lines[2].count("|") == 5
