"""A stranger's rotation and a stranger's bias put to the laws: two that hold, and two usual mistakes that do not.

Exit code 0 if the right ones pass and the wrong ones are found.
"""

import torch

import ropewalk as rw

INV_FREQ = 10_000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)


def right_turn(x, positions):
    """Halves paired; angles in float64, whatever x is."""
    angles = positions.double()[:, None] * INV_FREQ
    cos, sin = (f(angles).repeat(1, 2).to(torch.promote_types(x.dtype, torch.float32)) for f in (torch.cos, torch.sin))
    return (x * cos + rw.compat.rotate_half(x) * sin).to(x.dtype)


def restarting_turn(x, positions):
    """Counts from 0 in each call: right in one pass, wrong in a decode step."""
    return right_turn(x, torch.arange(x.shape[-2]))


def right_bias(num_heads, q_positions, k_positions):
    """-slope times distance, slopes by the published rule."""
    distance = (q_positions[:, None] - k_positions).abs()
    return -rw.compat.get_slopes(num_heads)[:, None, None] * distance


def simple_bias(num_heads, q_positions, k_positions):
    """The rule for powers of two, used for any number of heads."""
    slopes = 2.0 ** (-8 * torch.arange(1, num_heads + 1) / num_heads)
    return -slopes[:, None, None] * (q_positions[:, None] - k_positions).abs()


wrong = 0
for good, target in (
    (True, rw.check.Rotation(right_turn, 32, base=10_000.0, layout="half")),
    (False, rw.check.Rotation(restarting_turn, 32, base=10_000.0, layout="half")),
    (True, rw.check.Bias(right_bias, 12, rule="alibi")),
    (False, rw.check.Bias(simple_bias, 12, rule="alibi")),
):
    report = rw.check(target)
    print(f"{report.target}: {'keeps its laws' if report.passed else 'is wrong'}")
    for finding in report.findings[:1]:
        print(f"    {finding}")
    wrong += report.passed != good
raise SystemExit(wrong)
