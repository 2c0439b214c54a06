"""Laws of the runtime: history, purity, gradients, bounds, state, compilation."""

import copy
from collections.abc import Iterator

import torch
from torch import nn

from ropewalk._shapes import Tensor
from ropewalk.attention import attend
from ropewalk.check.numbers import rotaries
from ropewalk.check.shrink import smallest
from ropewalk.check.subject import Subject, counted, differs, first, largest, rounding, turning_error
from ropewalk.check.verdict import Finding
from ropewalk.encodings import Encoding, Rotary


def history(subject: Subject) -> Iterator[Finding]:
    """Results depend on arguments alone: not on earlier calls, other lengths, other dtypes or other instances."""
    for search in (_again, _late, _written):
        yield from first(search(subject))


def _again(subject: Subject) -> Iterator[Finding]:
    """The same call before and after one other call, the shortest first."""
    limit = min(subject.make().max_positions or 520, 520)  # tables of 512 rows are usual
    x, where = subject.tokens(1, 8), torch.arange(8)
    for length, dtype in ((3, torch.float32), (8, torch.bfloat16), (8, torch.float64), (16, torch.float32),
                          (limit, torch.float32)):  # fmt: skip
        encoding = subject.make()
        before = subject.forward(encoding, x, where)
        subject.forward(encoding, subject.tokens(2, length, dtype), torch.arange(length))
        with torch.inference_mode():
            subject.forward(encoding, x, where)
        after = subject.forward(encoding, x, where)
        given = f"8 tokens, before and after a call with {length} tokens in {dtype}"
        kind = "K03" if dtype == torch.float32 or length > 8 else "K02"
        cause = "a table grown or replaced by another call"
        yield from differs("history", given, before, after, 0.0, cause, kind)


def _late(subject: Subject) -> Iterator[Finding]:
    """Later tokens alone, after the whole: as a fresh encoding sees them."""
    for count in (1, 3):
        encoding, x, where = subject.make(), subject.tokens(1, 8), torch.arange(8)
        subject.forward(encoding, x, where)
        subject.forward(encoding, x[:, :count], where[:count])
        late = _keys_and_output(subject, encoding, x[:, -count:], where[-count:])
        fresh = _keys_and_output(subject, subject.make(), x[:, -count:], where[-count:])
        at_start = _keys_and_output(subject, subject.make(), x[:, -count:], where[:count])
        offset_lost = torch.equal(late, at_start) and not torch.equal(fresh, at_start)
        kind, cause = ("K04", "a table of other positions") if offset_lost else ("K03", "a cache keyed by too little")
        given = f"tokens {where[-count:].tolist()} alone, after calls with 8 and {count}"
        yield from differs("history", given, fresh, late, 0.0, cause, kind)


def _keys_and_output(subject: Subject, encoding: Encoding, x: Tensor, where: Tensor) -> Tensor:
    """Encoded keys, which show a turn that cancels in a score, and what attention gives, (heads + kv_heads)."""
    return torch.cat((subject.encoded(encoding, x, where)[1], subject.forward(encoding, x, where)), dim=1)


def _written(subject: Subject) -> Iterator[Finding]:
    encoding = subject.make()
    state = copy.deepcopy({k: v for k, v in vars(encoding).items() if k != "_modules"})
    for length in (1, 16):
        subject.forward(encoding, subject.tokens(1, length), torch.arange(length))
        changed = [k for k, v in vars(encoding).items() if k != "_modules" and not (k in state and _same(state[k], v))]
        if changed:
            given, got = f"forward of {counted(length)}", ", ".join(changed)
            cause = "state written in forward, which neither tracing nor a second thread allows"
            yield Finding("history", given, "no attribute assigned", got, cause, "K18")


def _same(a, b) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return isinstance(a, nn.Module) or bool(a == b)


def purity(subject: Subject) -> Iterator[Finding]:
    """No hook, and not attention, writes into what it is given."""
    encoding = subject.make()
    for name in ("x", "q", "k", "positions", "mask"):
        yield from first(found for count in (1, 6) for found in _overwritten(subject, encoding, count, name))


def _overwritten(subject: Subject, encoding: Encoding, count: int, name: str) -> Iterator[Finding]:
    x, where = subject.tokens(1, count), torch.arange(count)
    q = x.unflatten(-1, (subject.num_heads, -1)).transpose(1, 2).contiguous()
    k = q[:, : subject.num_kv_heads].contiguous()
    given = {"x": x, "q": q, "k": k, "positions": where, "mask": torch.ones(count, count, dtype=torch.bool)}
    kept, at = {key: t.clone() for key, t in given.items()}, encoding.at(where)
    encoding.embed(x, at)
    encoding.query(q, at)
    encoding.key(k, at)
    subject.attend(q, k, k, encoding, mask=given["mask"], q_positions=where, k_positions=where)
    tokens = f"{name} of {counted(count)}"
    yield from differs("purity", tokens, kept[name], given[name], 0.0, "written in place")


def gradients(subject: Subject) -> Iterator[Finding]:
    """Gradients are right (finite differences), in place too, on a second backward and after inference mode."""
    encoding = subject.make().double()
    yield from first(found for sizes in ((1, 1), (3, 4)) for found in _differences(subject, encoding, *sizes))
    for rope in rotaries(encoding):
        yield from first(found for count in (1, 3) for found in _in_place(subject, rope, count))


def _differences(subject: Subject, encoding: Encoding, q_len: int, k_len: int) -> Iterator[Finding]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((subject.num_heads, q_len), *[(subject.num_kv_heads, k_len)] * 2)
    q, k, v = (torch.randn(1, h, n, subject.head_dim, generator=generator, dtype=torch.float64) for h, n in shapes)
    with torch.inference_mode():
        subject.attend(q, k, v, encoding)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    ok = torch.autograd.gradcheck(
        lambda q, k, v: subject.attend(q, k, v, encoding), inputs, raise_exception=False, fast_mode=True
    )
    if not ok:
        given = f"attend, queries and keys: {q_len} and {k_len}"
        yield Finding("gradients", given, "finite differences", "another gradient", "backward")
    for _ in range(2):  # a graph kept between steps fails at the second
        encoding.zero_grad()
        subject.attend(q, k, v, encoding).sum().backward()


def _in_place(subject: Subject, rope: Rotary, count: int) -> Iterator[Finding]:
    generator = torch.Generator().manual_seed(0)
    at = rope.at(torch.tensor([5, 9, 1])[:count], torch.float64)
    x = torch.randn(1, 2, count, rope.head_dim, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    grads, values = [], []
    for turn in (rope.query, lambda y, at: subject.parts.rotate_(y * 1.0, at, rope.layout)):
        out = turn(x, at)
        values.append(out.detach())
        grad = torch.autograd.grad((out * weight).sum(), x)[0] if out.requires_grad else torch.zeros_like(x)
        grads.append(grad)
    given, limit = f"{counted(count)} turned in place", turning_error(x, 0) + turning_error(weight, 0)
    yield from differs("gradients", given, values[0], values[1], limit, "another rotation")
    cause = "no gradient, or not turned back"
    yield from differs("gradients", f"gradient of {given}", grads[0], grads[1], limit, cause)


def bounds(subject: Subject) -> Iterator[Finding]:
    """Any position is answered or refused by a Python error; none wraps around."""
    encoding = subject.make()
    limit = encoding.max_positions
    ends = [] if limit is None else [limit - 1, limit, limit + 1]
    ahead: list[int] = sorted([0, 1, 511, *ends, 2**31, 2**40, 2**62])
    for places in (ahead, [-1, -3]):
        yield from first(_beyond(subject, encoding, limit, places))


def _beyond(subject: Subject, encoding: Encoding, limit: int | None, places: list[int]) -> Iterator[Finding]:
    def wrong(position: int) -> list[Finding]:
        return _misplaced(subject, encoding, limit, position)

    for position in places:
        if wrong(position):
            least = smallest(lambda p: bool(wrong(p)), 0, position) if position > 0 else None
            yield from wrong(position if least is None else least)


def _misplaced(subject: Subject, encoding: Encoding, limit: int | None, position: int) -> list[Finding]:
    """What one token at `position` gets, if that is wrong."""
    inside, given = limit is None or 0 <= position < limit, f"position {position}"
    x, where = subject.tokens(1, 1), torch.tensor([position])
    try:
        at = encoding.at(where)
        out = encoding.query(encoding.embed(x, at).unflatten(-1, (subject.num_heads, -1)).transpose(1, 2), at)
    except (ValueError, IndexError) as error:
        return [Finding("bounds", given, "an answer", repr(error), "a table that ends too early")] if inside else []
    if not inside:
        return [Finding("bounds", f"{given} of {limit}", "a refusal", "an answer", "wrapped or clamped")]
    if not bool(out.isfinite().all()):
        return [Finding("bounds", given, "finite numbers", "others", "overflow")]
    return []


def state(subject: Subject) -> Iterator[Finding]:
    """`state_dict` holds learned tensors only; a build on the meta device, materialised, equals a fresh one; tables
    that older checkpoints carry change nothing."""
    encoding = subject.make()
    learned, saved = ({*names} for names in (dict(encoding.named_parameters()), encoding.state_dict()))
    if saved != learned:
        yield Finding("state", "state_dict", str(sorted(learned)), str(sorted(saved)), "tables are saved")
    for name, buffer in encoding.named_buffers():
        if buffer.is_complex() or buffer.is_floating_point():
            kind, cause = ("K18", "devices lack this dtype") if buffer.is_complex() else ("K01", "a cast spoils it")
            yield Finding("state", f"buffer {name}", "integers", str(buffer.dtype), cause, kind)
    for search in (_materialised, _old_checkpoint):
        yield from first(found for count in (1, 6) for found in search(subject, encoding, count))


def _materialised(subject: Subject, encoding: Encoding, count: int) -> Iterator[Finding]:
    with torch.device("meta"):
        ghost = subject.make()
    ghost = ghost.to_empty(device="cpu")
    for module in ghost.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    ghost.load_state_dict(encoding.state_dict())
    x, where = subject.tokens(1, count), torch.arange(count) + 1
    expected, got = (subject.forward(e, x, where) for e in (encoding, ghost))
    given = f"{counted(count)} after meta, to_empty, load"
    yield from differs("state", given, expected, got, 0.0, "a table was left unfilled")


def _old_checkpoint(subject: Subject, encoding: Encoding, count: int) -> Iterator[Finding]:
    """The same state with `inv_freq` in it, rounded as a model in half precision saved it, for each rotation."""
    old = dict(encoding.state_dict())
    for name, part in encoding.named_modules():
        if isinstance(part, Rotary):
            old[f"{name}.inv_freq".removeprefix(".")] = torch.tensor(part.spectrum.inv_freq).bfloat16()
    reader = subject.make()
    x, where = subject.tokens(1, count), torch.arange(count) + 1
    given = f"{counted(count)} after loading a state with inv_freq"
    try:
        reader.load_state_dict(old)
    except (RuntimeError, ValueError) as error:
        yield Finding("state", given, "loaded", type(error).__name__, "tables of older checkpoints are refused")
        return
    expected, got = (subject.forward(e, x, where) for e in (encoding, reader))
    yield from differs("state", given, expected, got, 0.0, "a rounded table is read from the checkpoint")


class Layer(nn.Module):
    """One attention layer, as small as a compiler can be shown."""

    def __init__(self, subject: Subject, encoding: Encoding):
        super().__init__()
        self.encoding = encoding
        self.maps = nn.ParameterList(nn.Parameter(m) for m in subject.projections())
        self.head_dim, self.backend = subject.head_dim, subject.backend

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        at = self.encoding.at(where)
        x = self.encoding.embed(x, at)
        q, k, v = ((x @ m).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for m in self.maps)
        q, k = self.encoding.query(q, at), self.encoding.key(k, at)
        out = attend(q, k, v, self.encoding, encoded=True, backend=self.backend)
        assert isinstance(out, Tensor)
        return out


def compiles(subject: Subject) -> Iterator[Finding]:
    """A full-graph compile and an export at dynamic length agree with eager, at other lengths, in real arithmetic."""
    layer = Layer(subject, subject.make()).eval()
    runs = [(subject.tokens(1, n), torch.arange(n)) for n in (7, 12, 19, 26, 33)]
    yield from _compiled(subject, layer, runs)
    yield from _exported(subject, layer, runs[:3])


def _traced(subject: Subject, expected: Tensor, got: Tensor, given: str) -> Iterator[Finding]:
    # A compiler may order sums anew: those of the projection, of a score, over the keys.
    terms = subject.model_dim + subject.head_dim + expected.shape[2]
    limit = rounding(torch.float32, terms) * max(1.0, largest(expected))
    yield from differs("compile", given, expected, got, limit, "traced at one length")


def _compiled(subject: Subject, layer: Layer, runs: list[tuple[Tensor, Tensor]]) -> Iterator[Finding]:
    from torch._dynamo.testing import CompileCounterWithBackend  # a second to import, for this law alone

    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    yield from first(
        found
        for x, where in runs
        for found in _traced(subject, layer(x, where), compiled(x, where), f"compiled, {len(where)} tokens")
    )
    if graphs.frame_count > 2:
        yield Finding(
            "compile", "5 lengths", "at most 2 graphs", f"{graphs.frame_count}", "an object replaced per call"
        )


def _exported(subject: Subject, layer: Layer, runs: list[tuple[Tensor, Tensor]]) -> Iterator[Finding]:
    length = torch.export.Dim("length", min=2, max=512)
    try:
        exported = torch.export.export(layer, runs[0], dynamic_shapes=({1: length}, {0: length}))
    except Exception as error:  # torch has many for it
        got = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        cause = "a length or a number is read while tracing"
        yield Finding("compile", "export at dynamic length", "a program for 2 to 512 tokens", got, cause)
        return
    program = exported.module()
    yield from first(
        found
        for x, where in runs[1:]
        for found in _traced(subject, layer(x, where), program(x, where), f"exported, {len(where)} tokens")
    )
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and (value.is_complex() or value.dtype == torch.float64):
            yield Finding("compile", str(node), "real numbers of 32 bits", str(value.dtype), "devices lack this dtype")
            break
