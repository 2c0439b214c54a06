"""Laws of positions with several axes: pictures, videos, and text among them."""

import itertools
from collections.abc import Iterator

import torch

from ropewalk._shapes import Tensor
from ropewalk.check.numbers import SIDES, channels, turning
from ropewalk.check.subject import Subject, counted, differs, first, score_error, table_error, turning_error
from ropewalk.check.verdict import Finding, NotApplicable
from ropewalk.encodings import Axial, MRoPE, Rotary
from ropewalk.encodings.axes import MultiAxis

GRIDS = ((1, 2), (2, 1), (2, 2), (2, 3), (3, 5))


def _with_axes(subject: Subject) -> list[MultiAxis]:
    parts = [part for part in turning(subject.make()) if isinstance(part, MultiAxis)]
    if not parts:
        raise NotApplicable("its positions have one axis")
    return parts


def _kind(part: MultiAxis) -> str:
    return "K12" if isinstance(part, MRoPE) else "K13"


def _heads(subject: Subject, part: MultiAxis, count: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of one head."""
    x = subject.tokens(1, count)
    return x[:, None, :, : part.head_dim], x[:, None, :, -part.head_dim :]


def axes(subject: Subject) -> Iterator[Finding | str]:
    """Text, the same position on each axis, is turned as by `Rotary`, bit for bit; scores depend on the distance along
    each axis alone; a picture turned on its side, together with its axes, keeps its scores."""
    for part in _with_axes(subject):
        yield from first(_text(subject, part))
        if part.second is None:  # else the two channels of a pair follow two axes, which is no rotation
            yield from first(_distances(subject, part))
        else:
            yield "two channels of one pair follow different axes: scores depend on more than distances"
        yield from first(_cells(subject))
        if part.axes > 1:
            yield from first(_on_its_side(subject, part))


def _text(subject: Subject, part: MultiAxis) -> Iterator[Finding]:
    rope = Rotary(part.head_dim, spectrum=part.spectrum, layout=part.layout)
    for count in (1, 2, 7):
        where = torch.arange(count) + 1
        for side, x in zip(SIDES, _heads(subject, part, count), strict=True):
            expected = getattr(rope, side)(x, rope.at(where))
            for places in (where, where.expand(part.axes, 1, -1)):
                got = getattr(part, side)(x, part.at(places))
                given = f"a {side} of text at positions {where.tolist()}"
                given += f", given for each of {part.axes} axes" * (places.ndim == 3)
                yield from differs("axes", given, expected, got, 0.0, "an axis is filled wrongly for text", _kind(part))


def _scores(part: MultiAxis, q: Tensor, k: Tensor, places: Tensor) -> Tensor:
    at = part.at(places)
    return part.query(q, at) @ part.key(k, at).transpose(-1, -2) / part.head_dim**0.5


def _distances(subject: Subject, part: MultiAxis) -> Iterator[Finding]:
    for count in (1, 2, 6):
        q, k = _heads(subject, part, count)
        where = torch.stack([torch.arange(count) * (axis + 1) for axis in range(part.axes)])[:, None]
        expected = _scores(part, q, k, where)
        for shift, axis in itertools.product((1, 1000, 2**24), range(part.axes)):
            moved = where.clone()
            moved[axis] += shift
            limit = 2 * score_error(q, k, shift) * part.spectrum.magnitude**2
            given = f"{counted(count)} shifted by {shift} along axis {axis}"
            cause = "an axis enters the score by more than its distance"
            yield from differs("axes", given, expected, _scores(part, q, k, moved), limit, cause, _kind(part))


def _cells(subject: Subject) -> Iterator[Finding]:
    """Cell n of a grid `columns` wide lies in row n // columns and column n % columns."""
    for rows, columns in GRIDS:
        cells = torch.arange(rows * columns)
        expected = torch.stack((cells // columns, cells % columns))[:, None]
        got = subject.parts.grid(rows, columns)
        given = f"cells of a picture of {rows} x {columns} (rows x columns)"
        cause = "rows and columns are exchanged, or cells counted column by column"
        yield from differs("axes", given, expected, got, 0.0, cause, "K13")


def _on_its_side(subject: Subject, part: MultiAxis) -> Iterator[Finding]:
    """A picture of `rows` x `columns` cells, and the same picture transposed, its two last axes exchanged."""
    for rows, columns in GRIDS:
        count = rows * columns
        q, k = _heads(subject, part, count)
        order = torch.arange(count).view(rows, columns).T.flatten()  # where each cell of the transposed one was
        still = [torch.zeros(1, count, dtype=torch.long)] * (part.axes - 2)
        upright = torch.stack((*still, *subject.parts.grid(rows, columns)))
        on_side = torch.stack((*still, *subject.parts.grid(columns, rows).flip(0)))
        expected = _scores(part, q, k, upright)[..., order, :][..., order]
        got = _scores(part, q[..., order, :], k[..., order, :], on_side)
        limit = 2 * score_error(q, k, max(rows, columns)) * part.spectrum.magnitude**2
        given = f"a picture of {rows} x {columns} (rows x columns), turned on its side"
        yield from differs("axes", given, expected, got, limit, "rows and columns are confused", "K13")


def sections(subject: Subject) -> Iterator[Finding]:
    """Each pair follows the axis that its section or order gives it, at the published frequency."""
    for part in _with_axes(subject):
        if not isinstance(part, MRoPE | Axial):
            raise NotApplicable("its pairs are dealt to axes by no published rule")
        yield from first(_dealt(subject, part))


def published_axes(part: MRoPE | Axial) -> list[int]:
    """The axis of each channel, those of first channels before those of second ones: as the models write over slices
    of the first axis's table, which is another route than the package's."""
    pairs = part.rotary_dim // 2
    if isinstance(part, Axial):
        return [i * part.axes // pairs for i in range(pairs)] * 2
    sizes = part.sections
    if part.order == "channels":
        return [axis for axis, n in enumerate(sizes) for _ in range(2 * n)]
    dealt = [0] * pairs
    if part.order == "interleaved":
        for axis in (1, 2):
            dealt[axis : 3 * sizes[axis] : 3] = [axis] * len(dealt[axis : 3 * sizes[axis] : 3])
    elif part.order == "alternating":
        dealt[: 2 * sizes[1]] = [1, 2] * sizes[1]
    else:
        ends = list(itertools.accumulate(sizes))
        dealt = [sum(i >= end for end in ends) for i in range(pairs)]
    return dealt * 2


def published_frequencies(part: MRoPE | Axial) -> list[float]:
    """Radians per token of each pair."""
    pairs, width = part.rotary_dim // 2, part.rotary_dim
    if part.base is None:
        return list(part.inv_freq)
    powers = [part.base ** (-2 * i / width) for i in range(pairs)]
    if isinstance(part, MRoPE):
        return powers
    if part.order == "block":
        return [part.base ** (-2 * i * part.axes / width) for i in range(pairs // part.axes)] * part.axes
    return [power for axis in range(part.axes) for power in powers[axis :: part.axes]]


def _dealt(subject: Subject, part: MRoPE | Axial) -> Iterator[Finding]:
    """One token, one step along one axis: which channels turn, and by which angle."""
    of_channel, inv_freq = published_axes(part), published_frequencies(part)
    q, k = _heads(subject, part, 1)
    into = channels(part)
    for axis, (side, x) in itertools.product(range(part.axes), zip(SIDES, (q, k), strict=True)):
        where = torch.zeros(part.axes, 1, 1, dtype=torch.long)
        where[axis] = 1
        angles = torch.tensor([w * (a == axis) for w, a in zip(inv_freq * 2, of_channel, strict=True)]).double()
        a, b = (x[..., c].double() for c in into)
        cos, sin = ((f(angles) * part.spectrum.magnitude).chunk(2) for f in (torch.cos, torch.sin))
        expected = torch.cat((a * cos[0] - b * sin[0], b * cos[1] + a * sin[1]), dim=-1)
        got = getattr(part, side)(x, part.at(where))[..., into[0] + into[1]]
        limit = turning_error(x, 1) * part.spectrum.magnitude + table_error(torch.float32)
        given = f"a {side} at position 1 along axis {axis}, 0 along the other{'s' * (part.axes > 2)}"
        yield from differs("sections", given, expected, got, limit, "pairs are dealt to other axes", _kind(part))
