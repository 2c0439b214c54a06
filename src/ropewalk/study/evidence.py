"""A study's folder as numbers: read once, never changed, whatever state a killed run left it in."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.errors import require
from ropewalk.study import statistics
from ropewalk.study.files import read_json, read_lines
from ropewalk.study.statistics import Document, Interval, Number

# what each protocol scores; printed beside its numbers, since numbers of different protocols do not compare
PROTOCOLS = {
    "windows": "non-overlapping windows of the evaluation length, all tokens scored once",
    "sliding": "windows of the evaluation length moved by a quarter of it: a scored token has at least three"
    " quarters of the window before it (the first window is scored whole)",
    "limited": "as windows, but every token may attend to the training length back and no further",
    "linear": "as windows, inverse frequencies divided by the stretch",
    "ntk": "as windows, base raised for the stretch",
    "yarn": "as windows, inverse frequencies blended by wavelength (YaRN), scores sharpened",
    "context": "as windows, only tokens with more than the training length before them",
    "copy": "a span repeated after filler: loss and accuracy on its second copy",
}
_PLAIN = ("reason", "last_256", "by_position", "accuracy", "first_accuracy", "trials")
STRETCHES = ("linear", "ntk", "yarn")


@dataclass(frozen=True)
class Evaluation:
    """One line of evaluation.jsonl: what one cell scored under one protocol at one length."""

    protocol: str
    eval_len: int
    documents: tuple[Document, ...]
    limited: tuple[Document, ...] = ()
    reason: str | None = None
    last_256: dict[str, Number] | None = None
    by_position: dict[str, list[Number]] | None = None
    accuracy: Number | None = None
    first_accuracy: Number | None = None
    trials: int | None = None

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> "Evaluation":
        rows = line.get("documents") or []
        return cls(
            protocol=line["protocol"],
            eval_len=int(line["eval_len"]),
            documents=tuple(Document(r["id"], r["nats"], r["tokens"], r["bytes"]) for r in rows),
            limited=tuple(
                Document(r["id"], r["limited_nats"], r["tokens"], r["bytes"])
                for r in rows
                if r.get("limited_nats") is not None
            ),
            **{name: line.get(name) for name in _PLAIN},
        )


@dataclass(frozen=True)
class Cell:
    """One trained model: an encoding and a seed."""

    encoding: str
    seed: int
    summary: dict[str, Any]
    evaluations: tuple[Evaluation, ...]

    def find(self, protocol: str, eval_len: int) -> Evaluation | None:
        """The answer to this protocol and length; None where it was not asked yet."""
        return next((e for e in self.evaluations if (e.protocol, e.eval_len) == (protocol, eval_len)), None)


@dataclass(frozen=True)
class Study:
    """Everything that a report may say something about."""

    settings: dict[str, Any]
    cells: tuple[Cell, ...]
    versions: dict[str, Any] = field(default_factory=dict)
    machine: str = ""
    command: str = ""
    corpus: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, Any] | None = None

    @property
    def train_len(self) -> int:
        return int(self.settings["train_len"])

    @property
    def encodings(self) -> tuple[str, ...]:
        """In the order of the settings, then of the cells."""
        wanted = [name for name in self.settings.get("encodings", ()) if self.of(name)]
        return tuple(dict.fromkeys([*wanted, *(cell.encoding for cell in self.cells)]))

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({cell.seed for cell in self.cells}))

    def of(self, encoding: str) -> tuple[Cell, ...]:
        return tuple(sorted((c for c in self.cells if c.encoding == encoding), key=lambda cell: cell.seed))

    def lengths(self, protocol: str) -> tuple[int, ...]:
        """Every length that this protocol was asked for, ascending."""
        lines = [line for cell in self.cells for line in cell.evaluations]
        return tuple(sorted({line.eval_len for line in lines if line.protocol == protocol}))

    def runs(self, encoding: str, protocol: str, eval_len: int) -> list[Evaluation]:
        """One answered evaluation per seed; empty where none of them could answer."""
        found = (cell.find(protocol, eval_len) for cell in self.of(encoding))
        return [e for e in found if e is not None and (e.documents or e.accuracy is not None)]

    def reason(self, encoding: str, protocol: str, eval_len: int) -> str | None:
        """Why there is no number, or None if there is one or nobody asked."""
        found = (cell.find(protocol, eval_len) for cell in self.of(encoding))
        return next((e.reason for e in found if e is not None and e.reason), None)

    def documents(self, encoding: str, protocol: str, eval_len: int) -> list[Document]:
        """Per-document losses, averaged over seeds."""
        runs = [list(e.documents) for e in self.runs(encoding, protocol, eval_len) if e.documents]
        return statistics.mean_over_seeds(runs) if runs else []

    def added(self, encoding: str, eval_len: int) -> Interval | None:
        """What context beyond the training length adds to the loss of tokens that have it, nats per token.

        The same tokens, with all context minus with the training length back; negative: it saves loss.
        """
        runs = [e for e in self.runs(encoding, "context", eval_len) if e.limited]
        if not runs:
            return None
        whole = statistics.mean_over_seeds([list(e.documents) for e in runs])
        return statistics.paired_interval(whole, statistics.mean_over_seeds([list(e.limited) for e in runs]))

    def gap(self, one: tuple[str, str], two: tuple[str, str], eval_len: int) -> Interval | None:
        """Paired difference of two (encoding, protocol) in nats per token, negative if `one` is better."""
        first, second = self.documents(*one, eval_len), self.documents(*two, eval_len)
        if not first or not second or not {d.id for d in first} & {d.id for d in second}:
            return None
        return statistics.paired_interval(first, second)

    def perplexities(self, encoding: str, protocol: str, eval_len: int) -> list[float]:
        """One perplexity per token and seed."""
        runs = [e.documents for e in self.runs(encoding, protocol, eval_len) if e.documents]
        return [statistics.perplexity(row.nats, row.tokens) for row in map(statistics.totals, runs)]

    def last_256(self, encoding: str, eval_len: int) -> list[float]:
        """One perplexity per seed over the last 256 positions of each window."""
        runs = [e.last_256 for e in self.runs(encoding, "windows", eval_len) if e.last_256]
        return [statistics.perplexity(row["nats"], int(row["tokens"])) for row in runs]

    def by_position(self, encoding: str, eval_len: int) -> tuple[list[int], list[float | None]] | None:
        """Bucket edges, and nats per token in each bucket over all seeds (None in an empty bucket)."""
        runs = [e.by_position for e in self.runs(encoding, "windows", eval_len) if e.by_position]
        if not runs:
            return None
        nats = [sum(column) for column in zip(*(run["nats"] for run in runs), strict=True)]
        tokens = [sum(column) for column in zip(*(run["tokens"] for run in runs), strict=True)]
        means = [total / count if count else None for total, count in zip(nats, tokens, strict=True)]
        return [int(edge) for edge in runs[0]["edges"]], means


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; empty when it is not there."""
    return read_json(path) if path.exists() else {}


def _cell(folder: Path) -> Cell | None:
    lines = read_lines(folder / "evaluation.jsonl")
    summary = _object(folder / "cell.json")
    source = summary or (lines[0] if lines else None)
    if source is None:
        return None
    evaluations = tuple(Evaluation.from_line(line) for line in lines)
    return Cell(source["encoding"], int(source["seed"]), summary, evaluations)


def load(folder: str | Path) -> Study:
    """Read a study's folder; cells that have not been evaluated yet are left out.

    Raises:
        ValueError: when the folder holds no study, or a study without a single evaluated cell.
    """
    folder = Path(folder)
    head = _object(folder / "study.json")
    hint = "write one with `ropewalk study --out FOLDER`"
    require(bool(head), "folder", "a study's (with study.json)", folder, hint=hint)
    require(head.get("format") == 1, "the format of study.json", "1", head.get("format"))
    found = [_cell(path) for path in sorted((folder / "cells").glob("*")) if path.is_dir()]
    cells = tuple(cell for cell in found if cell is not None and cell.evaluations)
    hint = "continue it with `ropewalk study --resume --out FOLDER`"
    require(bool(cells), "cells", "evaluated at least once", f"{len(found)} without evaluations", hint=hint)
    return Study(
        settings=head.get("settings", {}),
        cells=cells,
        versions=head.get("versions", {}),
        machine=head.get("machine", ""),
        command=head.get("command", ""),
        corpus=head.get("corpus", {}),
        cost=_object(folder / "cost.json") or None,
    )
