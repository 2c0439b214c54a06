"""The table of rules: which encoding or stretch when, why, and who says so.  The first rule that applies decides.

A rule that leans on our own study carries the comparison that it leans on, `holds`; a test asks it of the numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ropewalk.advise.measured import lengths, perplexity
from ropewalk.advise.question import Question

STUDY = "our study: docs/study/results.json"


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Args:
        name: of the situation.
        applies: whether it answers a question, once the rules above it do not.
        choice: what to do: an encoding, a method of `ropewalk.hf.extend`, "window" or "as it is".
        why: in a sentence.
        source: a paper with section, or our study.
        holds: whether the shipped numbers of the study still say so.
    """

    name: str
    applies: Callable[[Question], bool]
    choice: str
    why: str
    source: str
    holds: Callable[[dict[str, Any]], bool] | None = None


def _far(found: dict[str, Any]) -> list[int]:
    return [n for n in lengths(found) if n > found["study"]["train_len"]]


def _yarn_is_best(found: dict[str, Any]) -> bool:
    """At each length beyond training, YaRN beats the other stretches on the same tokens, and doing nothing on more."""
    others = ("windows", "linear", "ntk")
    return all(perplexity("rotary", n, "yarn", found) < min(perplexity("rotary", n, p, found) for p in others)
               for n in _far(found))  # fmt: skip


def _window_is_better(found: dict[str, Any]) -> bool:
    """At each length beyond training, a window of the trained length beats the best stretch."""
    return all(perplexity("rotary", n, "limited", found) < perplexity("rotary", n, "yarn", found) for n in _far(found))


def _hybrid_is_best(found: dict[str, Any]) -> bool:
    return all(perplexity("rotary+alibi", n, found=found) < min(perplexity(e, n, found=found)
               for e in ("rotary", "alibi")) for n in lengths(found))  # fmt: skip


def _alibi_stays(found: dict[str, Any]) -> bool:
    first = perplexity("alibi", found["study"]["train_len"], found=found)
    return all(perplexity("alibi", n, found=found) <= first for n in _far(found))


def _more_context_is_of_no_use(found: dict[str, Any]) -> bool:
    """At the longest length none is better with all of its context than behind a window, by 1 % (the same tokens)."""
    last = max(lengths(found))
    pairs = ((perplexity(e, last, "sliding", found), perplexity(e, last, "limited", found))
             for e in ("rotary", "alibi", "rotary+alibi"))  # fmt: skip
    return all(whole > 0.99 * window for whole, window in pairs)


RULES = (
    Rule(
        "weights with ALiBi",
        lambda q: q.weights == "alibi",
        "as it is",
        "Perplexity of ALiBi does not rise beyond the trained length; there is nothing to stretch.",
        STUDY,
        _alibi_stays,
    ),
    Rule(
        "weights, within the length that they are made for",
        lambda q: q.weights is not None and not q.beyond,
        "as it is",
        "Every position asked for is one that the model is made for; a stretch would only move them.",
        "Chen et al. 2023, arXiv:2306.15595v2, Sec. 3",
    ),
    Rule(
        "weights with RoPE, local task, no training",
        lambda q: q.weights == "rotary" and q.task == "local" and q.budget == "none",
        "window",
        "Behind a window of the trained length RoPE beats the best stretch at every length measured: all distances"
        " stay within those trained.",
        STUDY,
        _window_is_better,
    ),
    Rule(
        "weights with RoPE, stretched already",
        lambda q: q.weights == "rotary" and q.method is not None and q.sound_len > q.train_len,
        "further",
        "The same stretch with a larger factor, from the original length: the pairs that it keeps stay as the weights"
        " know them.  So YaRN went on from 16 to 32, with 200 more steps of training.",
        "Peng et al. 2023, arXiv:2309.00071v2, Sec. 4.1",
    ),
    Rule(
        "weights with RoPE, no training",
        lambda q: q.weights == "rotary" and q.budget == "none",
        "yarn",
        "Without fine-tuning YaRN beat linear interpolation, NTK and doing nothing at every length measured.",
        STUDY,
        _yarn_is_best,
    ),
    Rule(
        "weights with RoPE, fine-tuning, stretch up to 32",
        lambda q: q.weights == "rotary" and q.budget == "finetune" and q.stretch <= 32,
        "yarn",
        "YaRN was fine-tuned to stretches of 16 and 32 in a few hundred steps.",
        "Peng et al. 2023, arXiv:2309.00071v2, Sec. 4",
    ),
    Rule(
        "weights with RoPE, fine-tuning, stretch above 32",
        lambda q: q.weights == "rotary" and q.budget == "finetune",
        "ntk",
        "No stretch above 32 was tested for YaRN; a raised base with continued training on long text is the other"
        " published route (there from 4096 to 32768 tokens).",
        "Xiong et al. 2023, arXiv:2309.16039, Sec. 4.1",
    ),
    Rule(
        "new weights, local task",
        lambda q: q.weights is None and q.task == "local",
        "rotary+alibi",
        "The sum of RoPE and ALiBi had the lowest perplexity at every length measured, within and beyond training.",
        STUDY,
        _hybrid_is_best,
    ),
    Rule(
        "new weights, retrieval within the training length",
        lambda q: q.weights is None and not q.beyond,
        "rotary",
        "RoPE has no recency bias.  Its base is large enough that a key like its query is preferred, in expectation,"
        " at every distance asked for.",
        "Men et al. 2024, arXiv:2405.14591v1: the base bounds the context length",
    ),
    Rule(
        "new weights, retrieval beyond the training length",
        lambda q: q.weights is None,
        "rotary",
        "No encoding made use of context beyond its training length: choose RoPE with a base for the whole length, and"
        " train on that length at the end.  That base is the smallest tried for which a key like its query is"
        " preferred, in expectation, at every distance asked for (Men et al. 2024, arXiv:2405.14591v1).",
        STUDY,
        _more_context_is_of_no_use,
    ),
)
"""In order; every question of `question.ask` meets one."""


def rule_for(question: Question) -> Rule:
    """The first rule that applies."""
    return next(rule for rule in RULES if rule.applies(question))
