"""How long the search agent's retrieval takes: to build, and for each query. Nothing here is needed to use it.

    python bench/retrieval.py --paragraphs 50000               everything; embedding takes minutes
    python bench/retrieval.py --paragraphs 50000 --no-embed    embeds 256 paragraphs, tells how long all would take, and
                                                               lets FAISS search among random vectors: as slow as real ones

The corpus is the embedded one, made with as many seeds as it takes. Its sentences recur, and equal texts are embedded once:
the table says how many different ones there are, and a corpus without repetition takes longer in proportion. For comparison
rank_bm25 (`pip install rank-bm25==0.2.2`), which only scores here, where keyword_search also picks and makes snippets.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from envs import UsageError  # noqa: E402
from envs.judgments import embedded  # noqa: E402
from envs.legal import Corpus, Embedder, Library, terms  # noqa: E402
from rollout import run_cli  # noqa: E402

try:
    from rank_bm25 import BM25Plus
except ImportError:
    BM25Plus = None
SAMPLE = 256  # paragraphs from which the time for all is told


@dataclass
class Args:
    """How long retrieval takes."""

    paragraphs: int = 1000
    """Size of the corpus."""
    queries: int = 100
    """Questions asked of it."""
    k: int = 5
    """Results for each."""
    embed: bool = True
    """Embed the whole corpus."""
    out: str = ""
    """Folder in which the corpus and its embeddings are kept. Default: a temporary one."""


def write_corpus(size: int, queries: int, file: Path) -> list[str]:
    """Write `size` paragraphs to a JSONL file. Returns questions about them."""
    written, questions, seed = 0, [], 0
    with file.open("w") as lines:
        while written < size:
            corpus, own = embedded(seed=seed)
            for id in corpus.ids[: size - written]:
                lines.write(json.dumps({"id": f"seed{seed}_{id}", "text": corpus.texts[id]}) + "\n")
            written, seed = written + len(corpus), seed + 1
            questions += [question.text for question in own]
    return questions[:: max(1, len(questions) // queries)][:queries]


def timed(work: Callable) -> tuple[float, object]:
    begun = time.perf_counter()
    result = work()
    return time.perf_counter() - begun, result


def per_query(search: Callable[[str], object], questions: list[str]) -> str:
    search("a first call, which is slower")
    milliseconds = [1000 * timed(lambda q=q: search(q))[0] for q in questions]
    return f"{np.median(milliseconds):.1f} ms, p95 {np.percentile(milliseconds, 95):.1f} ms"


def embed(library: Library, whole: bool) -> list[tuple[str, str]]:
    """Embed the library's texts, or some, and give it its FAISS index. Returns rows of the table."""
    different = sorted(set(library.texts), key=len)
    sample = different[:: -(-len(different) // SAMPLE)]  # every so many of them by length
    library.embed._encode(["a first call, which loads the model"])
    if whole:
        seconds, _ = timed(lambda: library.embed(library.texts))
        told = f"{seconds:,.0f} s"
        building, _ = timed(lambda: library.faiss)
    else:
        seconds = timed(lambda: library.embed._encode(sample))[0] / len(sample) * len(different)
        told = f"about {seconds:,.0f} s, told from {len(sample)}"
        vectors = np.random.default_rng(0).standard_normal((len(library.texts), Embedder.width), dtype=np.float32)
        library.faiss = faiss.IndexFlatIP(Embedder.width)
        building, _ = timed(lambda: library.faiss.add(vectors))
    return [
        (
            f"embedding {len(different):,} different texts",
            f"{told} ({1000 * seconds / len(different):.1f} s per 1,000)",
        ),
        ("FAISS of kept embeddings" if whole else "FAISS of random vectors", f"{building:.1f} s"),
    ]


def measure(args: Args, folder: Path) -> str:
    """The table, in Markdown."""
    questions = write_corpus(args.paragraphs, args.queries, folder / "corpus.jsonl")
    loading, corpus = timed(lambda: Corpus.load(folder / "corpus.jsonl"))
    building, library = timed(lambda: Library(corpus, folder))
    rows = [("loading JSONL", f"{loading:.1f} s"), ("building BM25", f"{building:.1f} s"), *embed(library, args.embed)]
    rows += [
        ("keyword_search (bm25s)", per_query(lambda q: library.keyword_search(q, args.k), questions)),
        ("semantic_search", per_query(lambda q: library.semantic_search(q, args.k), questions)),
        ("... of which the query's embedding", per_query(lambda q: library.embed._encode([q]), questions)),
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    rows += [("memory at its peak", f"{peak / 2**30:.2f} GiB")]
    other = "not installed"
    if BM25Plus:
        plus = BM25Plus([terms(text) for text in library.texts])
        other = per_query(lambda q: plus.get_scores(terms(q)), questions)
    rows += [("rank_bm25's BM25Plus, scores alone", other)]
    return "\n".join(f"| {a} | {b} |" for a, b in [(f"{len(corpus):,} paragraphs", "median"), ("---", "---"), *rows])


def main(args: Args) -> None:
    for name in ("paragraphs", "queries", "k"):
        if getattr(args, name) < 1:
            raise UsageError(f"{name} must be at least 1, not {getattr(args, name)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.out or temporary)
        if args.embed and (folder / "embeddings.sqlite").exists():
            raise UsageError(f"{folder} holds embeddings already: choose another --out to measure how long they take")
        folder.mkdir(parents=True, exist_ok=True)
        print(measure(args, folder))


if __name__ == "__main__":
    run_cli(Args, main, __doc__)
