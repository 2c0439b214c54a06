"""A question answered: the rule's choice with its numbers, its measured cost, what to verify and what to paste."""

import pathlib
import shlex
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ropewalk.advise import measured, shown
from ropewalk.advise.question import Question, ask
from ropewalk.advise.rules import rule_for
from ropewalk.encodings import ALiBi, Rotary
from ropewalk.errors import require
from ropewalk.explain.biases import SHARE, reach
from ropewalk.hf import from_config, to_config
from ropewalk.hf.config import describe
from ropewalk.hf.config_write import turning
from ropewalk.hf.extend_config import stretch

BASES = tuple(digit * 10**power for power in range(4, 13) for digit in (1, 2, 5))
"""The bases that are tried, smallest first."""
LONGEST = 1 << 21
"""The longest reading for which a base is looked for, tokens."""


@dataclass(frozen=True)
class Advice:
    """What to do, and why.

    Args:
        choice, rule, why, source: of the rule that decided.
        numbers: base, factor, slopes and the like.
        costs, quality: measured, in sentences, each with where it was measured.
        cautions: what the choice does not give.
        verify: commands.
        code: Python.
        config: keys to paste, which `hf.from_config` reads; None where no config can hold the choice.
        unchanged: whether these are the keys that the model has already.
    """

    choice: str
    rule: str
    why: str
    source: str
    numbers: dict[str, Any]
    costs: list[str]
    quality: list[str]
    verify: list[str]
    code: str
    config: dict[str, Any] | None
    unchanged: bool = False
    cautions: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """JSON-like."""
        return asdict(self)

    def __str__(self) -> str:
        return shown.advice(self)


def advise(
    *,
    eval_len: int,
    train_len: int | None = None,
    num_heads: int | None = None,
    head_dim: int | None = None,
    task: str = "retrieval",
    budget: str | None = None,
    config: Any = None,
) -> Advice:
    """The answer to a question; arguments and errors as in `question.ask`.

    >>> answer = advise(train_len=4096, eval_len=4096, num_heads=32, head_dim=128)
    >>> answer.choice, answer.numbers["base"]
    ('rotary', 50000.0)
    """
    question = ask(eval_len=eval_len, train_len=train_len, num_heads=num_heads, head_dim=head_dim, task=task,
                   budget=budget, config=config)  # fmt: skip
    rule = rule_for(question)
    answer = _ANSWERS[rule.choice](question)
    cautions = answer.pop("cautions", []) + _beyond_measured(question)
    choice = answer.pop("choice", rule.choice)
    return Advice(choice, rule.name, _why(rule.why, question), rule.source, cautions=cautions, **answer)


def _most_measured() -> float:
    return max(measured.lengths()) / measured.shipped()["study"]["train_len"]


def _why(why: str, q: Question) -> str:
    """The rule's reason, which claims no more than was measured."""
    most = f"{_most_measured():g} times the trained length"
    limit = f"at every length measured, up to {most}; nothing measured beyond {_most_measured():g} times"
    return why.replace("at every length measured", limit) if q.stretch > _most_measured() else why


def base_for(head_dim: int, length: int) -> int:
    """The smallest of `BASES` for which sum_i cos(d inv_freq[i]) >= 0 at every distance d < length: the expected
    lead of a key like its query over a random one (Men et al. 2024, arXiv:2405.14591v1).

    >>> base_for(128, 16384)
    500000
    """
    require(length <= LONGEST, "eval_len", f"at most {LONGEST}, for which bases are looked for", length)
    for base in BASES:
        if _lead_is_kept(Rotary(head_dim, base=base), length):
            return base
    hint = "more channels, whose frequencies lie closer"
    require(False, "head_dim", f"one that {length} tokens leave an expected lead", head_dim, hint=hint)
    raise AssertionError


def _lead_is_kept(rope: Rotary, length: int, run: int = 1 << 15) -> bool:
    for first in range(0, length, run):
        at = rope.at(torch.arange(first, min(first + run, length)), torch.float64)
        assert at.cos is not None
        if float(at.cos.sum(-1).min()) < 0:
            return False
    return True


# --- what each choice means


def _rotary(q: Question) -> dict[str, Any]:
    base = float(base_for(q.head_dim, q.eval_len))
    rope = Rotary(q.head_dim, base=base)
    cautions = []
    if q.beyond:
        cautions.append(f"Training on {q.train_len} tokens alone does not make {q.eval_len} usable:"
                        f" end training on windows of {q.eval_len} tokens.")  # fmt: skip
    block = {"model_type": "llama", "hidden_size": q.num_heads * q.head_dim, "num_attention_heads": q.num_heads,
             "max_position_embeddings": q.eval_len}  # fmt: skip
    return {
        "numbers": {"base": base, "longest_wavelength": rope.spectrum.wavelengths[-1], "eval_len": q.eval_len},
        "costs": _cost("rotary", q.eval_len),
        "quality": _lengths_of("rotary"),
        "cautions": cautions,
        "verify": [
            _study("rotary", q),
            f"ropewalk plot wavelengths --head-dim {q.head_dim} --base {base:.0f}"
            f" --train-length {q.train_len} --eval-length {q.eval_len} --out wavelengths.svg",
        ],
        "code": f"rw.Rotary({q.head_dim}, base={base:.0f})",
        "config": _read_back({**block, **to_config(rope)}),
    }


def _hybrid(q: Question) -> dict[str, Any]:
    alibi = ALiBi(q.num_heads)
    alone = (measured.perplexity("alibi", n) / measured.perplexity("rotary+alibi", n) - 1 for n in measured.lengths())
    return {
        "numbers": {"base": 10_000.0, "slopes": list(alibi.slopes), "farthest_sight": reach(min(alibi.slopes), SHARE)},
        "costs": _cost("rotary+alibi", q.eval_len) + _cost("alibi", q.eval_len),
        "quality": _lengths_of("rotary+alibi") + _lengths_of("alibi"),
        "cautions": [
            f"ALiBi alone had at least {100 * min(alone):.1f} % more perplexity, and a config can hold it (BLOOM's).",
            f"Beyond the farthest sight a key like its query weighs less than {SHARE:g} of the query's own.",
        ],
        "verify": [_study("rotary,alibi,rotary+alibi", q), f"ropewalk explain alibi --heads {q.num_heads}"],
        "code": f"rw.Hybrid(rw.Rotary({q.head_dim}), rw.ALiBi({q.num_heads}))",
        "config": None,
    }


def _as_it_is(q: Question) -> dict[str, Any]:
    encoding = "alibi" if q.weights == "alibi" else "rotary"
    numbers: dict[str, Any] = {"factor": 1.0}
    cautions = []
    if q.beyond_training and not q.beyond:
        cautions.append(f"Trained on {q.train_len} tokens before its stretch; that it was trained further is not told.")
    if q.weights == "alibi":
        slopes = next(p for p in from_config(q.config).modules() if isinstance(p, ALiBi)).slopes
        numbers |= {"slopes": list(slopes), "farthest_sight": reach(min(slopes), SHARE)}
        if q.task == "retrieval":
            cautions.append(f"Beyond {numbers['farthest_sight']} tokens a key like its query weighs less than {SHARE:g}"
                            " of the query's own in every head: what lies there is hardly found.")  # fmt: skip
    return {
        "numbers": numbers,
        "costs": _cost(encoding, q.eval_len) if q.weights in ("alibi", "rotary") else [],
        "quality": _lengths_of("alibi") if q.weights == "alibi" else [],
        "cautions": cautions,
        "verify": [f"ropewalk explain --config {_path(q)}"],
        "code": f"rw.hf.{'layers' if _differ(q.config) else 'from_config'}({_plain_path(q)!r})",
        "config": dict(_keys(q)),
        "unchanged": True,
    }


def _stretched(method: str):
    def answer(q: Question) -> dict[str, Any]:
        made = stretch(q.config, to=q.eval_len, method=method, train_len=q.told)
        turns = turning(made.readings[made.stretched[0]].encoding)
        assert turns is not None  # or nothing had been stretched
        spectrum = turns.spectrum
        numbers = {"factor": made.factor, "train_len": made.train_len, "magnitude": spectrum.magnitude,
                   "base": float(dict(spectrum.recipe[1])["base"]) if spectrum.recipe else None,
                   "stretched_layers": len(made.stretched)}  # fmt: skip
        cautions = [f"These keys must go: {', '.join(made.dropped)}."] if made.dropped else []
        if q.sound_len > q.train_len:
            cautions.append(f"The config is stretched to {q.sound_len} already, of which this is {q.further:.3g} times;"
                            f" the factor counts from {q.train_len}.  How much a second stretch costs is not measured"
                            " here: only your own measurement can judge it.")  # fmt: skip
        if q.budget == "none" and q.task == "retrieval":
            cautions.append("Nothing trained means nothing promised at far positions: measure retrieval itself.")
        return {
            "numbers": numbers,
            "costs": [*_cost("rotary", q.eval_len), "a stretch changes numbers, not the work done"],
            "quality": _stretch_quality(method, q),
            "cautions": cautions,
            "choice": method,
            "verify": _verify_stretch(method, q),
            "code": f"rw.hf.extend(model, to={q.eval_len}, method={method!r})" + (
                    "\nrw.hf.layers('new.json')    # one encoding for each layer" if _differ(made.config) else ""),
            "config": _read_back({**_without(_keys(q), made.dropped), **made.block}, q.eval_len),
        }  # fmt: skip

    return answer


def _further(q: Question) -> dict[str, Any]:
    assert q.method is not None  # the rule asks for it
    return _stretched(q.method)(q)


def _verify_stretch(method: str, q: Question) -> list[str]:
    told = "" if q.told is None else f" --train-length {q.told}"
    return [f"ropewalk extend {_folder(q)} --to {q.eval_len} --methods {method}{told} --dry-run",
            "ropewalk plot wavelengths --config new.json --out wavelengths.svg"]  # fmt: skip


def _window(q: Question) -> dict[str, Any]:
    n = max(measured.lengths())
    window, stretched = (measured.perplexity("rotary", n, p) for p in ("limited", "yarn"))
    return {
        "numbers": {"window": q.sound_len, "sinks": 0},
        "costs": [f"attention reads {q.sound_len} of up to {q.eval_len} keys, and the cache holds no more"],
        "quality": [f"RoPE at {n} tokens behind a window of the trained length: perplexity {window:.2f} per byte,"
                    f" with YaRN {stretched:.2f}, on the same text ({_where()})"],
        "cautions": [f"One layer sees nothing farther than {q.sound_len} tokens back; retrieval is another task."],
        "verify": [f"ropewalk explain --config {_path(q)}", "ropewalk study --encodings rotary --dry-run"],
        "code": f"cache = rw.KVCache(encoding)\ncache.evict(sinks=0, window={q.sound_len})    # after each append",
        "config": dict(_keys(q)),
        "unchanged": True,
    }  # fmt: skip


_ANSWERS = {"rotary": _rotary, "rotary+alibi": _hybrid, "as it is": _as_it_is, "window": _window,
            "further": _further, "yarn": _stretched("yarn"), "ntk": _stretched("ntk")}  # fmt: skip


# --- measured sentences


def _cost(encoding: str, seq_len: int) -> list[str]:
    row = measured.time(encoding, seq_len)
    near = "" if row["seq_len"] == seq_len else f", the nearest length measured to {seq_len}"
    return [f"{encoding}: attention takes {row['forward']:.2f} of its time without encoding forward,"
            f" {row['training']:.2f} in training ({row['seq_len']} tokens{near};"
            f" {row['num_heads']} heads of {row['head_dim']}, {row['dtype']}, CPU; {row['source']})"]  # fmt: skip


def _where() -> str:
    study = measured.shipped()["study"]
    return f"{study['source']}, trained on {study['train_len']} tokens, {len(study['seeds'])} seeds"


def _lengths_of(encoding: str) -> list[str]:
    values = ", ".join(f"{measured.perplexity(encoding, n):.2f} at {n}" for n in measured.lengths())
    return [f"{encoding}: perplexity per byte {values} ({_where()})"]


def _stretch_quality(method: str, q: Question) -> list[str]:
    study = measured.shipped()["study"]
    lengths = [n for n in measured.lengths() if n > study["train_len"]]
    near = min(lengths, key=lambda n: abs(n / study["train_len"] - q.stretch))
    got = {p: measured.perplexity("rotary", near, p) for p in ("linear", "ntk", "yarn", "limited")}
    words = ", ".join(f"{'a window' if p == 'limited' else p} {v:.2f}" for p, v in got.items())
    return [f"untrained stretch of {near / study['train_len']:g}: perplexity per byte {words} ({_where()})"]


def _beyond_measured(q: Question) -> list[str]:
    most = _most_measured()
    small = "Our study trained small models of bytes; larger ones are to be measured before they are trusted."
    if q.stretch > most:
        return [f"A stretch of {q.stretch:g} is beyond the {most:g} that our study measured.", small]
    return [small] if q.beyond else []


# --- configs and commands


def _keys(q: Question) -> dict[str, Any]:
    from ropewalk.hf.config_source import load

    return dict(load(q.config))


def _without(keys: dict[str, Any], dropped: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in dropped}


def _read_back(block: dict[str, Any], length: int | None = None) -> dict[str, Any]:
    describe(block, length=length)
    return block


def _differ(config: Any) -> bool:
    """Whether layers have more than one encoding, which `hf.from_config` does not choose from."""
    return len({id(reading.encoding) for reading in describe(config)}) > 1


def _plain_path(q: Question) -> str:
    return str(q.config) if isinstance(q.config, str | pathlib.Path) else "path/to/config.json"


def _path(q: Question) -> str:
    return shlex.quote(_plain_path(q))


def _folder(q: Question) -> str:
    """The model's folder, if the config lies in one beside weights."""
    given = pathlib.Path(_plain_path(q))
    folder = given if given.is_dir() else given.parent
    weights = given.is_dir() or any(folder.glob("*.safetensors"))
    return shlex.quote(str(folder)) if weights else "path/to/model"


def _study(encodings: str, q: Question) -> str:
    """At the same stretch, from the study's own training length where the asked one would take hours."""
    trained = min(q.train_len, measured.shipped()["study"]["train_len"])
    last = round(trained * min(q.eval_len / q.train_len, _most_measured()))
    lengths = f"{trained},{last}" if q.beyond else str(trained)
    return f"ropewalk study --encodings {encodings} --train-length {trained} --eval-lengths {lengths} --dry-run"
