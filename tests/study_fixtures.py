"""A study so small that it trains in a blink, on text made here."""

import pathlib

import torch

from ropewalk.study import data, settings

TINY = settings.Settings(
    encodings=("rotary", "alibi"),
    train_len=16,
    eval_lens=(16, 32, 64),
    steps=40,
    batch_size=2,
    model_dim=16,
    num_layers=1,
    num_heads=2,
    warmup_steps=4,
    documents=3,
    control_documents=2,
    copy_trials=2,
    cost_seconds=0.0,
    dtype="float32",
)


def write_text(folder: pathlib.Path, files: int = 10, size: int = 200) -> pathlib.Path:
    """Files of pseudo-random letters, the same every time."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        generator = torch.Generator().manual_seed(index)
        letters = (97 + torch.randint(20, (size,), generator=generator)).tolist()
        (folder / f"text{index}.txt").write_bytes(bytes(letters))
    return folder


def tiny(folder: pathlib.Path, **changes) -> tuple[settings.Settings, data.Corpus]:
    """Settings and corpus of a tiny study whose text lies in `folder`."""
    asked = TINY.replace(data=str(write_text(folder)), **changes)
    return asked, data.load(asked)
