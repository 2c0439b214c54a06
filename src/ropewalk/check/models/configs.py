"""Laws of a model and its config: what is said is done, whichever code computes attention."""

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import torch

from ropewalk import hf
from ropewalk._shapes import Tensor
from ropewalk.check.models.batches import _padded, cached, has_cache
from ropewalk.check.models.build import ModelSubject, quiet
from ropewalk.check.models.compare import angle, rounding, spread, unequal
from ropewalk.check.verdict import Finding, NotApplicable
from ropewalk.encodings import Encoding, NoPE, Temperature
from ropewalk.hf.config_write import equal, parts, turning

ABOUT = re.compile(
    r"rope|rotary|alibi|position|partial|sliding_window|attention_chunk|temperature|floor_scale|attn_scale"
)
NOT_ABOUT = re.compile(
    r"layer_types|^max_position|original_max|rope_parameters$|rope_scaling$|labels|_qk_rope_head_dim"
)
COUNT = 10


def _far(subject: ModelSubject, tokens: Tensor) -> dict[str, Tensor]:
    if not subject.takes_positions:
        return {}
    top = (subject.max_len or 4096) - COUNT - 1
    return {"position_ids": spread(COUNT, max(0, top)), "attention_mask": torch.ones_like(tokens)}


def distinct(subject: ModelSubject) -> Iterator[Finding]:
    """The order of tokens matters beyond which of them is last, so some encoding is applied."""
    tokens = subject.tokens(1, 4)
    swapped = tokens[:, [1, 0, 2, 3]]
    first, got = subject.logits(tokens)[:, -1], subject.logits(swapped)[:, -1]
    if torch.allclose(first, got, rtol=0, atol=rounding(subject, first)):
        readings = subject.readings or ()
        if readings and all(type(reading.encoding).__name__ == "NoPE" for reading in readings) and depth_one(subject):
            raise NotApplicable("its config asks for no encoding")
        yield Finding("distinct", "4 tokens, the first two exchanged", "other logits of the last", "the same",
                      "no encoding is applied")  # fmt: skip


def depth_one(subject: ModelSubject) -> bool:
    """One layer without an encoding cannot tell an order; two can, by the causal mask."""
    return int(getattr(subject.config, "num_hidden_layers", 1)) == 1


def implementations(subject: ModelSubject) -> Iterator[Finding | str]:
    """Every attention implementation that the model accepts gives the same logits: whole, padded and cached."""
    tokens = subject.tokens(1, 7)
    padded, mask = _padded({3: tokens[:, :5], 0: tokens[:, :6]}, 8)
    model = subject.model()
    own = model.config._attn_implementation
    results: dict[str, dict[str, Tensor]] = {}
    try:
        for name in ("eager", "sdpa", "flex_attention"):
            refused = _refused(model, name)
            if refused:
                yield f"{name}: {refused}"
                continue
            results[name] = {
                "7 tokens": subject.logits(tokens),
                "padded on both sides": subject.logits(padded, attention_mask=mask)[mask.bool()],
            }
            if has_cache(subject):
                results[name]["cached after 3"] = cached(subject, tokens, (3, 4))
    finally:
        if model.config._attn_implementation != own:
            with quiet():
                model.set_attn_implementation(own)
    if len(results) < 2:
        raise NotApplicable("it accepts one implementation alone")
    (base, expected), *others = results.items()
    for name, got in others:
        for given, logits in expected.items():
            cause = f"{name} applies the bias, scale or mask differently"
            found = list(unequal("implementations", f"{given}, {name} against {base}", logits, got[given],
                                 rounding(subject, logits), cause))  # fmt: skip
            yield from found
            if found:
                break


def _refused(model: Any, name: str) -> str:
    if name == "flex_attention" and not torch.cuda.is_available():
        return "compiled kernels, run on CUDA only"
    try:
        with quiet():
            model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        return str(error).splitlines()[0].partition(". ")[0]
    return "" if model.config._attn_implementation == name else "cannot be set"


def _fields(config: Any) -> dict[tuple[str, ...], Any]:
    """The numbers and flags of a config that concern positions, by path."""
    keys, found = config.to_dict(), {}
    for name, value in keys.items():
        if ABOUT.search(name) and not NOT_ABOUT.search(name) and isinstance(value, bool | int | float):
            found[name,] = value
    parameters = keys.get("rope_parameters") or {}
    for name, value in parameters.items():
        block = value if isinstance(value, dict) else {name: value}
        path = (name,) if isinstance(value, dict) else ()
        for key, number in block.items():
            if isinstance(number, bool | int | float):
                found["rope_parameters", *path, key] = number
    return found


def _other(value: Any) -> Any:
    """Another value of the same kind that is still allowed."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(1, value // 2) if value > 1 else value + 1
    return value * 0.5 if value else 0.5


def _with(config: Any, path: tuple[str, ...], value: Any) -> Any:
    """A copy of the config with one field changed, made anew, so that what follows from the field follows it."""
    keys = copy.deepcopy(config.to_dict())
    inner = keys
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    made = type(config)(**keys)
    made._attn_implementation = config._attn_implementation
    return made


def fields(subject: ModelSubject) -> Iterator[Finding | str]:
    """Every field of the config that concerns positions changes the logits, or is reported as ignored."""
    tokens = subject.tokens(1, COUNT)
    options = _far(subject, tokens)
    first = subject.logits(tokens, **options)
    about = _fields(subject.config)
    if not about:
        raise NotApplicable("its config has no field about positions")
    for path, value in about.items():
        name = ".".join(path)
        try:
            with quiet():
                config = _with(subject.config, path, _other(value))
            got = subject.logits(tokens, subject.changed(config), **options)
        except Exception as error:
            yield f"{name}: {_other(value)} is refused ({type(error).__name__})"
            continue
        if not torch.equal(first, got):
            continue
        read = _reading_changes(subject, config)
        if read:
            cause = "the model does not read the field"
            yield Finding("fields", f"{name} = {_other(value)} instead of {value}", "other logits", "the same", cause)
        else:
            yield f"{name} is ignored"


def _reading_changes(subject: ModelSubject, config: Any) -> bool:
    """Whether the changed config is read as another rotation or bias than the model's.

    Temperatures are left out: some begin thousands of tokens further on.
    """
    if subject.readings is None:
        return False
    with contextlib.suppress(ValueError, TypeError):
        other = hf.describe(config.to_dict(), length=COUNT)
        pairs = [(_lasting(a.encoding), _lasting(b.encoding)) for a, b in zip(subject.readings, other, strict=True)]
        return any(len(a) != len(b) or not all(map(equal, a, b)) for a, b in pairs)
    return False


def _lasting(encoding: Encoding) -> list[Encoding]:
    return [part for part in parts(encoding) if not isinstance(part, Temperature | NoPE)]


def reading(subject: ModelSubject) -> Iterator[Finding | str]:
    """The model computes what its config is read as: with Ropewalk's tables, or its bias, the logits stay the same."""
    if subject.readings is None:
        raise NotApplicable(f"its encoding is not known: {subject.refusal}")
    tokens = subject.tokens(1, COUNT)
    options = _far(subject, tokens)
    first = subject.logits(tokens, **options)
    furthest = int(options["position_ids"].max()) if options else COUNT
    tolerance = rounding(subject, first) + angle(subject, furthest)
    replaced = _replaced(subject)
    got = subject.logits(tokens, replaced, **options)
    yield from unequal(
        "reading", "its own tables and ours", first, got, tolerance, "the config asks for another encoding"
    )


def _replaced(subject: ModelSubject) -> Any:
    model = subject.fresh()
    kinds = {type(reading.encoding).__name__ for reading in subject.readings or ()}
    if kinds == {"ALiBi"}:
        try:
            hf.patch(model)
        except ValueError as error:
            raise NotApplicable(f"its bias cannot be replaced: {error}") from error
        return model
    modules = [m for m in model.modules() if ("Rotary" in type(m).__name__ and hasattr(m, "inv_freq")) or _labelled(m)]
    if not modules:
        raise NotApplicable(f"{' and '.join(sorted(kinds))} cannot be replaced from outside")
    for module in modules:
        module.forward = _Tables(subject, module, module.forward)
    return model


def _labelled(module: Any) -> bool:
    return "Rotary" in type(module).__name__ and any(name.endswith("inv_freq") for name, _ in module.named_buffers())


class _Tables:
    """A rotary module's forward with cosines and sines of Ropewalk, in the shape of its own."""

    def __init__(self, subject: ModelSubject, module: Any, own: Any):
        self._subject, self._module, self._own = subject, module, own

    def __call__(self, x: Tensor, position_ids: Tensor | None = None, layer_type: str | None = None, **options: Any):
        given = {} if layer_type is None else {"layer_type": layer_type}
        made = self._own(x, position_ids, **given, **options)
        if not (isinstance(made, tuple) and len(made) == 2 and position_ids is not None and position_ids.ndim == 2):
            raise NotApplicable("its tables are of another form than cosines and sines of each position")
        rope = self._encoding(layer_type)
        at = rope.at(position_ids, torch.float32)
        return tuple(_shaped(ours, theirs) for ours, theirs in zip((at.cos, at.sin), made, strict=True))

    def _encoding(self, layer_type: str | None) -> Any:
        for one in self._subject.readings or ():
            if (layer_type is None or one.layer_type == layer_type) and one.rope_type is not None:
                found = turning(one.encoding)
                if found is not None:
                    return found
        raise NotApplicable(f"no layer of type {layer_type} turns")


def _shaped(ours: Tensor, theirs: Tensor) -> Tensor:
    pairs = ours.shape[-1]
    if theirs.shape[-1] == pairs:
        return ours.to(theirs.dtype)
    if theirs.shape[-1] != 2 * pairs:
        cause = f"tables of {theirs.shape[-1]} channels where the config asks for {2 * pairs}"
        raise ValueError(cause)
    interleaved = torch.equal(theirs[..., 0::2], theirs[..., 1::2])
    made = ours.repeat_interleave(2, dim=-1) if interleaved else torch.cat((ours, ours), dim=-1)
    return made.to(theirs.dtype)
