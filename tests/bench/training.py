"""Fixed codebooks beside codes made for each tensor: bits on real weights, gradients and activations, and CPU time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from operators.base import BLOCK_WORDS, Stream
from operators.books import room
from operators.kernels.huffman import limited_lengths
from operators.literals.huffman import Huffman
from operators.literals.profile import Profiler
from operators.words import Words
from pipeline.messages import HEADER, TensorCodec
from synth.books import LAYOUTS, CodebookSet, Counts, sample_counts
from tests.bench.report import Table, Timed, alternate
from tests.checkpoints import path, read
from tests.processes import ROOT

SYMBOLS = 1 << 20
LEARNED_STEPS, MEASURED_STEPS = 8, 40
WEIGHTS = (
    ("minilm-bf16", "BF16"), ("mpnet-bf16", "BF16"), ("minilm-f16", "F16"), ("wordllama-f16", "F16"),
    ("whisper-f16", "F16"), ("minilm-f32", "F32"), ("silero-f32", "F32"), ("minilm-f8", "F8_E4M3"),
    ("mpnet-f8", "F8_E4M3"), ("fracast-i8", "I8"),
)  # fmt: skip
CONTAINERS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def plane(words: Words, dtype: str) -> Words:
    """Return the bytes of `words` that are coded."""
    layout, width = LAYOUTS[dtype], 8 * words.itemsize
    rotated: Words = words << words.dtype.type(layout.rotate) | words >> words.dtype.type(max(0, width - layout.rotate))
    coded: Words = (rotated >> words.dtype.type(width - 8)).astype(np.uint8)
    return coded


def huffman_bits(counts: Counts) -> int:
    """Return the bits of a code made for these counts, its table a byte for each symbol."""
    ascending = np.sort(counts[counts > 0])
    lengths = np.empty_like(ascending)
    limited_lengths(ascending, 12, lengths)
    return int(ascending @ lengths) + 8 * ascending.size


def entropy_bits(counts: Counts) -> float:
    """Return the order-0 entropy of all symbols."""
    live = counts[counts > 0]
    return float(live @ np.log2(counts.sum() / live))


class Loss:
    """Sums over messages of one kind."""

    def __init__(self) -> None:
        self.coded = self.huffman = self.entropy = self.plain = self.wire = self.raw = 0.0

    def add(self, codec: TensorCodec, words: Words, dtype: str, kind: str) -> None:
        """Code one tensor, and what codes of its own would take."""
        counts = np.bincount(plane(words, dtype), minlength=256).astype(np.int64)
        message = codec.encode(words, dtype, kind)
        plain = (words.itemsize - 1) * words.size
        self.plain += plain
        self.coded += message.size - HEADER.size - plain
        self.huffman += huffman_bits(counts) / 8
        self.entropy += entropy_bits(counts) / 8
        self.wire += message.size
        self.raw += words.nbytes

    def row(self, what: str, books: str) -> list[Any]:
        """Return the row of a table."""
        return [
            what, books, 100 * (self.coded / self.huffman - 1),
            100 * ((self.coded + self.plain) / (self.entropy + self.plain) - 1), self.wire / self.raw,
        ]  # fmt: skip


def losses() -> Table:
    """Measure bits on weights of public checkpoints, and on a small training run."""
    table = Table(
        "Fixed codebooks: what they lose",
        ["messages", "books", "% over Huffman, coded plane", "% over Shannon, message", "wire / raw"],
        notes=[
            "Huffman: a code of at most 12 bits for each tensor, its table a byte a symbol; 4,096 symbols and more",
            f"training: a small transformer, books of its first {LEARNED_STEPS} steps of {MEASURED_STEPS}",
        ],
    )
    shipped = CodebookSet.shipped()
    for file, dtype in WEIGHTS:
        container = CONTAINERS[LAYOUTS[dtype].word_bytes]
        tensors = [np.frombuffer(one.data, container) for one in read(path(file)).values() if one.dtype == dtype]
        tensors = [words for words in tensors if words.size >= 4096]
        samples = {(dtype, "weight"): [sample_counts(words, LAYOUTS[dtype]) for words in tensors]}
        for name, books in (("shipped", shipped), ("its own", CodebookSet.learn(samples, k=16))):
            loss, codec = Loss(), TensorCodec(books)
            for words in tensors:
                loss.add(codec, words, dtype, "weight")
            table.rows.append(loss.row(f"{file}, weights", name))
    found: dict[tuple[str, str], Loss] = {}
    codec = TensorCodec(CodebookSet({}))
    for step, kind, dtype, words in _training():
        if step < LEARNED_STEPS:
            codec.observe(words, dtype, kind)
            continue
        if not codec.books.families:
            codec.replace_books(CodebookSet.learn(codec.samples(), k=16))
        if words.size >= 4096:
            found.setdefault((kind, dtype), Loss()).add(codec, words, dtype, kind)
    for (kind, dtype), loss in sorted(found.items()):
        table.rows.append(loss.row(f"training {dtype}, {kind}", "first steps"))
    return table


def stages() -> Table:
    """Compare one stage, with and without choosing a book, with counting, building and coding."""
    words = np.concatenate([np.frombuffer(one.data, np.uint16) for one in read(path("mpnet-bf16")).values()])
    start = words.size // 2
    symbols = plane(words[start : start + SYMBOLS], "BF16")
    family = CodebookSet.shipped().families["BF16", "weight"]
    layout = LAYOUTS["U8"]
    out = np.empty(room(symbols.size, 8), np.uint8)
    blocks = [symbols[start : start + BLOCK_WORDS] for start in range(0, symbols.size, BLOCK_WORDS)]
    huffman = Huffman()
    book = family.choose(sample_counts(symbols, layout)).book

    def bare() -> None:
        book.encode(symbols, out)

    def chosen() -> None:
        choice = family.choose(sample_counts(symbols, layout))
        choice.book.encode(symbols, out, shift=choice.shift)

    def three() -> None:
        profiler = Profiler(Stream(8, symbols.size), "huffman")
        for block in blocks:
            profiler.add(block)
        plan = huffman.plan(profiler.finish())
        assert plan is not None
        writer = plan.writer(out)
        for block in blocks:
            writer.add(block)
        writer.finish()

    actions = {"bare": bare, "one stage": chosen, "three stages": three}
    timed = [Timed(lambda _, one=one: one()) for one in actions.values()]  # type: ignore[misc]
    medians = dict(zip(actions, alternate(timed, 41), strict=True))
    table = Table(
        "Fixed codebooks: stages, CPU time of 1 Mi symbols",
        ["what", "us", "of the bare encode"],
        [[name, 1e6 * median, median / medians["bare"]] for name, median in medians.items()],
    )
    table.passed["choosing a book and coding takes at most 1.03 of bare coding"] = (
        medians["one stage"] <= 1.03 * medians["bare"]
    )
    table.passed["three stages take at least 1.10 of one"] = medians["three stages"] >= 1.10 * medians["one stage"]
    return table


def tables() -> list[Table]:
    """Return both tables."""
    return [losses(), stages()]


def _training() -> Iterator[tuple[int, str, str, Words]]:
    """Train a small transformer; yield step, kind, dtype and words of its gradients and activations."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch import nn

    from pipeline.collectives import dtype_name, words_of

    torch.manual_seed(0)
    torch.set_num_threads(1)
    source = b"".join(map(Path.read_bytes, sorted((ROOT / "synth").glob("*.py"))))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 2)
    net = nn.ModuleDict({"embedding": nn.Embedding(256, 128), "body": body, "head": nn.Linear(128, 256)})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    found: list[tuple[str, Any]] = []
    for name in ("body", "head"):
        net[name].register_forward_hook(lambda _, __, output: found.append(("activation", output.detach())))
    mask = nn.Transformer.generate_square_subsequent_mask(64)
    for step in range(MEASURED_STEPS):
        starts = torch.randint(len(text) - 65, (32,))
        batch = torch.stack([text[start : start + 65] for start in starts]).long()
        found.clear()
        hidden = net["body"](net["embedding"](batch[:, :-1]), mask=mask)
        loss = F.cross_entropy(net["head"](hidden).transpose(1, 2), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in net.named_parameters():
            found.append(("embedding gradient" if "embedding" in name else "gradient", parameter.grad))
        for kind, tensor in found:
            for dtype in (torch.float32, torch.bfloat16):
                cast = tensor.to(dtype).contiguous()
                yield step, kind, dtype_name(cast), words_of(cast).copy()
        optimizer.step()
