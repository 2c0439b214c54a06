"""What attention costs with each encoding, relative to torch's attention without one.

Beside the backend that `attend` chooses, biases by distance are timed on named backends, and ALiBi as other
libraries attend with it, where they are installed.

An absolute encoding is added once per model and not once per layer; its row adds it to one layer's attention, so it
is an upper bound.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ropewalk.bench import peers, timing
from ropewalk.bench.variants import (
    LENGTHS,
    MODES,
    RUN,
    Inputs,
    Plan,
    Variant,
    allowed,
    errors,
    refusals,
    variants,
)
from ropewalk.compat import apply_rotary_pos_emb, get_alibi_biases
from ropewalk.encodings import Rotary
from ropewalk.errors import require

DENSE_BYTES = 1 << 30
BIAS_BYTES = 8 << 30  # of the one bias that the tutorial builds
PROBED = 512
TUTORIAL = (
    "The tutorial's own comparison: building ALiBi's n x n bias against rotating q and k, neither of which attends."
    " It hides that an n x n bias still has to be read by an attention that holds n x n scores, that rotation grows"
    " with n and the bias with n x n, and that causal ALiBi needs no such bias at all."
)


def _tutorial_steps(plan: Plan, inputs: Inputs) -> dict[str, Callable[[], Any]]:
    at = Rotary(plan.head_dim).at(inputs.positions)
    assert at.cos is not None and at.sin is not None
    cos, sin = (torch.cat((table, table), -1).to(plan.torch_dtype) for table in (at.cos, at.sin))
    ids = inputs.positions.expand(plan.batch_size, -1)
    seq_len = len(inputs.positions)
    return {
        "build_bias": lambda: get_alibi_biases(plan.num_heads, seq_len),
        "rotate": lambda: apply_rotary_pos_emb(inputs.q.detach(), inputs.k.detach(), cos, sin, ids),
    }


def _score_bytes(plan: Plan, seq_len: int) -> int:
    return plan.batch_size * plan.num_heads * seq_len**2 * 4


def _fits(plan: Plan, variant: Variant, seq_len: int) -> bool:
    """Whether memory allows it."""
    return not variant.dense or _score_bytes(plan, seq_len) <= DENSE_BYTES


class Length:
    """Everything that is timed at one length, and the ratios gathered so far."""

    def __init__(self, plan: Plan, entered: dict[str, Variant], seq_len: int):
        self.plan, self.seq_len = plan, seq_len
        self.inputs = Inputs(plan, seq_len)
        self.refused: dict[str, str] = {}
        self.errors: dict[str, dict[str, float]] = {}
        self.variants = {name: variant for name, variant in entered.items() if self._passes(name, variant)}
        calls: dict[Any, timing.Call] = {
            (name, mode): functools.partial(RUN[mode], variant.step, self.inputs)
            for name, variant in self.variants.items()
            for mode in plan.modes
        }
        fits = plan.causal and "forward" in plan.modes and _score_bytes(plan, seq_len) <= BIAS_BYTES
        self.tutorial = _tutorial_steps(plan, self.inputs) if fits else {}
        calls |= {(name, "forward"): call for name, call in self.tutorial.items()}
        self.race = timing.Race(plan, calls)

    def _passes(self, name: str, variant: Variant) -> bool:
        """Whether a variant fits and gives the right numbers at this length."""
        reason = f"would hold scores of {_score_bytes(self.plan, self.seq_len) / 2**30:.1f} GiB"
        if _fits(self.plan, variant, self.seq_len):

            def worst() -> float:
                self.errors[name] = errors(self.plan, variant, self.inputs)
                return max(self.errors[name].values(), key=lambda gap: math.inf if math.isnan(gap) else gap)

            reason, _ = timing.verdict(worst, allowed(self.plan))
        if reason:
            self.refused[f"{name} at {self.seq_len} tokens"] = reason
        return not reason

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per variant that attends."""
        peaks = {}
        for name, variant in self.variants.items():
            for mode in self.plan.modes:
                step = variant.fresh() if variant.fresh else variant.step
                peaks[name, mode] = timing.peak_bytes(self.plan, functools.partial(RUN[mode], step, self.inputs))
        floor = self.plan.floor
        for name in self.variants:
            rounds = len(self.race.times[name, self.plan.modes[0]])
            row: dict[str, Any] = {"name": name, "seq_len": self.seq_len, "rounds": rounds}
            for mode in self.plan.modes:
                row[mode] = self.race.against((name, mode), (floor, mode))
                peak, base = peaks[name, mode], peaks[floor, mode]
                row[f"{mode}_memory"] = {"ratio": peak / base, "bytes": peak}
            yield {**row, "error": self.errors[name]}

    def tutorial_row(self) -> dict[str, Any]:
        """What the tutorial times, relative to one forward attention without an encoding."""
        bias = self.plan.num_heads * self.seq_len**2 * 4
        floor = (self.plan.floor, "forward")
        parts = {name: self.race.against((name, "forward"), floor) for name in self.tutorial}
        return {"seq_len": self.seq_len, "bias_bytes": bias, **parts}


def run(plan: Plan | None = None, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure; the result is plain JSON.

    Args:
        plan: what to measure, by default every encoding at 128 ... 4096 tokens within four minutes.
        progress: called with one line before each length.

    Returns:
        "rows": per variant and length, for "forward" and "training" (forward + backward) the "ratio" to the floor
        with the "low" and "high" quartile over rounds and the median "seconds", under "forward_memory" and
        "training_memory" the peak "bytes" with their "ratio", and under "error" how far values and gradients are from
        float64.
        "refused", "skipped", "absent": what has no figures, and why.  "tutorial", "tutorial_note": the other
        comparison.
    """
    plan = plan or Plan()
    started = time.perf_counter()
    progress("comparing with the reference")
    refused = refusals(plan)
    entered = {name: variant for name, variant in variants(plan).items() if name not in refused}
    require(plan.floor in entered, "the floor", "right before anything is timed", refused.get(plan.floor))
    skipped, measured = {}, {}
    # the longest first: what it leaves is plenty for the others
    for seq_len in sorted(set(plan.lengths), reverse=True):
        progress(f"{seq_len} tokens")
        left = plan.budget_seconds - (time.perf_counter() - started)
        needed = _needed_seconds(plan, entered, seq_len)
        if needed > left:
            enough = math.ceil(plan.budget_seconds - left + 1.2 * needed)
            skipped[str(seq_len)] = f"not within {plan.budget_seconds:g} seconds; --seconds {enough} should do"
            continue
        length = Length(plan, entered, seq_len)
        length.race.run(left / 3)
        measured[seq_len] = list(length.rows()), length.tutorial_row() if length.tutorial else None
        refused |= length.refused
    wanted = peers.ALIBI.items() if plan.peers and plan.causal and "alibi" in plan.encodings else ()
    missing = peers.missing(needs for _, (needs, _) in wanted)
    return {
        **timing.described("attention", plan, started),
        "rows": [row for seq_len in sorted(measured) for row in measured[seq_len][0]],
        "refused": refused,
        "skipped": skipped,
        "absent": {name: missing[needs] for name, (needs, _) in wanted if needs in missing},
        "tutorial": [measured[seq_len][1] for seq_len in sorted(measured) if measured[seq_len][1]],
        "tutorial_note": TUTORIAL if plan.causal else "",
    }


def for_study(settings: dict[str, Any], budget_seconds: float = 14.0) -> dict[str, Any]:
    """The cost of a study's encodings at its head sizes, in a few seconds: what its report draws.

    Args:
        settings: `Settings.to_json()` of the study.
        budget_seconds: bound of the whole measurement.
    """
    names = tuple(name for name in settings["encodings"] if name != "nope")
    heads = settings["num_heads"]
    head_dim = settings["model_dim"] // heads
    own = {"backends": (), "peers": False, "floor": "none"}
    return run(Plan(names, LENGTHS, heads, head_dim, budget_seconds=budget_seconds, **own))


def _needed_seconds(plan: Plan, entered: dict[str, Variant], seq_len: int) -> float:
    """Wall time that the fewest rounds need, from a short pass of the floor: attention grows with the square."""
    probed = min(seq_len, PROBED)
    inputs = Inputs(plan, probed)
    once = 0.0
    for mode in plan.modes:
        call = functools.partial(RUN[mode], entered[plan.floor].step, inputs)
        call()
        once += timing.seconds(plan, call, now=time.perf_counter)
    # the comparison with float64, the warm-up, the fewest rounds and the memory pass; what holds scores takes three
    # times as long as what does not, what the tutorial does about as long
    fitting = [variant for variant in entered.values() if _fits(plan, variant, seq_len)]
    passes = (timing.ROUNDS[0] + 3) * (1 + sum(3 if variant.dense else 1 for variant in fitting))
    return passes * once * (seq_len / probed) ** 2


def table(result: dict[str, Any]) -> str:
    """The result as plain text."""
    modes = [mode for mode in MODES if mode in result["settings"]["modes"]]
    said = {"forward": "forward", "training": "forward + backward"}
    head = f"{'attention with':<30}{'tokens':>8}" + "".join(f"{said[mode]:>22}" for mode in modes)
    head += "".join(
        f"{'memory ' + short:>12}" for mode, short in (("forward", "f"), ("training", "f+b")) if mode in modes
    )
    floor = "torch's own" if result["settings"]["floor"] == "torch" else "this library's"
    lines = [f"Attention relative to attention without an encoding, {floor}: median [middle half of the rounds]"]
    lines.append(head + f"{'error':>10}")
    for row in result["rows"]:
        cells = [f"{row[mode]['ratio']:.2f} [{row[mode]['low']:.2f}, {row[mode]['high']:.2f}]" for mode in modes]
        peaks = [f"{row[f'{mode}_memory']['ratio']:>12.2f}" for mode in modes]
        line = f"{row['name']:<30}{row['seq_len']:>8}" + "".join(f"{cell:>22}" for cell in cells) + "".join(peaks)
        lines.append(line + f"{row['error']['forward' if 'forward' in modes else 'training']:>10.1e}")
    lines.append("(error: root mean square difference of the values from float64, relative to their own)")
    lines += [f"{name}: no figures, it {reason}" for name, reason in result["refused"].items()]
    lines += [f"{seq_len} tokens: left out, {reason}" for seq_len, reason in result["skipped"].items()]
    lines += [f"{name}: absent, {reason}" for name, reason in result["absent"].items()]
    if result["tutorial"]:
        lines += ["", result["tutorial_note"], f"{'tokens':>8}{'build bias':>14}{'rotate q, k':>14}{'bias, MiB':>12}"]
    for row in result["tutorial"]:
        pair = "".join(f"{row[name]['ratio']:>14.3f}" for name in ("build_bias", "rotate"))
        lines.append(f"{row['seq_len']:>8}{pair}{row['bias_bytes'] / 2**20:>12.1f}")
    if result["tutorial"]:
        lines += ["(both relative to one forward attention without an encoding)", ""]
    lines.append(f"{result['clock']} time on {result['machine']}")
    return "\n".join(lines)
