"""Shared by all tests: a small but real base model, taught for a few seconds by the scripted players."""

import json
import os
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"  # before anything imports tqdm: bars only clutter the report of a failure

import pytest  # noqa: E402
import torch  # noqa: E402

import envs  # noqa: E402
from engine import HFEngine, add_adapter, load_model  # noqa: E402
from rollout import run_cli  # noqa: E402
from warmstart import Recipe, demonstrate, imitate  # noqa: E402

torch.set_num_threads(1)  # two workers on two cores


def move(policy, scale=0.05):
    """Push the adapter off its starting point: at B = 0 half of its gradients vanish and the KL is exactly zero."""
    generator = torch.Generator().manual_seed(3)
    for p in policy.parameters():
        if p.requires_grad:
            p.data += scale * torch.randn(p.shape, generator=generator)


def save_base(folder: Path, hidden: int = 32) -> Path:
    """Save a base model after 60 steps of imitation: it plays badly, but it plays."""
    recipe = Recipe(episodes=300, steps=60, batch_size=32, lr=1e-2, hidden=hidden)
    model, tokenizer, _ = imitate(recipe, demonstrate(partial(envs.make, "frozenlake"), recipe.episodes, 0, 0), seed=0)
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
            run_cli(module.Args, module.main, module.__doc__)
        except SystemExit as stop:
            return stop.code
        return 0

    return run


class Server:
    """A real HTTP server that speaks the OpenAI protocol as well or badly as it is told to."""

    def __init__(self):
        self.requests, self.running, self.most, self.behave = [], 0, 0, lambda n, body: (200, "7")
        self.lock, server = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.requests.append((self.headers["Authorization"], body))
                    number = len(server.requests)
                    server.running += 1
                    server.most = max(server.most, server.running)
                status, said = server.behave(number, body)
                with server.lock:
                    server.running -= 1
                message = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
                whole = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [message]}
                raw = said if isinstance(said, bytes) else json.dumps(whole).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(raw)))
                    if status == 429:
                        self.send_header("Retry-After", "1")
                    self.end_headers()
                    self.wfile.write(raw)
                except BrokenPipeError:
                    return  # the client has given up waiting

            def log_message(self, *args):
                return

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()
