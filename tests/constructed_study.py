"""A study's folder made from chosen numbers: what the tests of findings and report read instead of training."""

import itertools
import json
import math
import random

LENGTHS = (256, 512, 1024, 2048, 4096)
TRAIN_LEN = 256
EDGES = [0, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
# perplexity per byte at LENGTHS, of about the size that models trained for some minutes reach
HEADLINE = {
    "rotary": (3.30, 3.86, 5.80, 10.19, 15.75),
    "alibi": (3.25, 3.15, 3.10, 3.07, 3.05),
    "rotary+alibi": (3.19, 3.14, 3.11, 3.09, 3.09),
}
CONTROLS = {
    ("rotary", "limited"): (3.30, 3.20, 3.15, 3.12, 3.10),
    ("alibi", "limited"): (3.25, 3.15, 3.10, 3.07, 3.05),
    ("rotary+alibi", "limited"): (3.19, 3.14, 3.11, 3.09, 3.09),
    ("rotary", "sliding"): (3.16, 4.34, 8.06, 14.46, 19.2),
    ("alibi", "sliding"): (3.06, 3.05, 3.05, 3.05, 3.05),
    ("rotary+alibi", "sliding"): (3.02, 3.02, 3.03, 3.04, 3.05),
    ("rotary", "linear"): (3.30, 5.6, 9.5, 13.2, 18.0),
    ("rotary", "ntk"): (3.30, 3.45, 4.3, 6.8, 9.4),
    ("rotary", "yarn"): (3.30, 3.8, 4.4, 5.2, 6.1),
    ("rotary+alibi", "linear"): (3.19, 3.9, 4.6, 5.1, 5.6),
    ("rotary+alibi", "ntk"): (3.19, 3.16, 3.24, 3.32, 3.4),
    ("rotary+alibi", "yarn"): (3.19, 3.3, 3.4, 3.5, 3.6),
}
# perplexity without and with what lies beyond the training length, at 512 ... 4096
CONTEXT = {
    "rotary": ((3.05, 4.6), (3.02, 6.9), (3.0, 11.5), (2.99, 17.0)),
    "alibi": ((3.0, 3.0), (2.99, 2.985), (2.98, 2.97), (2.98, 2.97)),
    "rotary+alibi": ((3.0, 2.98), (2.99, 2.96), (2.98, 2.95), (2.98, 2.94)),
}
COPY = {
    "rotary": {64: 0.81, 128: 0.74, 256: 0.66, 512: 0.21, 1024: 0.12, 2048: 0.1},
    "alibi": {64: 0.78, 128: 0.60, 256: 0.40, 512: 0.27, 1024: 0.18, 2048: 0.16},
    "rotary+alibi": {64: 0.84, 128: 0.71, 256: 0.52, 512: 0.35, 1024: 0.24, 2048: 0.19},
}


def documents(perplexity, count, *, jitter, other=None):
    """`count` documents around a perplexity: the text's difficulty is shared, `jitter` is the encoding's own."""
    shared, own = random.Random("text"), random.Random(jitter)
    rows = []
    for index in range(count):
        tokens = 4096 if index % 3 else 3072
        difficulty, noise = shared.gauss(0, 0.16), own.gauss(0, 0.004)
        row = {
            "id": f"package/module{index}.py",
            "tokens": tokens,
            "bytes": tokens,
            "nats": (math.log(perplexity) + difficulty + noise) * tokens,
        }
        if other is not None:
            row["limited_nats"] = (math.log(other) + difficulty) * tokens
        rows.append(row)
    return rows


def line(encoding, seed, protocol, eval_len, **values):
    empty = {"documents": None, "reason": None, "last_256": None, "by_position": None, "seconds": 0.5}
    return {"encoding": encoding, "seed": seed, "protocol": protocol, "eval_len": eval_len, **empty, **values}


def by_position(encoding, perplexity):
    """Losses that leave the common course where the training length ends, for encodings that grow."""
    start, end = HEADLINE.get(encoding, (perplexity, perplexity))[0], perplexity
    nats, tokens = [], []
    for low, high in itertools.pairwise(EDGES):
        past = max(0.0, math.log2((low + high) / 2 / TRAIN_LEN)) / math.log2(14)
        loss = math.log(start) + past * (math.log(end) - math.log(start)) + 0.5 * 2 ** (-low / 24)
        nats.append(loss * (high - low) * 12)
        tokens.append((high - low) * 12)
    return {"edges": EDGES, "nats": nats, "tokens": tokens}


def evaluation_lines(encoding, seed, headline, controls, context, copies):
    rows = []
    for eval_len, value in zip(LENGTHS, headline, strict=True):
        if value is None:
            reason = f"the learned table has {TRAIN_LEN} positions"
            rows.append(line(encoding, seed, "windows", eval_len, reason=reason))
            continue
        last = {"nats": math.log(value) * 1.01 * 3072, "tokens": 3072}
        docs = documents(value, 12, jitter=f"{encoding}{seed}{eval_len}")
        bins = by_position(encoding, value) if eval_len == LENGTHS[-1] else None
        rows.append(line(encoding, seed, "windows", eval_len, documents=docs, last_256=last, by_position=bins))
    for (name, protocol), values in controls.items():
        for eval_len, value in zip(LENGTHS, values, strict=True):
            if name == encoding:
                docs = documents(value, 6, jitter=f"{encoding}{protocol}{seed}{eval_len}")
                rows.append(line(encoding, seed, protocol, eval_len, documents=docs))
    for eval_len, (near, far) in zip(LENGTHS[1:], context.get(encoding, ()), strict=False):
        docs = documents(far, 6, jitter=f"{encoding}{seed}{eval_len}", other=near)
        rows.append(line(encoding, seed, "context", eval_len, documents=docs))
    for distance, accuracy in copies.get(encoding, {}).items():
        rows.append(
            line(
                encoding,
                seed,
                "copy",
                distance,
                accuracy=accuracy,
                first_accuracy=0.41,
                trials=128,
                tokens=128 * 24,
                bytes=128 * 24,
                nats=900.0,
                first_nats=4100.0,
            )
        )
    return rows


def attention_maps(encoding):
    """Two heads whose weights fall with distance, causal, rows summing to one."""
    maps = []
    for head, reach in ((0, 6.0), (3, 60.0)):
        rows = []
        for query in range(48):
            raw = [math.exp(-(query - key) / reach) if key <= query else 0.0 for key in range(48)]
            rows.append([value / sum(raw) for value in raw])
        maps.append({"layer": 3, "head": head, "mean_distance": 10 * reach, "weights": rows})
    return {"document": "package/module0.py", "seq_len": 2 * TRAIN_LEN, "train_len": TRAIN_LEN, "maps": maps}


def write_cell(folder, encoding, seed, rows):
    cell = folder / "cells" / f"{encoding}-seed{seed}"
    cell.mkdir(parents=True)
    (cell / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "encoding": encoding,
        "seed": seed,
        "parameters": 820_000,
        "train_seconds": 92.5,
        "tokens_per_second": 11_100,
        "train_loss": 1.18,
        "heldout_loss_same_length": 1.19,
        "evaluate_seconds": 31.0,
        "attention": attention_maps(encoding),
    }
    (cell / "cell.json").write_text(json.dumps(summary))


def write_study(folder, *, headline=None, controls=None, context=None, copies=None, seeds=(0,), cost=None, **head):
    """Write the folder; the keyword tables replace the realistic ones above.  Returns the folder."""
    headline = HEADLINE if headline is None else headline
    folder.mkdir(parents=True, exist_ok=True)
    study = {
        "format": 1,
        "settings": {
            "encodings": list(headline),
            "seeds": list(seeds),
            "train_len": TRAIN_LEN,
            "eval_lens": list(LENGTHS),
            "steps": 1000,
            "tokenizer": "byte",
            "data": "stdlib",
        },
        "versions": {"python": "3.11.7", "torch": "2.13.0", "ropewalk": "0.1.0"},
        "machine": "2 cores, x86-64",
        "command": "ropewalk study --preset quick --out study",
        "corpus": {"name": "stdlib", "bytes": 9_480_000, "documents": 430, "fingerprint": "5f2b9a"},
        **head,
    }
    (folder / "study.json").write_text(json.dumps(study))
    for encoding, values in headline.items():
        for seed in seeds:
            moved = [None if v is None else v * (1 + 0.004 * (seed % 3)) for v in values]
            rows = evaluation_lines(
                encoding,
                seed,
                moved,
                CONTROLS if controls is None else controls,
                CONTEXT if context is None else context,
                COPY if copies is None else copies,
            )
            write_cell(folder, encoding, seed, rows)
    if cost is not None:
        (folder / "cost.json").write_text(json.dumps(cost))
    return folder
