"""What a trained model is asked: one line of evaluation.jsonl per protocol and length."""

import contextlib
import copy
import math
import pathlib
import time
from collections.abc import Callable, Iterator

import torch

import ropewalk as rw
from ropewalk.study import copying, files
from ropewalk.study.data import Corpus
from ropewalk.study.scoring import Scored, Scorer
from ropewalk.study.settings import Settings

STRETCHES = ("linear", "ntk", "yarn")
LAST = 256


class Evaluation:
    """All questions to one trained model, in their order, each answered once and remembered in a file."""

    def __init__(
        self, settings: Settings, encoding: str, seed: int, scorer: Scorer, corpus: Corpus, folder: pathlib.Path
    ):
        self.settings, self.encoding, self.seed, self.scorer = settings, encoding, seed, scorer
        self.blocks = corpus.held_out
        self.controls = corpus.held_out[: settings.control_documents]
        self.path = folder / "evaluation.jsonl"
        self.lines: dict[tuple[str, int], dict] = {}

    def run(self, report: Callable[..., None]) -> None:
        """Answer what the file does not hold yet; half a line at its end is forgotten."""
        known = files.read_lines(self.path)
        files.keep_lines(self.path, known)
        self.lines = {(line["protocol"], line["eval_len"]): line for line in known}
        questions = self.questions()
        for count, (protocol, length) in enumerate(questions):
            if (protocol, length) not in self.lines:
                report(phase="evaluate", step=count, steps=len(questions), protocol=protocol, eval_len=length)
                self.lines[protocol, length] = line = self.answer(protocol, length)
                files.append_line(self.path, line)

    def questions(self) -> list[tuple[str, int]]:
        """(protocol, length), the headline first."""
        lengths, train_len = self.settings.eval_lens, self.settings.train_len
        beyond = [length for length in lengths if length > train_len]
        asked = [(protocol, length) for protocol in ("windows", "sliding", "limited") for length in lengths]
        asked += [("context", length) for length in beyond]
        if rotates(self.scorer.model):
            asked += [(method, length) for method in STRETCHES for length in beyond]
        return asked + [("copy", distance) for distance in copying.copy_distances(self.settings)]

    def answer(self, protocol: str, length: int) -> dict:
        """One line; where the encoding cannot answer, its documents are null and `reason` says why."""
        started = time.perf_counter()
        line = {
            "encoding": self.encoding,
            "seed": self.seed,
            "protocol": protocol,
            "eval_len": length,
            "documents": None,
            "reason": self._refusal(protocol, length),
            "last_256": None,
            "by_position": None,
        }
        if line["reason"] is None:
            line |= getattr(self, f"_{'stretched' if protocol in STRETCHES else protocol}")(length, protocol)
        return line | {"seconds": round(time.perf_counter() - started, 3)}

    def loss_at_train_len(self) -> float | None:
        """Held-out loss, nats per token, in windows of the training length (or of the shortest length asked)."""
        lengths = self.settings.eval_lens
        length = self.settings.train_len if self.settings.train_len in lengths else lengths[0]
        documents = self.lines["windows", length]["documents"]
        if documents is None:
            return None
        return math.fsum(row["nats"] for row in documents) / sum(row["tokens"] for row in documents)

    def _refusal(self, protocol: str, length: int) -> str | None:
        limit = self.scorer.model.encoding.max_positions
        tokens = copying.copy_tokens(self.settings, length) if protocol == "copy" else length
        if limit is not None and tokens > limit:
            return f"the learned table has {limit} positions"
        return None

    def _windows(self, length: int, _protocol: str) -> dict:
        scored = self.scorer.windows(self.blocks, length)
        # the tokens that a model of train_len could not have scored this way; the context line compares them
        return _summary(scored) | {"beyond": scored.documents(self.settings.train_len)}

    def _sliding(self, length: int, _protocol: str) -> dict:
        if length == self.settings.eval_lens[-1]:
            return {"documents": self._control_part(length)}
        return {"documents": self.scorer.sliding(self.controls, length)}

    def _limited(self, length: int, _protocol: str) -> dict:
        train_len = self.settings.train_len
        if length <= train_len:
            return {"documents": self._control_part(length)}
        positions = torch.arange(length)
        near = positions[:, None] - positions < train_len
        scored = self.scorer.windows(self.controls, length, near)
        return _summary(scored) | {"beyond": scored.documents(train_len)}

    def _context(self, length: int, _protocol: str) -> dict:
        limited = {row["id"]: row["nats"] for row in self.lines["limited", length]["beyond"]}
        rows = [row for row in self.lines["windows", length]["beyond"] if row["id"] in limited]
        return {"documents": [row | {"limited_nats": limited[row["id"]]} for row in rows]}

    def _stretched(self, length: int, method: str) -> dict:
        with stretched(self.scorer.model, method, length, self.settings.train_len):
            return _summary(self.scorer.windows(self.controls, length))

    def _copy(self, distance: int, _protocol: str) -> dict:
        return copying.copy_task(self.scorer, self.blocks, self.settings, distance)

    def _control_part(self, length: int) -> list[dict]:
        names = {block.id for block in self.controls}
        return [row for row in self.lines["windows", length]["documents"] if row["id"] in names]


def _summary(scored: Scored) -> dict:
    return {"documents": scored.documents(), "last_256": scored.last(LAST), "by_position": scored.by_position()}


def rotates(model: rw.Transformer) -> bool:
    """Whether plain RoPE is part of the encoding, alone or in company."""
    return any(_can_stretch(part) for part in model.encoding.modules())


def _can_stretch(part: torch.nn.Module) -> bool:
    """Plain RoPE: another spectrum, or a class derived from it, is somebody's own decision."""
    return type(part) is rw.Rotary and part.base is not None


@contextlib.contextmanager
def stretched(model: rw.Transformer, method: str, eval_len: int, train_len: int) -> Iterator[None]:
    """Within the context, every RoPE of the model has frequencies stretched to `eval_len` by `method`."""
    original = model.encoding
    replace(model, original, with_stretch(original, method, eval_len, train_len))
    try:
        yield
    finally:
        replace(model, model.encoding, original)


def with_stretch(encoding: rw.Encoding, method: str, eval_len: int, train_len: int) -> rw.Encoding:
    """A copy of the encoding whose RoPE parts have other frequencies."""
    if isinstance(encoding, rw.Rotary) and encoding.base is not None:
        options = {"train_len": train_len} if method == "yarn" else {}
        spectrum = getattr(rw.spectra, method)(
            encoding.rotary_dim, encoding.base, stretch=max(1.0, eval_len / train_len), **options
        )
        return rw.Rotary(encoding.head_dim, layout=encoding.layout, spectrum=spectrum)
    changed = copy.deepcopy(encoding)
    for module in list(changed.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, rw.Encoding) and _can_stretch(child):
                setattr(module, name, with_stretch(child, method, eval_len, train_len))
    return changed


def replace(model: torch.nn.Module, old: rw.Encoding, new: rw.Encoding) -> None:
    """Put `new` wherever the model holds `old`."""
    for module in list(model.modules()):
        if module is not old:
            for name, child in list(module.named_children()):
                if child is old:
                    setattr(module, name, new)
