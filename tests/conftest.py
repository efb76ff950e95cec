"""Shared by all tests: a small but real base model, taught for a few seconds by the scripted players."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

os.environ["TQDM_DISABLE"] = "1"  # before tqdm is imported: bars only clutter the report of a failure

import envs  # noqa: E402
from engine import HFEngine, add_adapter, load_model  # noqa: E402
from warmstart import Recipe, imitate  # noqa: E402


def move(policy, scale=0.05):
    """Push the adapter off its starting point: at B = 0 half of its gradients vanish and the KL is exactly zero."""
    generator = torch.Generator().manual_seed(3)
    for p in policy.parameters():
        if p.requires_grad:
            p.data += scale * torch.randn(p.shape, generator=generator)


def save_base(folder: Path, hidden: int = 32) -> Path:
    """Save a base model after 60 steps of imitation: it plays badly, but it plays."""
    recipe = Recipe(episodes=300, steps=60, batch_size=32, lr=1e-2, hidden=hidden)
    model, tokenizer, _ = imitate(recipe, partial(envs.make, "frozenlake"), history=0, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def policy(base):
    """(policy, tokenizer) with a fresh adapter."""
    model, tokenizer = load_model(base)
    return add_adapter(model, rank=4, alpha=8, seed=0), tokenizer


@pytest.fixture
def engine(policy):
    return HFEngine(*policy)


@pytest.fixture
def command(monkeypatch):
    """command(module, *words): a script's command line as typed, in this process. Returns its exit code."""

    def run(module, *words) -> int:
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, words)])
        try:
            module.run_cli(module.Args, module.main, module.__doc__)
        except SystemExit as stop:
            return stop.code
        return 0

    return run
