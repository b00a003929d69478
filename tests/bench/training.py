"""Fixed codebooks beside codes made for each tensor: bits of real weights, gradients and activations, and CPU time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from operators.base import BLOCK_WORDS, Stream
from operators.books import room
from operators.kernels.huffman import limited_lengths
from operators.literals.huffman import Huffman
from operators.literals.profile import Profiler
from operators.words import Words
from pipeline.messages import HEADER, PART, TensorCodec
from synth.books import LAYOUTS, CodebookSet, Counts, Layout, take_samples
from tests.bench import link
from tests.bench.report import Table, cpu_seconds
from tests.checkpoints import path, read
from tests.processes import ROOT

SYMBOLS = 1 << 20
TURNS = 401
LEAST_WORDS = 4096
LEARNED_STEPS, MEASURED_STEPS = 8, 32
DRIFT_SPANS, CHECK_EVERY = (40, 80, 160), 8
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

    columns: Final = ["% over Huffman, coded plane", "% over Huffman, message", "% over Shannon, message", "wire / raw"]

    def __init__(self) -> None:
        self.coded = self.huffman = self.entropy = self.plain = self.wire = self.raw = 0.0

    def add(self, codec: TensorCodec, words: Words, dtype: str, kind: str) -> None:
        """Code one tensor, and what codes of its own would take."""
        counts = np.bincount(plane(words, dtype), minlength=256).astype(np.int64)
        message = codec.encode(words, dtype, kind)
        plain = (words.itemsize - 1) * words.size
        self.plain += plain
        self.coded += message.size - HEADER.size - PART.itemsize - plain
        self.huffman += huffman_bits(counts) / 8
        self.entropy += entropy_bits(counts) / 8
        self.wire += message.size
        self.raw += words.nbytes

    @property
    def over_huffman(self) -> float:
        """Of the coded plane, in per cent."""
        return 100 * (self.coded / self.huffman - 1)

    @property
    def message_over_huffman(self) -> float:
        """Of all that is sent but the header, in per cent."""
        return 100 * ((self.coded + self.plain) / (self.huffman + self.plain) - 1)

    @property
    def message_over_shannon(self) -> float:
        """As `message_over_huffman`."""
        return 100 * ((self.coded + self.plain) / (self.entropy + self.plain) - 1)

    def cells(self) -> list[float]:
        """Return the cells of `columns`."""
        return [self.over_huffman, self.message_over_huffman, self.message_over_shannon, self.wire / self.raw]


def weights() -> Table:
    """Measure bits of weights of public checkpoints."""
    table = Table(
        "Fixed codebooks: weights",
        ["file", "books", *Loss.columns],
        notes=["Huffman: a code of at most 12 bits for each tensor, its table a byte a symbol; 4,096 symbols and more"],
    )
    shipped = CodebookSet.shipped()
    holds = True
    for file, dtype in WEIGHTS:
        container = CONTAINERS[LAYOUTS[dtype].word_bytes]
        tensors = [np.frombuffer(one.data, container) for one in read(path(file)).values() if one.dtype == dtype]
        tensors = [words for words in tensors if words.size >= LEAST_WORDS]
        samples = {(dtype, "weight"): [take_samples(words, LAYOUTS[dtype])[0] for words in tensors]}
        for name, books in (("shipped", shipped), ("of samples", CodebookSet.learn(samples, k=16))):
            loss, codec = Loss(), TensorCodec(books)
            for words in tensors:
                loss.add(codec, words, dtype, "weight")
            table.rows.append([file, name, *loss.cells()])
        holds &= loss.over_huffman <= (1.2 if dtype == "I8" else 0.5) and loss.message_over_shannon <= 1
    table.passed[
        "books of samples: at most 0.5 % over Huffman on the coded plane, 1.2 % for integers, 1 % over Shannon"
    ] = holds
    return table


def finetuned() -> Table:
    """Measure bits of gradients and activations of a small real training run."""
    from pipeline.collectives import dtype_name, words_of
    from tests.bench import finetune

    found: dict[tuple[str, str], Loss] = {}
    codec = TensorCodec(CodebookSet({}))
    for step, kind, tensor in finetune.steps(MEASURED_STEPS):
        if step == LEARNED_STEPS and not codec.books.families:
            codec.replace_books(CodebookSet.learn(codec.samples(), k=16))
        for cast in (tensor, tensor.bfloat16()):
            words, dtype = words_of(cast.contiguous()), dtype_name(cast)
            if step < LEARNED_STEPS:
                codec.observe(words, dtype, kind)
            elif words.size >= LEAST_WORDS:
                found.setdefault((kind, dtype), Loss()).add(codec, words, dtype, kind)
    table = Table(
        "Fixed codebooks: MiniLM is fine-tuned",
        ["messages", "dtype", *Loss.columns],
        [[kind, dtype, *loss.cells()] for (kind, dtype), loss in sorted(found.items())],
        notes=[f"books of samples of the first {LEARNED_STEPS} steps of {MEASURED_STEPS}; nothing is learned again"],
    )
    dense = [loss for (kind, _), loss in found.items() if kind != "embedding gradient"]
    table.passed["dense kinds: at most 0.5 % over Huffman on the coded plane, messages 1 % over Shannon"] = all(
        loss.over_huffman <= 0.5 and loss.message_over_shannon <= 1 for loss in dense
    )
    return table


def drift() -> Table:
    """Measure bits where all distributions move: a small transformer that is trained from the start."""
    from pipeline.collectives import dtype_name, words_of

    kept, again = (TensorCodec(CodebookSet({})) for _ in range(2))
    losses: dict[tuple[str, str], list[Loss]] = {}
    learned = 0
    at = -1
    for step, kind, tensor in _from_the_start(DRIFT_SPANS[-1]):
        words, dtype = words_of(tensor), dtype_name(tensor)
        if step != at and step >= LEARNED_STEPS:
            is_due = step == LEARNED_STEPS or (
                step % CHECK_EVERY == 0 and any(traffic.has_drifted for traffic in again.stats().values())
            )
            for codec in (kept, again) if step == LEARNED_STEPS else (again,) if is_due else ():
                codec.replace_books(CodebookSet.learn(codec.samples(), k=16))
            learned += is_due
        at = step
        if step < LEARNED_STEPS:
            kept.observe(words, dtype, kind)
            again.observe(words, dtype, kind)
        elif words.size >= LEAST_WORDS:
            span = next(f"to {end}" for end in DRIFT_SPANS if step < end)
            pair = losses.setdefault((kind, span), [Loss(), Loss()])
            pair[0].add(kept, words, dtype, kind)
            pair[1].add(again, words, dtype, kind)
    table = Table(
        "Fixed codebooks: drift",
        ["messages", "steps", "% over Huffman, plane: first books", "message", "plane: learned again", "message"],
        [
            [kind, span, first.over_huffman, first.message_over_huffman, other.over_huffman, other.message_over_huffman]
            for (kind, span), (first, other) in losses.items()
        ],
        notes=[
            f"BF16, a small transformer from random weights, books of its first {LEARNED_STEPS} steps",
            f"or learned again where drift is seen, at every {CHECK_EVERY}th step: {learned} times",
        ],
    )
    table.passed["with shifts and learning again messages are at most 1 % over Huffman"] = all(
        other.message_over_huffman <= 1 for _, other in losses.values()
    )
    return table


def stages() -> Table:
    """Compare one stage, with and without choosing a book, with counting, building and coding."""
    words = np.concatenate([np.frombuffer(one.data, np.uint16) for one in read(path("mpnet-bf16")).values()])
    start = words.size // 2
    symbols = plane(words[start : start + SYMBOLS], "BF16")
    family = CodebookSet.shipped().families["BF16", "weight"]
    layout = Layout(0, 1, 0, 1)
    out = np.empty(room(symbols.size, 8), np.uint8)
    blocks = [symbols[start : start + BLOCK_WORDS] for start in range(0, symbols.size, BLOCK_WORDS)]
    huffman = Huffman()
    _, (best,) = family.select(symbols, layout)

    def bare() -> None:
        best.book.encode(symbols, out, shift=best.shift)

    def chosen() -> None:
        _, (choice,) = family.select(symbols, layout)
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

    def timed(action: Callable[[], None]) -> float:
        bare()  # what ran before matters: here it is the same for all
        return cpu_seconds(action)[0]

    turns = [[timed(action) for action in actions.values()] for _ in range(TURNS + 1)]
    times = np.array(turns[1:])
    one, three_to_one = float(np.median(times[:, 1] / times[:, 0])), float(np.median(times[:, 2] / times[:, 1]))
    table = Table(
        "Fixed codebooks: stages, CPU time of 1 Mi symbols",
        ["what", "us"],
        [[name, 1e6 * float(median)] for name, median in zip(actions, np.median(times, axis=0), strict=True)],
        notes=[
            f"median of {TURNS} alternating turns, and of their ratios:",
            f"choosing a book and coding takes {one:.3f} of bare coding, three stages {three_to_one:.3f} of one",
        ],
    )
    table.passed["choosing a book and coding takes at most 1.03 of bare coding"] = one <= 1.03
    table.passed["three stages take at least 1.10 of one"] = three_to_one >= 1.10
    return table


TABLES: Final = {
    "training.weights": weights,
    "training.finetuned": finetuned,
    "training.drift": drift,
    "training.stages": stages,
    "training.link": link.table,
}
"""By the names that `python -m tests.bench` takes; ``training`` is all of them."""


def tables() -> Iterator[Table]:
    """Yield all tables."""
    for table in TABLES.values():
        yield table()


def _from_the_start(n_steps: int) -> Iterator[tuple[int, str, Any]]:
    """Train a small transformer on the source of this project; yield step, kind and tensor."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch import nn

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
    for step in range(n_steps):
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
            yield step, kind, tensor.bfloat16().contiguous()
        optimizer.step()
