r"""Counts token ids over a corpus and writes the ranking that `impl/engine/draft_vocab.py` ships.

    python scripts/count_draft_vocab.py --tokenizer FOLDER --name qwen2.5 \
        --folder stdlib=/usr/lib/python3.11 --folder packages=FOLDER --folder npm=FOLDER \
        --out impl/engine/vocab_ranks/qwen2.5.gz

`scripts/corpus/corpus.yaml` says what is counted and where it is had. FOLDER of `--tokenizer` holds
a `tokenizer.json` (the folder that a pair's GGUF file is converted to, for instance).

The rank of an id follows from two estimates of how often it occurs: the mean of its shares in the
parts of the corpus, and its place in the vocabulary, where byte-pair merges stand in the order of
frequency in the tokenizer's own training text: share / sqrt(1000 + id).
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import yaml
from numpy.typing import NDArray

from impl.engine.draft_vocab import Ranking, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHIPPED_IDS = 32768
BATCH = 200  # texts encoded at once
# How a word of a list is written in running text, and how often so.
WRITTEN = (
    (lambda word: f" {word}", 0.80),
    (lambda word: f" {word.capitalize()}", 0.10),
    (lambda word: word.capitalize(), 0.07),
    (lambda word: word, 0.03),
)
CORPUS = Path(__file__).parent / "corpus"

PerId = NDArray[np.float64]  # [vocabulary size]


def text(files: list[Path], tokenizer: Tokenizer, size: int) -> PerId:
    """How often each id occurs in the files; files that are not UTF-8 are passed over."""
    counts = np.zeros(size)
    contents = [content for file in files if (content := _read(file)) is not None]
    for start in range(0, len(contents), BATCH):
        for encoding in _encode(tokenizer, contents[start : start + BATCH]):
            counts += np.bincount(encoding, minlength=size)
    return counts


def words(files: list[Path], tokenizer: Tokenizer, size: int) -> PerId:
    """The ids of the files' words, each in every way a word is written."""
    found = Counter(word.lower() for file in files for word in re.findall("[A-Za-z]+", _text(file)))
    return _written_counts(found, tokenizer, size)


def word_list(files: list[Path], tokenizer: Tokenizer, size: int) -> PerId:
    """The ids of listed words with their frequencies: JSON, or lines of `WORD COUNT`."""
    total: Counter[str] = Counter()
    for file in files:
        if file.name.endswith(".json.gz"):
            total.update(json.loads(gzip.decompress(file.read_bytes())))
        else:
            pairs = (line.split() for line in file.read_text(encoding="utf-8-sig").splitlines())
            total.update({word: int(count) for word, count in pairs})
    return _written_counts(total, tokenizer, size)


READERS: Mapping[str, Callable[[list[Path], Tokenizer, int], PerId]] = {
    "text": text,
    "words": words,
    "word_list": word_list,
}


@click.command(help=__doc__.splitlines()[0])
@click.option("--tokenizer", "folder", type=click.Path(path_type=Path), required=True)
@click.option("--name", required=True, help="Name of the vocabulary, for people.")
@click.option("--folder", "folders", multiple=True, metavar="NAME=PATH", required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(folder: Path, name: str, folders: tuple[str, ...], out: Path) -> None:
    """Counts, ranks and writes."""
    from tokenizers import Tokenizer

    vocabulary = Vocabulary.read(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    roots = {"corpus": CORPUS} | {k: Path(v) for k, v in (f.split("=", 1) for f in folders)}
    plan = yaml.safe_load((CORPUS / "corpus.yaml").read_text(encoding="utf-8"))
    shares, tokens = np.zeros(vocabulary.size), 0
    for part in plan["parts"]:
        counts = READERS[part["reader"]](_files(part["globs"], roots), tokenizer, vocabulary.size)
        tokens += round(counts.sum()) if part["reader"] == "text" else 0
        shares += part["weight"] * counts / counts.sum()
        click.echo(f"{part['name']}: {counts.sum():,.0f} tokens, {np.count_nonzero(counts):,} ids")
    ranking = _ranking(shares, name=name, corpus=plan["description"], corpus_tokens=tokens,
                       vocabulary_sha256=vocabulary.sha256)  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(ranking.to_bytes())
    click.echo(f"{out}: {len(ranking.ids):,} ids, {out.stat().st_size:,} bytes")


def _ranking(shares: PerId, **header: Any) -> Ranking:
    ids = np.arange(len(shares))
    score = shares / np.sqrt(1000 + ids)
    order = np.lexsort((ids, -score))[: min(SHIPPED_IDS, np.count_nonzero(shares))]
    return Ranking(**header, ids=order.astype(np.uint32))


def _written_counts(frequency: Mapping[str, int], tokenizer: Tokenizer, size: int) -> PerId:
    counts = np.zeros(size)
    for write, share in WRITTEN:
        encodings = _encode(tokenizer, [write(word) for word in frequency])
        for encoding, count in zip(encodings, frequency.values(), strict=True):
            np.add.at(counts, encoding, share * count)
    return counts


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def _files(globs: list[str], roots: Mapping[str, Path]) -> list[Path]:
    found = set()
    for pattern in globs:
        root, _, below = pattern.partition("/")
        matches = {path for path in roots[root].glob(below) if path.is_file()}
        if not matches:
            raise click.UsageError(f"--folder {root}={roots[root]}: nothing matches {below}")
        found |= matches
    return sorted(found)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _read(file: Path) -> str | None:
    try:
        return _text(file)
    except UnicodeDecodeError:
        return None


if __name__ == "__main__":
    main()
