"""How far and how fast pairs of channels turn: angles, wavelengths, and what each way to stretch does to them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import localcontext
from typing import Any

from ropewalk import phases
from ropewalk import spectra as rules
from ropewalk.encodings import Encoding
from ropewalk.errors import message, require, require_count, shown
from ropewalk.plots import sources, style
from ropewalk.plots.style import Axes
from ropewalk.spectra import Spectrum

POSITIONS = (0, 10, 100, 200, 500)
PAIRS = "pair of channels (0 turns fastest)"


def angle_numbers(
    positions: Sequence[int] = POSITIONS, *, spectrum: Spectrum | Encoding | None = None, wrapped: bool = False
) -> dict[str, Any]:
    """The numbers of `angles`: radians by position and pair."""
    places = _places(positions)
    found = rules.plain(64) if spectrum is None else sources.of_encoding(spectrum)
    with localcontext(phases.DIGITS):
        exact = [[p * w for w in found.exact] for p in places]
        if wrapped:
            turn = 2 * phases.PI
            exact = [[((a + phases.PI) % turn + turn) % turn - phases.PI for a in row] for row in exact]
    rows = [[float(a) for a in row] for row in exact]
    return {"unit": "radians", "wrapped": wrapped, "positions": places, "inv_freq": list(found.inv_freq),
            "angles": rows}  # fmt: skip


def _places(positions: Any) -> list[int]:
    """Positions as integers, or an error that names what else was given."""
    if isinstance(positions, Encoding | Spectrum | str) or not isinstance(positions, Iterable):
        hint = "an encoding that turns channels is given as spectrum=, after the positions"
        given = isinstance(positions, Encoding | Spectrum)
        got = type(positions).__name__ if given else shown(positions)
        raise TypeError(message("positions", "integers in a list or tuple", got, hint if given else ""))
    places = [require_count(p, "positions", at_least=-(2**63)) for p in positions]
    require(len(places) > 0, "positions", "at least one", "none")
    require(max(places) < 2**63, "positions", "below 2^63, so that 64 bits hold them", max(places))
    return places


def draw_angles(numbers: dict[str, Any], axes: Axes) -> None:
    """Draw `angle_numbers`."""
    for index, (place, row) in enumerate(zip(numbers["positions"], numbers["angles"], strict=True)):
        look: dict[str, Any] = style.line(index)
        if numbers["wrapped"]:
            look |= {"marker": ".", "linewidth": 1.0}
        axes.plot(range(len(row)), row, label=f"position {style.tokens(place)}", **look)
    axes.set_xlabel(PAIRS)
    if numbers["wrapped"]:
        axes.set_ylabel("angle modulo one turn, radians")
        turns = (-math.pi, -math.pi / 2, 0, math.pi / 2, math.pi)
        axes.set_yticks(turns, labels=[f"{style.MINUS}π", f"{style.MINUS}π/2", "0", "π/2", "π"])
    else:
        axes.set_ylabel("angle, radians")
        values = [a for row in numbers["angles"] for a in row]
        _symmetric_log(axes, values)
        style.mark(axes.axhline(2 * math.pi, linestyle=":", label="one turn"))
        if min(values) < 0:
            style.mark(axes.axhline(-2 * math.pi, linestyle=":"))
    style.legend(axes, columns=3, inside="upper right")


def _symmetric_log(axes: Axes, values: list[float]) -> None:
    """Logarithmic to both sides, but for the decade next to 0, so that position 0 can be shown."""
    sizes = [abs(v) for v in values if v]
    if not sizes:
        return
    least = max(math.floor(math.log10(min(sizes))), -6)
    most = math.ceil(math.log10(max(sizes)))
    both = min(values) < 0 < max(values)
    axes.set_yscale("symlog", linthresh=10.0**least, linscale=1.2 if both else 0.6)
    powers = [10.0**k for k in range(least, most + 1, -(-(most - least + 1) // (4 if both else 7)))]
    below, above = (powers if min(values) < 0 else []), (powers if max(values) > 0 else [])
    ticks = [*(-p for p in reversed(below)), 0.0, *above]
    axes.set_yticks(ticks, labels=[_power(tick) for tick in ticks])
    margin = 0.2 * 10.0**least
    top = None if style.ours(axes) else 10.0 ** (most + 0.35 * (most - least + 1))  # room for the legend
    axes.set_ylim(-(10.0**most) if below else -margin, top if above else margin)
    axes.minorticks_off()


def _power(tick: float) -> str:
    """A tick, as 1e7 where zeros would be many."""
    sign = style.MINUS if tick < 0 else ""
    return style.plain(tick) if abs(tick) < 1e5 else f"{sign}1e{round(math.log10(abs(tick)))}"


def angles(
    positions: Sequence[int] = POSITIONS,
    *,
    spectrum: Spectrum | Encoding | None = None,
    wrapped: bool = False,
    axes: Axes | None = None,
) -> Axes:
    """The angle by which each pair of channels turns at chosen positions: position * inv_freq[pair]
    (RoPE, Su et al. 2021, arXiv:2104.09864v5, Sec. 3.2.2).

    Args:
        positions: tokens, integers of 64 bits; a negative one turns the other way.
        spectrum: radians per token, or an encoding that holds them; base 10 000 with 64 channels by default.
        wrapped: angles modulo one turn, in [-pi, pi), which is all that a cosine or sine knows of them.
        axes: where to draw; a figure of its own by default.

    Returns:
        The axes, angles in radians upward (logarithmic unless wrapped), a line for each position.
    """
    numbers = angle_numbers(positions, spectrum=spectrum, wrapped=wrapped)
    with style.drawing(axes) as own:
        draw_angles(numbers, own)
    return own


def wavelength_numbers(
    spectra: Spectrum | Encoding | Mapping[str, Any], *, train_len: int | None = None, eval_len: int | None = None
) -> dict[str, Any]:
    """The numbers of `wavelengths`: tokens per turn by pair (None: never), and how many pairs complete a turn."""
    lengths = {"train_len": train_len, "eval_len": eval_len}
    for name, value in lengths.items():
        if value is not None:
            require_count(value, name)
    found = []
    for label, spectrum in sources.by_label(spectra).items():
        long = spectrum.wavelengths
        complete = {name: sum(w <= n for w in long) for name, n in lengths.items() if n is not None}
        found.append({
            "label": label, "wavelengths": [w if math.isfinite(w) else None for w in long],
            "pairs": len(long), "complete_a_turn": complete, "magnitude": spectrum.magnitude,
        })  # fmt: skip
    return {"unit": "tokens per turn", **lengths, "spectra": found}


def draw_wavelengths(numbers: dict[str, Any], axes: Axes) -> None:
    """Draw `wavelength_numbers`."""
    dotted = len(numbers["spectra"]) == 1 and len(numbers["spectra"][0]["wavelengths"]) <= 64  # dots would hide dashes
    for index, found in enumerate(numbers["spectra"]):
        rows = [math.nan if w is None else w for w in found["wavelengths"]]
        still = sum(w is None for w in found["wavelengths"])
        said = [found["label"], f"{still} of {found['pairs']} pairs never turn" if still else ""]
        axes.plot(
            range(len(rows)),
            rows,
            label=": ".join(filter(None, said)) or None,
            marker="." if dotted else None,
            **style.line(index),
        )
    alone = numbers["spectra"][0] if len(numbers["spectra"]) == 1 else None
    for name, said, dashes in (("train_len", "trained on", "--"), ("eval_len", "to be read:", ":")):
        if numbers[name] is None or (name == "eval_len" and numbers[name] == numbers["train_len"]):
            continue
        text = f"{said} {style.tokens(numbers[name])} tokens"
        if alone is not None:
            text += f", {alone['complete_a_turn'][name]} of {alone['pairs']} pairs complete a turn"
        style.mark(axes.axhline(numbers[name], linestyle=dashes, label=text))
    axes.set_yscale("log")
    axes.set_xlabel(PAIRS)
    axes.set_ylabel("wavelength, tokens per turn")
    style.legend(axes, columns=1 if alone is not None else 3)


def wavelengths(
    spectra: Spectrum | Encoding | Mapping[str, Any],
    *,
    train_len: int | None = None,
    eval_len: int | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Tokens per turn of each pair, 2 pi / inv_freq, with the lengths that it has to cover: a pair whose wavelength
    lies above the training length never showed the model a whole turn (YaRN, Peng et al. 2023, arXiv:2309.00071v2,
    Sec. 3.2).

    Args:
        spectra: a spectrum, an encoding that holds one, or several by label.
        train_len, eval_len: tokens seen in training and asked for, each drawn as a line.
        axes: where to draw; a figure of its own by default.

    Returns:
        The axes, tokens per turn upward (logarithmic), a line for each spectrum; pairs that never turn are left out
        and counted in the legend.
    """
    numbers = wavelength_numbers(spectra, train_len=train_len, eval_len=eval_len)
    with style.drawing(axes) as own:
        draw_wavelengths(numbers, own)
    return own


def spectra_numbers(
    methods: Sequence[str] = sources.METHODS,
    *,
    rotary_dim: int = 64,
    base: float | int = 10_000.0,
    stretch: float | int = 8.0,
    train_len: int = 4096,
) -> dict[str, Any]:
    """The numbers of `spectra`: each method's frequencies divided by the plain ones."""
    require(len(methods) > 0, "methods", "at least one", "none")
    original = rules.plain(rotary_dim, base).exact
    rows = []
    for method in methods:
        made = sources.stretched(method, rotary_dim, base, stretch=stretch, train_len=train_len)
        ratio = [float(w / plain) for w, plain in zip(made.exact, original, strict=True)]
        rows.append({"method": method, "ratio": ratio, "magnitude": made.magnitude})
    return {"unit": "inv_freq / plain inv_freq", "rotary_dim": rotary_dim, "base": float(base),
            "stretch": float(stretch), "train_len": train_len, "methods": rows}  # fmt: skip


def draw_spectra(numbers: dict[str, Any], axes: Axes) -> None:
    """Draw `spectra_numbers`."""
    for index, row in enumerate(numbers["methods"]):
        name = sources.NAMES[row["method"]]
        label = name if row["magnitude"] == 1 else f"{name}, tables × {row['magnitude']:.3g}"
        axes.plot(range(len(row["ratio"])), row["ratio"], label=label, **style.line(index))
    values = [r for row in numbers["methods"] for r in row["ratio"]]
    stretch = numbers["stretch"]
    axes.set_yscale("log", base=2)
    deepest = math.ceil(-math.log2(min(values)) - 1e-9)
    step = -(-(deepest + 1) // 7)
    ticks = [2.0**-k for k in range(0, deepest + 1, step)]
    axes.set_yticks(ticks, labels=["1" if tick == 1 else f"1/{round(1 / tick)}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(min(values) * 0.85, 1.18)
    if stretch > 1:
        style.mark(axes.axhline(1 / stretch, linestyle=":"))
    axes.set_xlabel(PAIRS)
    axes.set_ylabel("frequency / plain frequency")
    style.legend(axes, columns=3 if len(numbers["methods"]) <= 6 else 2)


def spectra(
    methods: Sequence[str] = sources.METHODS,
    *,
    rotary_dim: int = 64,
    base: float | int = 10_000.0,
    stretch: float | int = 8.0,
    train_len: int = 4096,
    axes: Axes | None = None,
) -> Axes:
    """What each way to stretch a context does to each pair's frequency, at one stretch: 1 is left alone, 1 / stretch
    interpolated in full (formulas and sources in `ropewalk.spectra`).

    Args:
        methods: of plain, linear, ntk, dynamic_ntk, yarn, llama3.
        rotary_dim: channels that turn.
        base: dimensionless.
        stretch: eval_len / train_len, at least 1.  dynamic_ntk is shown as a config with `factor` = stretch has it
            at stretch * train_len tokens.
        train_len: tokens seen in training.
        axes: where to draw; a figure of its own by default.

    Returns:
        The axes, the ratio of frequencies upward (logarithmic), a line for each method.
    """
    numbers = spectra_numbers(methods, rotary_dim=rotary_dim, base=base, stretch=stretch, train_len=train_len)
    with style.drawing(axes) as own:
        draw_spectra(numbers, own)
    return own
