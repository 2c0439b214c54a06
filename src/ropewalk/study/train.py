"""One model trained: an encoding and a seed, resumable at any moment with the same bits."""

import io
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

import ropewalk as rw
from ropewalk.errors import message
from ropewalk.naming import build as build_encoding
from ropewalk.study import data, files, optim
from ropewalk.study.settings import Settings

LOG_EVERY = 10
# Logits per step above which they are made and dropped again a slice of tokens at a time
LARGEST_LOGITS = 2**26
# bfloat16 has to win the race by this much, since casts cost time too
BFLOAT16_MUST_WIN_BY = 1.3


def build(settings: Settings, encoding: str, seed: int, vocab_size: int) -> rw.Transformer:
    """The untrained model of a cell; equal seeds give equal weights whatever the encoding learns of its own."""
    sizes = {"model_dim": settings.model_dim, "num_layers": settings.num_layers, "num_heads": settings.num_heads}
    torch.manual_seed(seed)
    plain = rw.Transformer(vocab_size, rw.NoPE(), **sizes)
    built = build_encoding(
        encoding,
        head_dim=settings.head_dim,
        num_heads=settings.num_heads,
        model_dim=settings.model_dim,
        num_positions=settings.train_len,
    )
    model = rw.Transformer(vocab_size, built, **sizes)
    model.load_state_dict(plain.state_dict(), strict=False)
    return model


def faster_dtype(device: str, size: int = 256, repeats: int = 5) -> str:
    """The winner of a short race of matrix products: "bfloat16" if it is at least 1.3 times faster."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left = torch.randn(size, size, device=device).to(dtype)
        torch.mm(left, left)
        laps = []
        for _ in range(repeats):
            _wait(device)
            start = time.perf_counter()
            torch.mm(left, left)
            _wait(device)
            laps.append(time.perf_counter() - start)
        seconds[dtype] = statistics.median(laps)
    return "bfloat16" if seconds[torch.float32] >= BFLOAT16_MUST_WIN_BY * seconds[torch.bfloat16] else "float32"


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def autocast(settings: Settings):
    """bfloat16 matrix products where the settings say so, float32 everywhere else."""
    return torch.autocast(settings.device.partition(":")[0], torch.bfloat16, enabled=settings.dtype == "bfloat16")


def loss_of(model: rw.Transformer, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean loss, nats per token; a large vocabulary's logits are recomputed slice by slice."""
    hidden = model.hidden(inputs).flatten(0, 1)
    targets = targets.flatten()
    slices = math.ceil(len(targets) * model.embedding.num_embeddings / LARGEST_LOGITS)
    if slices == 1:
        return _summed(model, hidden, targets) / len(targets)
    parts = zip(hidden.chunk(slices), targets.chunk(slices), strict=True)
    losses = [recompute(_summed, model, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).sum() / len(targets)


def _summed(model: rw.Transformer, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model.head(hidden).float(), targets, reduction="sum")


class Trainer:
    """Model, optimizers and step of one cell, with the folder that remembers them."""

    def __init__(self, settings: Settings, encoding: str, seed: int, corpus: data.Corpus, folder: pathlib.Path):
        self.settings, self.seed, self.corpus, self.folder = settings, seed, corpus, folder
        self.model = build(settings, encoding, seed, corpus.vocab_size).to(settings.device)
        muon_dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
        self.optimizers = optim.optimizers(
            self.model,
            matrix_rate=settings.matrix_rate,
            vector_rate=settings.vector_rate,
            weight_decay=settings.weight_decay,
            dtype=muon_dtype,
        )
        self.parameters = [p for group in self.optimizers for g in group.param_groups for p in g["params"]]
        self.step = 0
        self.seconds = 0.0
        self.loss = math.nan

    @property
    def state_path(self) -> pathlib.Path:
        """Where training continues from."""
        return self.folder / "checkpoint.pt"

    def train_step(self) -> float:
        """One step; returns its loss, nats per token."""
        settings = self.settings
        inputs, targets = data.batch(self.corpus.train, self.seed, self.step, settings.batch_size, settings.train_len)
        optim.set_rate(self.optimizers, optim.rate(self.step, settings.steps, settings.warmup_steps))
        with autocast(settings):
            loss = loss_of(self.model, inputs.to(settings.device), targets.to(settings.device))
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, settings.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def save(self) -> None:
        """Everything that the next step depends on, replaced at once."""
        buffer = io.BytesIO()
        torch.save(
            {
                "step": self.step,
                "seconds": self.seconds,
                "loss": self.loss,
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            },
            buffer,
        )
        files.write_bytes(self.state_path, buffer.getvalue())

    def restore(self) -> None:
        """Continue from `save`, if there is one, and forget the log lines after it."""
        log = self.folder / "train.jsonl"
        if self.state_path.exists():
            state = _read(self.state_path, lambda path: torch.load(path, self.settings.device, weights_only=True))
            self.step, self.seconds, self.loss = state["step"], state["seconds"], state["loss"]
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        files.keep_lines(log, [line for line in files.read_lines(log) if line["step"] <= self.step])

    def run(self, report: Callable[..., None]) -> None:
        """Train to the last step, logging every 10 steps and saving about ten times."""
        self.restore()
        save_every = LOG_EVERY * max(1, self.settings.steps // (10 * LOG_EVERY))
        losses, since = [], time.perf_counter()
        while self.step < self.settings.steps:
            losses.append(self.train_step())
            if self.step % LOG_EVERY and self.step < self.settings.steps:
                continue
            seconds = time.perf_counter() - since
            self.seconds += seconds
            self.loss = math.fsum(losses) / len(losses)
            self._check_finite()
            speed = len(losses) * self.settings.batch_size * self.settings.train_len / seconds
            files.append_line(
                self.folder / "train.jsonl",
                {"step": self.step, "loss_nats_per_token": self.loss, "tokens_per_second": round(speed, 1)},
            )
            report(
                phase="train",
                step=self.step,
                steps=self.settings.steps,
                loss=self.loss,
                tokens_per_second=speed,
                elapsed=self.seconds,
            )
            if self.step % save_every == 0:
                self.save()
            losses, since = [], time.perf_counter()
        self.save_weights()

    def _check_finite(self) -> None:
        if not math.isfinite(self.loss):
            raise ValueError(
                f"loss must be finite, got {self.loss} at step {self.step}\nhint: --dtype float32, if it was bfloat16"
            )

    def save_weights(self) -> None:
        """The trained weights, with how they came about, and no more state to continue from."""
        tokens = self.settings.steps * self.settings.batch_size * self.settings.train_len
        summary = {
            "train_seconds": self.seconds,
            "train_loss": self.loss,
            "tokens_per_second": tokens / max(self.seconds, 1e-9),
        }
        write_weights(self.folder / "model.safetensors", self.model, summary)
        self.state_path.unlink(missing_ok=True)


def write_weights(path: pathlib.Path, model: nn.Module, summary: dict) -> None:
    """Weights as safetensors (a tied one once), with the summary of their training in the header."""
    import safetensors.torch

    tensors = {name: value.detach().cpu().contiguous() for name, value in model.named_parameters()}
    files.write_bytes(path, safetensors.torch.save(tensors, metadata={"training": json.dumps(summary)}))


def _read(path: pathlib.Path, read: Callable):
    """What `read` makes of a file, or a ValueError that names a damaged one."""
    try:
        return read(path)
    except Exception as error:  # pickle, zip and safetensors each have their own
        why = f"{type(error).__name__}: {error}"
        raise ValueError(message(str(path), "a whole file", why, hint="delete it, and its run starts again")) from error


def _tensors(path: pathlib.Path) -> tuple[dict[str, Tensor], dict]:
    import safetensors

    with safetensors.safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return tensors, json.loads(file.metadata()["training"])


def read_weights(path: pathlib.Path, model: nn.Module) -> dict:
    """Load `write_weights`'s file into a model of the same settings; returns the summary."""
    tensors, summary = _read(path, _tensors)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    return summary
