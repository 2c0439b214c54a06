"""Laws of the runtime: purity, gradients, bounds, state, compilation."""

import copy
from collections.abc import Iterator

import torch
from torch import nn

from ropewalk._shapes import Tensor
from ropewalk.attention import attend
from ropewalk.check.numbers import rotaries
from ropewalk.check.subject import Subject, differs
from ropewalk.check.verdict import Finding
from ropewalk.encodings import Encoding


def history(subject: Subject) -> Iterator[Finding]:
    """Results depend on arguments alone: not on earlier calls, other lengths, other dtypes or other instances."""
    encoding = subject.make()
    limit = encoding.max_positions or 4096
    x = subject.tokens(1, 8)
    where = torch.arange(8)
    state = copy.deepcopy({k: v for k, v in vars(encoding).items() if k != "_modules"})
    first = subject.forward(encoding, x, where)
    for length in (min(limit, 600), 3):
        for dtype in (torch.bfloat16, torch.float64):
            subject.forward(encoding, subject.tokens(2, length, dtype), torch.arange(length))
    with torch.inference_mode():
        subject.forward(encoding, x, where)
    again = subject.forward(encoding, x, where)
    yield from differs("history", "the same call twice", first, again, 0.0, "a table grown or replaced by another call")
    late = subject.forward(encoding, x[:, 5:], where[5:])
    rows = subject.forward(subject.make(), x[:, 5:], where[5:])
    yield from differs("history", "tokens 5 to 7 alone", rows, late, 0.0, "a cache keyed by too little")
    changed = [k for k, v in vars(encoding).items() if k in state and not _same(state[k], v)]
    if changed:
        yield Finding("history", "forward", "no attribute assigned", ", ".join(changed), "state written in forward")


def _same(a, b) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return isinstance(a, nn.Module) or bool(a == b)


def purity(subject: Subject) -> Iterator[Finding]:
    """No hook, and not attention, writes into what it is given."""
    encoding = subject.make()
    x, where = subject.tokens(1, 6), torch.arange(6)
    q = x.unflatten(-1, (subject.num_heads, -1)).transpose(1, 2).contiguous()
    k = q[:, : subject.num_kv_heads].contiguous()
    at = encoding.at(where)
    kept = [t.clone() for t in (x, q, k, where)]
    encoding.embed(x, at)
    encoding.query(q, at)
    encoding.key(k, at)
    mask = torch.ones(6, 6, dtype=torch.bool)
    subject.attend(q, k, k, encoding, mask=mask, q_positions=where, k_positions=where)
    for name, before, after in zip(("x", "q", "k", "positions"), kept, (x, q, k, where), strict=True):
        yield from differs("purity", name, before, after, 0.0, "written in place")
    if not bool(mask.all()):
        yield Finding("purity", "mask", "unchanged", "changed", "written in place")


def gradients(subject: Subject) -> Iterator[Finding]:
    """Gradients are right (finite differences), in place too, on a second backward and after inference mode."""
    encoding = subject.make().double()
    generator = torch.Generator().manual_seed(0)
    shapes = ((subject.num_heads, 3), (subject.num_kv_heads, 4), (subject.num_kv_heads, 4))
    q, k, v = (torch.randn(1, h, n, subject.head_dim, generator=generator, dtype=torch.float64) for h, n in shapes)
    with torch.inference_mode():
        subject.attend(q, k, v, encoding)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    ok = torch.autograd.gradcheck(
        lambda q, k, v: subject.attend(q, k, v, encoding), inputs, raise_exception=False, fast_mode=True
    )
    if not ok:
        yield Finding("gradients", "attend on 3 queries, 4 keys", "finite differences", "another gradient", "backward")
    for rope in rotaries(encoding):
        at = rope.at(torch.tensor([5, 9, 1]), torch.float64)
        x = torch.randn(1, 2, 3, rope.head_dim, generator=generator, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        grads, values = [], []
        for turn in (rope.query, lambda y, at, r=rope: subject.parts.rotate_(y * 1.0, at, r.layout)):
            out = turn(x, at)
            values.append(out.detach())
            grads.append(torch.autograd.grad((out * weight).sum(), x)[0])
        yield from differs("gradients", "turned in place", values[0], values[1], 1e-12, "another rotation")
        yield from differs("gradients", "turned in place", grads[0], grads[1], 1e-12, "no gradient, or not turned back")
    for _ in range(2):  # a graph kept between steps fails at the second
        encoding.zero_grad()
        subject.attend(inputs[0], inputs[1], inputs[2], encoding).sum().backward()


def bounds(subject: Subject) -> Iterator[Finding]:
    """Any position is answered or refused by a Python error; none wraps around."""
    encoding = subject.make()
    x = subject.tokens(1, 2)
    limit = encoding.max_positions
    for first in (-3, 0, 510, 2**31 - 1, 2**40, 2**62):
        where = torch.tensor([first, first + 1])
        inside = limit is None or (first >= 0 and first + 1 < limit)
        try:
            at = encoding.at(where)
            out = encoding.query(encoding.embed(x, at).unflatten(-1, (subject.num_heads, -1)).transpose(1, 2), at)
        except (ValueError, IndexError) as error:
            if inside:
                yield Finding("bounds", f"position {first}", "an answer", repr(error), "a table that ends too early")
            continue
        if not inside:
            yield Finding("bounds", f"position {first} of {limit}", "a refusal", "an answer", "wrapped or clamped")
        if not bool(out.isfinite().all()):
            yield Finding("bounds", f"position {first}", "finite numbers", "others", "overflow")


def state(subject: Subject) -> Iterator[Finding]:
    """`state_dict` holds learned tensors only; a build on the meta device, materialised, equals a fresh one."""
    encoding = subject.make()
    learned = {name for name, _ in encoding.named_parameters()}
    if set(encoding.state_dict()) != learned:
        yield Finding(
            "state", "state_dict", str(sorted(learned)), str(sorted(encoding.state_dict())), "tables are saved"
        )
    for name, buffer in encoding.named_buffers():
        if buffer.is_complex() or buffer.is_floating_point():
            yield Finding("state", f"buffer {name}", "integers", str(buffer.dtype), "a cast spoils it")
    with torch.device("meta"):
        ghost = subject.make()
    ghost = ghost.to_empty(device="cpu")
    for module in ghost.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    ghost.load_state_dict(encoding.state_dict())
    x, where = subject.tokens(1, 6), torch.arange(6)
    expected, got = (subject.forward(e, x, where) for e in (encoding, ghost))
    yield from differs("state", "meta, to_empty, load", expected, got, 0.0, "a table was left unfilled")


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
    from torch._dynamo.testing import CompileCounterWithBackend  # a second to import, for this law alone

    layer = Layer(subject, subject.make()).eval()
    runs = [(subject.tokens(1, n), torch.arange(n)) for n in (7, 19, 33, 12, 26)]
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for x, where in runs:
        given = f"compiled, {len(where)} tokens"
        yield from differs("compile", given, layer(x, where), compiled(x, where), 2e-6, "traced at one length")
    if graphs.frame_count > 2:
        yield Finding(
            "compile", "5 lengths", "at most 2 graphs", f"{graphs.frame_count}", "an object replaced per call"
        )
    length = torch.export.Dim("length", min=2, max=512)
    exported = torch.export.export(layer, runs[0], dynamic_shapes=({1: length}, {0: length}))
    for x, where in runs[1:3]:
        got = exported.module()(x, where)
        yield from differs(
            "compile", f"exported, {len(where)} tokens", layer(x, where), got, 2e-6, "traced at one length"
        )
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and (value.is_complex() or value.dtype == torch.float64):
            yield Finding("compile", str(node), "real numbers of 32 bits", str(value.dtype), "devices lack this dtype")
            break
