"""What a model's config says about positions, layer by layer, in words and numbers."""

import math
from typing import Any

import torch

from ropewalk import spectra
from ropewalk.encodings import ALiBi, Encoding, Learned, NoPE, Sinusoidal, Temperature
from ropewalk.errors import require
from ropewalk.explain.biases import SHARE, reach
from ropewalk.explain.text import Explanation, Section, section, spans, tokens
from ropewalk.hf import describe
from ropewalk.hf.config import Reading
from ropewalk.hf.config_layers import NO_ATTENTION
from ropewalk.hf.config_source import load
from ropewalk.hf.config_write import parts, turning
from ropewalk.hf.extend_config import _ALL_SLIDE, _LOCAL, METHODS, _window, stretch, text_part
from ropewalk.spectra import Spectrum

TOLERANCE = 1e-3
"""The phase error, radians, from which a float32 angle counts as wrong."""
SEARCHED = 1 << 22
_STRETCHES = ("linear", "ntk", "dynamic_ntk", "yarn", "llama3", "longrope")
BLOCK = 1 << 12


def config(model: Any, *, length: int | None = None, model_type: str | None = None) -> Explanation:
    """Which encoding each layer of a model has, and what follows from its numbers.

    Args:
        model: a folder, a config.json, a dict or a PretrainedConfig; no weights are read.
        length: tokens of the whole sequence, for frequencies that depend on it.
        model_type: whose conventions hold, instead of those that the config names.

    Raises:
        ValueError, TypeError: the config cannot be read without guessing; the key is named.

    >>> trained = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096}
    >>> config(trained).numbers["groups"][0]["incomplete_pairs"]
    [6, 7]
    """
    readings = describe(model, length=length, model_type=model_type)
    window = _windows(model, readings)
    groups: dict[tuple, list[Reading]] = {}
    for reading in readings:
        groups.setdefault((id(reading.encoding), reading.layer_type, window.get(reading.layer)), []).append(reading)
    made = [_group(members, window.get(members[0].layer)) for members in groups.values()]
    first = readings[0]
    refused = _stretches(model, first) if model_type is None else {}
    numbers = {"model_type": first.model_type, "num_layers": len(readings), "head_dim": first.head_dim,
               "num_heads": first.num_heads, "num_kv_heads": first.num_kv_heads, "train_len": first.train_len,
               "max_len": first.max_len, "groups": [n for _, n in made], "stretches": refused}  # fmt: skip
    steps = [_sizes(numbers), *(step for step, _ in made)]
    steps += [_stretch_section(refused, _twice(first))] if refused else []
    family = first.model_type or "a model without model_type"
    return Explanation(
        f"Positions in {family}, {len(readings)} layer{'s' * (len(readings) > 1)}", tuple(steps), numbers
    )


def _windows(model: Any, readings: tuple[Reading, ...]) -> dict[int, int]:
    """What a layer sees, tokens, for those behind a window that the config names."""
    _, window = _window(text_part(load(model)))
    if window is None:
        return {}
    return {r.layer: window for r in readings if r.layer_type in _LOCAL
            or (r.layer_type is None and r.model_type in _ALL_SLIDE)}  # fmt: skip


def _sizes(n: dict) -> Section:
    lines = [f"head_dim {n['head_dim']}, query heads {_said(n['num_heads'])}, key heads {_said(n['num_kv_heads'])}"]
    lines.append(f"trained length {_said(n['train_len'])}, allowed length {_said(n['max_len'])}")
    if n["train_len"] and n["max_len"] and n["max_len"] > n["train_len"]:
        lines.append(f"the config allows {n['max_len'] / n['train_len']:g} times the trained length")
    return section("Sizes", lines)


def _said(value: int | None) -> str:
    return "not said" if value is None else str(value)


def _group(members: list[Reading], window: int | None) -> tuple[Section, dict]:
    """Layers with one encoding."""
    reading, layers = members[0], [m.layer for m in members]
    numbers: dict[str, Any] = {"layers": layers, "layer_type": reading.layer_type, "rope_type": reading.rope_type,
                               "encoding": [type(part).__name__ for part in parts(reading.encoding)]}  # fmt: skip
    numbers["window"] = window
    lines = [] if window is None else [f"Sees {window} tokens: nothing farther back takes part, however long the text."]
    for part in parts(reading.encoding):
        words, more = _part(part, reading, window)
        lines += words
        numbers |= more
    kind = f" ({reading.layer_type})" if reading.layer_type else ""
    title = f"Layer{'s' * (len(layers) > 1)} {spans(layers)}{kind}: {' + '.join(numbers['encoding'])}"
    return section(title, lines), numbers


def _part(part: Encoding, reading: Reading, window: int | None) -> tuple[list[str], dict]:
    if turning(part) is not None:
        return _rotation(part, reading, window)
    if isinstance(part, ALiBi):
        return _slopes(part)
    if isinstance(part, Learned):
        words = [f"A table of {part.max_positions} learned vectors, added to embeddings.",
                 f"Position {part.max_positions} and beyond are refused: the table has no rows for them."]  # fmt: skip
        if reading.offset:
            words.append(f"The first {reading.offset} rows of the checkpoint's table come before position 0.")
        return words, {"num_positions": part.max_positions, "offset": reading.offset}
    if isinstance(part, Sinusoidal):
        words = [f"Sinusoids of {part.model_dim} channels, base {part.base:g}, added to embeddings; nothing turns."]
        return words, {"model_dim": part.model_dim, "base": part.base}
    if isinstance(part, Temperature):
        return [f"Queries are sharpened: {part.extra_repr()}."], {"temperature": part.extra_repr()}
    if isinstance(part, NoPE):
        idle = reading.layer_type in NO_ATTENTION
        words = (
            "No attention here." if idle else "Nothing turns and nothing is added: order comes from the causal mask."
        )
        return [words], {}
    return [f"{part}"], {}


def _slopes(part: ALiBi) -> tuple[list[str], dict]:
    steep, flat = max(part.slopes), min(part.slopes)
    far = reach(flat, SHARE)
    words = [
        f"Slopes from {steep:.6g} to {flat:.6g} for {part.num_heads} heads, score units per token; nothing turns.",
        f"A key as similar as the query's own weighs less than {SHARE:g} of it from {reach(steep, SHARE)} tokens in",
        f"the steepest head, from {'no distance' if far is None else far} in the flattest.  Any length runs as it is.",
    ]
    return words, {"slopes": list(part.slopes), "sees": [reach(m, SHARE) for m in part.slopes], "share": SHARE}


def _rotation(part: Encoding, reading: Reading, window: int | None) -> tuple[list[str], dict]:
    turn = turning(part)
    assert turn is not None
    spectrum = turn.spectrum
    name, recipe = spectrum.recipe or ("numbers given by hand", ())
    rule = dict(recipe)
    waves = spectrum.wavelengths
    train_len = reading.train_len
    finite = [w for w in waves if math.isfinite(w)]
    numbers: dict[str, Any] = {
        "rule": name,
        "base": _float(rule.get("base")),
        "stretch": _float(rule.get("stretch")),
        "magnitude": spectrum.magnitude,
        "layout": turn.layout,
        "rotary_dim": turn.rotary_dim,
        "pairs": len(waves),
        "wavelengths": [None if math.isinf(w) else w for w in waves],
        **_covered(spectrum, train_len, reading.max_len),
        "float32_right_up_to": float32_right_up_to(spectrum),
        "depends_on_length": spectrum.depends_on_length,
    }
    return _rotation_words(numbers, turn.head_dim, finite, reading, window), numbers


def _covered(spectrum: Spectrum, train_len: int | None, max_len: int | None) -> dict[str, list[int]]:
    """Pairs that completed no turn within the trained length before any stretch, and those of them that now reach, at
    the allowed length, an angle beyond the one that they had reached by then."""
    if train_len is None:
        return {"incomplete_pairs": [], "unseen_pairs": []}
    name, recipe = spectrum.recipe or ("", ())
    rule = dict(recipe)
    plain = spectra.plain(2 * len(spectrum.exact), rule["base"]) if name in _STRETCHES else spectrum
    slow = [i for i, w in enumerate(plain.inv_freq) if w * train_len < 2 * math.pi]
    reached = [w * max(max_len or 0, train_len) for w in spectrum.inv_freq]
    unseen = [i for i in slow if reached[i] > plain.inv_freq[i] * train_len * (1 + 1e-9)]
    return {"incomplete_pairs": slow, "unseen_pairs": unseen}


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _rotation_words(n: dict, head_dim: int, finite: list[float], reading: Reading, window: int | None) -> list[str]:
    paired = "2i with 2i + 1" if n["layout"] == "interleaved" else "i with i + half"
    words = [f"{n['rotary_dim']} of {head_dim} channels turn in {n['pairs']} pairs, {paired} ({n['layout']})."]
    base = f", base {n['base']:g}" if n["base"] is not None else ""
    stretched = f", stretched {n['stretch']:g} times" if n["stretch"] not in (None, 1.0) else ", not stretched"
    words.append(f"Frequencies: {n['rule']}{base}{stretched}.")
    if n["depends_on_length"]:
        words.append("They depend on the length of the sequence; --length chooses one.")
    if n["magnitude"] != 1.0:
        words.append(f"Magnitude {n['magnitude']:.6g}: scores gain its square, {n['magnitude'] ** 2:.6g}.")
    if finite:
        words.append(f"Wavelengths from {tokens(min(finite))} to {tokens(max(finite))} tokens per turn.")
    still = n["pairs"] - len(finite)
    if still:
        words.append(f"{still} pairs never turn.")
    if window is None:
        words += _cover_words(n, reading.train_len, reading.max_len)
    right = n["float32_right_up_to"]
    limit = f"up to position {right}" if right is not None else f"beyond position {SEARCHED}"
    words.append(f"Angles as position x inv_freq in float32 would be right {limit} (phase error of every pair at most")
    words.append(f"{TOLERANCE:g} rad, inv_freq correctly rounded); Ropewalk's angles are exact at any position.")
    return words


def _cover_words(n: dict, train_len: int | None, max_len: int | None) -> list[str]:
    """Which angles training has shown."""
    slow, unseen = n["incomplete_pairs"], n["unseen_pairs"]
    if train_len is None:
        return ["Which wavelengths a training length covers cannot be told: the config names none."]
    if not slow:
        return [f"Every pair completes a turn within {train_len} tokens, so every angle occurs there."]
    some = f"{len(slow)} of {n['pairs']} pairs, {spans(slow)}, complete no turn within {train_len} tokens"
    if max_len is None or max_len <= train_len:
        return [f"{some}: beyond,", "they reach angles that training has not shown."]
    if not unseen:
        stay = f"As they are now, they reach within {max_len} tokens no angle that {train_len} did not show."
        return [f"{some} at their plain frequencies.", stay]
    return [f"{some} at their plain frequencies.",
            f"{len(unseen)} of them, {spans(unseen)}, reach within {max_len} tokens angles"
            f" that {train_len} did not show."]  # fmt: skip


def float32_right_up_to(spectrum: Spectrum, tolerance: float = TOLERANCE) -> int | None:
    """The last position before the first at which a float32 product position x inv_freq is off by more than
    `tolerance` radians in some pair, found by trying each; None if there is none up to `SEARCHED`.

    >>> from ropewalk import spectra
    >>> float32_right_up_to(spectra.plain(2)) is None    # one radian a token: float32 holds whole numbers exactly
    True
    """
    require(tolerance > 0, "tolerance", "positive", tolerance)
    exact = torch.tensor(spectrum.inv_freq, dtype=torch.float64)
    # Rounding inv_freq and the product costs at most 2^-24 each: pairs too slow to fail need no look.
    exact = exact[exact * SEARCHED * 2.0**-23 * 1.01 > tolerance]
    if not len(exact):
        return None
    rounded = exact.float()
    start = int(tolerance / (float(exact.max()) * 2.0**-23 * 1.01))
    for first in range(start, SEARCHED, BLOCK):
        positions = torch.arange(first, min(first + BLOCK, SEARCHED + 1))
        error = ((positions.float()[:, None] * rounded).double() - positions.double()[:, None] * exact).abs()
        wrong = (error > tolerance).any(-1)
        if bool(wrong.any()):
            return first + int(wrong.double().argmax()) - 1
    return None


def _twice(reading: Reading) -> int:
    return 2 * (reading.max_len or reading.train_len or 2048)


def _stretches(model: Any, reading: Reading) -> dict[str, str]:
    """For each method, "" if the config can hold it at twice the allowed length, else why not."""
    found = {}
    for method in METHODS:
        if method == "longrope":  # needs factors that only a search gives
            continue
        try:
            stretch(model, to=_twice(reading), method=method)
        except (ValueError, TypeError) as error:
            found[method] = str(error).splitlines()[0]
        else:
            found[method] = ""
    return found


def _stretch_section(found: dict[str, str], to: int) -> Section:
    held = [method for method, why in found.items() if not why]
    lines = [f"this config can hold: {', '.join(held)}"] if held else []
    reasons: dict[str, list[str]] = {}
    for method, why in found.items():
        if why:
            reasons.setdefault(why, []).append(method)
    lines += [f"refused, {', '.join(methods)}: {why}" for why, methods in reasons.items()]
    return section(f"Methods of `ropewalk extend` for {to} tokens, twice the allowed length", lines)
