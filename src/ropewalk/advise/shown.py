"""Advice in plain words, for a terminal."""

import json
import textwrap
from typing import TYPE_CHECKING, Any

from ropewalk.explain.text import plural

if TYPE_CHECKING:
    from ropewalk.advise.run import Advice

WIDTH = 110
_WORDS = {
    "base": "base {}",
    "longest_wavelength": "longest wave {} tokens",
    "eval_len": "text of {} tokens",
    "train_len": "trained on {} tokens",
    "farthest_sight": "farthest sight {} tokens",
    "factor": "stretched {} times",
    "magnitude": "cosines and sines times {}",
    "window": "window of {} tokens",
    "sinks": "{} first tokens kept",
    "slopes": "slopes, score units per token: {}",
}


def advice(given: "Advice") -> str:
    """All of it, in titled blocks."""
    numbers = [_number(name, value) for name, value in given.numbers.items() if value is not None]
    dry = any("--dry-run" in line for line in given.verify)
    verify = "verify (--dry-run says how long it takes; then run it without)" if dry else "verify"
    blocks = (
        ("numbers", _wrapped(numbers)),
        ("cost", _wrapped(given.costs)),
        ("quality", _wrapped(given.quality)),
        ("mind", _wrapped(given.cautions)),
        (verify, given.verify),
        ("Python", given.code.splitlines()),
        *_config(given),
    )
    lines = [f"choose: {given.choice}", *_wrapped([f"because: {given.why}"])]
    lines += _wrapped([f"rule: {given.rule}; source: {given.source}"])
    for name, block in blocks:
        if block:
            lines += ["", f"{name}:", *(f"  {line}" for line in block)]
    return "\n".join(lines)


def _config(given: "Advice") -> list[tuple[str, list[str]]]:
    if given.config is None:
        return [("config", ["no family of transformers has both parts; build it in Python"])]
    if given.unchanged:
        return [("config", ["nothing changes: the model's config stays as it is"])]
    block = json.dumps(given.config, indent=2).splitlines()
    return [("config (save it as new.json, where the commands above read it)", block)]


def _wrapped(lines: list[str]) -> list[str]:
    wrap = {"width": WIDTH, "subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    return [part for line in lines for part in textwrap.wrap(line, **wrap)]


def _number(name: str, value: Any) -> str:
    if name == "stretched_layers":
        return f"{plural(value, 'layer')} stretched"
    shown = ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else _plain(value)
    return _WORDS[name].format(shown)


def _plain(value: float | int) -> str:
    """Whole numbers from 1000 on, in groups of three digits.

    >>> _plain(2e6), _plain(0.5)
    ('2 000 000', '0.5')
    """
    return f"{value:,.0f}".replace(",", " ") if value >= 1000 else f"{value:.6g}"
