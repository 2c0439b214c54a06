"""What is asked, and which questions have no answer."""

from dataclasses import dataclass
from typing import Any

from ropewalk.encodings import ALiBi, Learned, Sinusoidal
from ropewalk.errors import message, require, require_count
from ropewalk.hf import describe
from ropewalk.hf.config_write import parts, turning

TASKS = ("retrieval", "local")
BUDGETS = ("none", "finetune", "pretrain")
MOST = 64
"""The largest stretch of weights that is advised on: twice the largest that YaRN was tested with."""


@dataclass(frozen=True)
class Question:
    """A choice to be made.

    Args:
        train_len, eval_len: tokens seen in training, and tokens to be read.
        num_heads, head_dim: of the model.
        task: "retrieval" needs tokens from anywhere, "local" mostly the recent ones.
        budget: "none", "finetune" (existing weights, some steps), "pretrain" (new weights).
        weights: the encoding of existing weights, "rotary", "alibi", "learned", "sinusoidal" or "none"; None: new ones.
        config: of those weights.
        max_len: tokens that the config allows.
        told: the trained length, where it was given beside a config.
        method: by which the config stretches already; None if it does not.
    """

    train_len: int
    eval_len: int
    num_heads: int
    head_dim: int
    task: str
    budget: str
    weights: str | None = None
    config: Any = None
    max_len: int | None = None
    told: int | None = None
    method: str | None = None

    @property
    def sound_len(self) -> int:
        """Tokens that the model reads as it is: what its config allows, if that is more than the trained length."""
        return max(self.train_len, self.max_len or 0)

    @property
    def stretch(self) -> float:
        """eval_len / train_len, at least 1."""
        return max(self.eval_len / self.train_len, 1.0)

    @property
    def further(self) -> float:
        """eval_len / sound_len, at least 1: the stretch that comes on top of what the config does already."""
        return max(self.eval_len / self.sound_len, 1.0)

    @property
    def beyond(self) -> bool:
        """Whether more is read than the model is made for."""
        return self.eval_len > self.sound_len

    @property
    def beyond_training(self) -> bool:
        """Whether more is read than training has seen, before any stretch."""
        return self.eval_len > self.train_len


def ask(
    *,
    eval_len: int,
    train_len: int | None = None,
    num_heads: int | None = None,
    head_dim: int | None = None,
    task: str = "retrieval",
    budget: str | None = None,
    config: Any = None,
) -> Question:
    """A question that has an answer.

    Raises:
        ValueError, TypeError: it contradicts itself or its config, or nothing can be done; the argument is named.
    """
    require_count(eval_len, "eval_len")
    require(task in TASKS, "task", " or ".join(TASKS), repr(task))
    budget = budget or ("pretrain" if config is None else "none")
    require(budget in BUDGETS, "budget", ", ".join(BUDGETS), repr(budget))
    if config is None:
        hint = "without weights there is nothing to run or to fine-tune; config=... names the weights that exist"
        require(budget == "pretrain", "budget", "pretrain where no weights exist", repr(budget), hint=hint)
        sizes = {"train_len": train_len, "num_heads": num_heads, "head_dim": head_dim}
        counts = {name: _given(name, value) for name, value in sizes.items()}
        hint = "RoPE turns channels in pairs"
        require(counts["head_dim"] % 2 == 0, "head_dim", "even", head_dim, hint=hint)
        trained, num, width = (counts[name] for name in sizes)
        return Question(trained, eval_len, num, width, task, budget)
    hint = "leave the config out to start anew, or choose none or finetune"
    require(budget != "pretrain", "budget", "none or finetune where weights exist", repr(budget), hint=hint)
    return _with_weights(config, eval_len, train_len, {"num_heads": num_heads, "head_dim": head_dim}, task, budget)


def _given(name: str, value: int | None) -> int:
    if value is None:
        raise ValueError(message(name, "given where no config tells it", None))
    return require_count(value, name)


def _with_weights(config: Any, eval_len: int, train_len: int | None, sizes: dict[str, int | None], task: str,
                  budget: str) -> Question:  # fmt: skip
    readings = describe(config, length=eval_len)
    kinds = [_kind(reading.encoding) for reading in readings]
    kind = next((k for k in kinds if k != "none"), "none")
    reading = readings[kinds.index(kind)]
    counts: dict[str, Any] = {}
    for name, value in {**sizes, "train_len": train_len}.items():
        said = getattr(reading, name)
        require(value is None or said is None or value == said, name, f"what the config says ({said})", value)
        counts[name] = _given(name, said if said is not None else value)
    trained = counts["train_len"]
    absolute = {"learned": "a learned table has no rows beyond its end",
                "sinusoidal": "the model has seen no sums with later sinusoids"}  # fmt: skip
    if kind in absolute:
        hint = f"{absolute[kind]}; windows of {trained} tokens, or new weights"
        require(eval_len <= trained, "eval_len", f"at most the trained length ({trained})", eval_len, hint=hint)
    if kind == "none":
        hint = "nothing in these weights can be stretched"
        require(eval_len <= trained, "eval_len", f"at most the trained length ({trained})", eval_len, hint=hint)
    question = Question(eval_len=eval_len, task=task, budget=budget, weights=kind, config=config,
                        max_len=reading.max_len, told=train_len, method=_method(reading), **counts)  # fmt: skip
    if kind == "rotary" and (task, budget) != ("local", "none"):
        hint = "no stretch so large was measured, here or in the papers; train further on longer text in steps"
        most = MOST * question.sound_len
        require(eval_len <= most, "eval_len", f"at most {MOST} times what the weights are made for ({most})", eval_len,
                hint=hint)  # fmt: skip
    return question


def _method(reading: Any) -> str | None:
    """The stretch that a config has already, as `ropewalk.hf.extend` calls it."""
    turn = turning(reading.encoding)
    recipe = turn.spectrum.recipe if turn is not None else None
    return recipe[0] if recipe is not None and recipe[0] in ("linear", "ntk", "yarn", "llama3") else None


def _kind(encoding: Any) -> str:
    names = ((ALiBi, "alibi"), (Learned, "learned"), (Sinusoidal, "sinusoidal"))
    if turning(encoding) is not None:
        return "rotary"
    return next((name for part in parts(encoding) for kind, name in names if isinstance(part, kind)), "none")
