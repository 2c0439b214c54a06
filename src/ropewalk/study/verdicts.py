"""What one paired difference or one ratio allows to be said, and how it is said."""

import math
from dataclasses import dataclass

from ropewalk.study import statistics
from ropewalk.study.evidence import Study
from ropewalk.study.statistics import Interval

GATE_STRETCH = 8
GATE_RATIO = 1.5
GATE_SHORTEST = 4
# perplexities within 1 % of each other count as equally good, if the whole interval says so
SAME_NATS = 0.01
# with five documents even a perfect agreement in sign happens by chance in 6 % of cases
ENOUGH_DOCUMENTS = 6
NAMES = {
    "rotary": "RoPE",
    "alibi": "ALiBi",
    "nope": "NoPE",
    "hybrid": "Hybrid",
    "sinusoidal": "Sinusoidal",
    "learned": "Learned",
    "linear": "linear interpolation",
    "ntk": "NTK",
    "yarn": "YaRN",
}


@dataclass(frozen=True)
class Gate:
    """Whether contrasts may be read at all: an undertrained RoPE looks as if it extrapolated.

    `state` is "passed", "undertrained" or "not applicable".
    """

    state: str
    text: str
    ratio: float | None = None

    @property
    def open(self) -> bool:
        return self.state != "undertrained"


def gate(study: Study) -> Gate:
    """RoPE at eight times its training length must be at least 1.5 times worse than within it.

    Where eight times was not evaluated, the next longer length stands in for it, or one of at least four times
    with the root of 1.5 that belongs to it (perplexity grows about as a power of the length).
    """
    unknown = "so nothing shows whether training was long enough."
    if "rotary" not in study.encodings:
        return Gate("not applicable", f"No plain RoPE in this study, {unknown}")
    near = study.train_len
    means = {
        n: statistics.mean_and_sd(v)[0]
        for n in study.lengths("windows")
        if (v := study.perplexities("rotary", "windows", n))
    }
    far = _gate_length(near, [n for n in means if n >= GATE_SHORTEST * near])
    if near not in means or far is None:
        missing = f"RoPE was not evaluated at both {near} and at least {GATE_SHORTEST * near} tokens"
        return Gate("not applicable", f"{missing}, {unknown}")
    ratio, wanted = means[far] / means[near], GATE_RATIO ** min(1, math.log(far / near, GATE_STRETCH))
    seen = f"RoPE's perplexity at {far} tokens is {ratio:.2f} times that at {near}"
    if ratio < wanted:
        text = (
            f"Undertrained: contrasts are not meaningful. {seen}, less than {wanted:.2g}: a model that has not"
            " yet learned to use positions cannot show what happens when they are new. Train for more steps."
        )
        return Gate("undertrained", text, ratio)
    return Gate("passed", f"{seen}, at least {wanted:.2g}: the models have learned to use positions.", ratio)


def _gate_length(train_len: int, lengths: list[int]) -> int | None:
    """The shortest length of at least eight times the training length, else the longest there is."""
    enough = [n for n in lengths if n >= GATE_STRETCH * train_len]
    return min(enough) if enough else max(lengths, default=None)


def verdict(interval: Interval) -> str:
    """What a paired difference says of its first side: "better", "worse", "same" (within 1 %) or "undecided".

    >>> verdict(Interval(-0.03, -0.04, -0.02)), verdict(Interval(0.002, -0.001, 0.005))
    ('better', 'same')
    >>> verdict(Interval(0.02, -0.01, 0.05)), verdict(Interval(0.02, None, None))
    ('undecided', 'undecided')
    """
    if interval.low is None or interval.high is None:
        return "undecided"
    if max(abs(interval.low), abs(interval.high)) < SAME_NATS:
        return "same"
    if interval.excludes_zero:
        return "better" if interval.high < 0 else "worse"
    return "undecided"


def label(name: str) -> str:
    """A command-line name as one says it.

    >>> label("rotary+alibi"), label("yarn"), label("my.module:Class")
    ('RoPE + ALiBi', 'YaRN', 'my.module:Class')
    """
    return name if ":" in name else " + ".join(NAMES.get(part, part) for part in name.split("+"))


def percent(nats: float) -> str:
    """A difference in nats per token as a change of perplexity, with its sign; a factor where it is large.

    >>> percent(-0.08), percent(0.7), percent(2.0), percent(-1e-5)
    ('-7.7 %', '+101 %', 'x 7.39', '0.0 %')
    """
    change = statistics.exp(nats) - 1
    if change > 3:
        return f"x {change + 1:.3g}"
    return f"{signed(100 * change, 1 if abs(change) < 0.995 else 0)} %"


def signed(value: float, digits: int) -> str:
    """A number with its sign, and none for what rounds to 0.

    >>> signed(0.25, 1), signed(-0.001, 2)
    ('+0.2', '0.00')
    """
    text = f"{value:+.{digits}f}"
    return text if float(text) else text[1:]


def percent_interval(interval: Interval) -> str:
    """A paired difference as a change of perplexity with its 95 % interval.

    >>> percent_interval(Interval(-0.08, -0.09, -0.07)), percent_interval(Interval(0.08, None, None))
    ('-7.7 % [-8.6 %, -6.8 %]', '+8.3 %')
    """
    if interval.low is None or interval.high is None:
        return percent(interval.estimate)
    return f"{percent(interval.estimate)} [{percent(interval.low)}, {percent(interval.high)}]"


def few(count: int) -> str:
    """The warning that belongs to a statement about too few documents; empty when there are enough."""
    if count >= ENOUGH_DOCUMENTS:
        return ""
    if count == 1:
        return " One document only: no interval."
    return f" Only {count} documents: read the interval as their spread, not as 95 %."
