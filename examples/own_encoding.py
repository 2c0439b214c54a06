"""An encoding of one's own: one class, one hook, and every law, cache, backend and command takes it.

`ropewalk study --encodings examples.own_encoding:SquareRootDistance` trains it beside the others.
"""

import ropewalk as rw
from ropewalk.check import Subject, broken


class SquareRootDistance(rw.Encoding):
    """score(h, i, j) -= 2^-h sqrt(|i - j|): a recency bias that flattens with distance."""

    relative = True  # a common shift changes nothing
    distance_only = True  # so attention may store one number per distance instead of one per pair

    def bias(self, head, q_pos, k_pos):
        distance = (q_pos - k_pos).abs()
        return -(2.0 ** -(head + 1)) * (distance if distance.is_floating_point() else distance.float()).sqrt()


if __name__ == "__main__":
    findings = [f for backend in ("reference", "sdpa") for f in broken(Subject(SquareRootDistance, backend=backend))]
    print(*findings or ["keeps every law"], sep="\n")
    raise SystemExit(bool(findings))
