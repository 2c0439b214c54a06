"""Laws of a model on how its tokens are handed in: at once or by and by, alone or with others."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ropewalk._shapes import Tensor
from ropewalk.check.models.build import ModelSubject, quiet
from ropewalk.check.models.compare import positions_given, rounding, shortest, unequal
from ropewalk.check.verdict import Finding, NotApplicable

LENGTHS = (2, 3, 4, 6, 9)
REAL = 5
CACHES = ("cache", "past_key_values", "cache_params")  # its name in different releases and families


def splits(seq_len: int) -> list[tuple[int, ...]]:
    """All ways to cut a sequence in two, one token at a time, and one uneven way."""
    found = [(first, seq_len - first) for first in range(1, seq_len)] + [(1,) * seq_len]
    return found if seq_len < 4 else [*found, (2, 1, seq_len - 3)]


def cached(subject: ModelSubject, tokens: Tensor, sizes: tuple[int, ...], cache: Any = None, **options: Any) -> Tensor:
    """Logits of tokens fed in chunks of these sizes, through the model's own cache or the one given."""
    outputs, start = [], 0
    for size in sizes:
        with torch.no_grad(), quiet():
            given = {_cache_name(subject): cache, "use_cache": True, **options}
            out = subject.model()(input_ids=tokens[:, start : start + size], **given)
            cache = _cache_of(out)
        start += size
        outputs.append(out.logits.double())
    return torch.cat(outputs, dim=1)


def has_cache(subject: ModelSubject) -> bool:
    """Whether the model hands out what it goes on with."""
    with torch.no_grad(), quiet():
        return _cache_of(subject.model()(input_ids=subject.tokens(1, 2), use_cache=True)) is not None


def _cache_of(out: Any) -> Any:
    return next((out[name] for name in CACHES if name in out and out[name] is not None), None)


def _cache_name(subject: ModelSubject) -> str:
    """What the model calls the cache that it is handed."""
    known = inspect.signature(subject.model().forward).parameters
    return next((name for name in CACHES if name in known), "past_key_values")


def _caches(subject: ModelSubject) -> dict[str, Callable[[], Any]]:
    from transformers import StaticCache

    kinds: dict[str, Callable[[], Any]] = {"its own cache": lambda: None}
    if getattr(subject.model(), "_can_compile_fullgraph", False):
        kinds["a StaticCache of 12"] = lambda: StaticCache(config=subject.config, max_cache_len=12)
    return kinds


def decoding(subject: ModelSubject) -> Iterator[Finding | str]:
    """Any way to feed a sequence through a cache gives the logits of one pass."""
    if not has_cache(subject):
        raise NotApplicable("it has no cache")
    for name, make in _caches(subject).items():

        def fails(seq_len: int, name: str = name, make: Callable[[], Any] = make) -> list[Finding]:
            tokens = subject.tokens(1, seq_len)
            whole = subject.logits(tokens)
            for sizes in splits(seq_len):
                got = cached(subject, tokens, sizes, make())
                cause = "a cached step uses other positions, another bias or another mask than one pass"
                given = f"{seq_len} tokens in chunks of {sizes} through {name}"
                found = list(unequal("decoding", given, whole, got, rounding(subject, whole), cause))
                if found:
                    return found
            return []

        yield from shortest(fails, LENGTHS)
    if len(_caches(subject)) == 1:
        yield "only its own cache: the model does not support a static one"


def _padded(rows: dict[int, Tensor], width: int) -> tuple[Tensor, Tensor]:
    """Rows with so many tokens of junk before them, filled up to `width` with junk; and which tokens are real."""
    tokens, mask = [], []
    for before, real in rows.items():
        after = width - before - real.shape[1]
        row = torch.cat((real[:, :1].expand(1, before), real, real[:, -1:].expand(1, after)), dim=1)
        tokens.append(row)
        mask.append(torch.tensor([[0] * before + [1] * real.shape[1] + [0] * after]))
    return torch.cat(tokens), torch.cat(mask)


def _row_by_row(
    subject: ModelSubject, law: str, rows: dict[int, Tensor], got: Tensor, given: str, cause: str, kind: str = ""
) -> Iterator[Finding]:
    for row, (before, real) in enumerate(rows.items()):
        alone = subject.logits(real)
        part = got[row : row + 1, before : before + real.shape[1]]
        what = f"{given}: row {row}, {before} tokens of padding before {real.shape[1]}"
        found = list(unequal(law, what, alone, part, rounding(subject, alone), cause, kind))
        yield from found
        if found:
            return


def padding(subject: ModelSubject) -> Iterator[Finding | str]:
    """Padding on the left, on the right or mixed changes nothing for real tokens; positions come from the mask."""
    if "attention_mask" not in inspect.signature(subject.model().forward).parameters:
        raise NotApplicable("the model takes no attention_mask")
    real = subject.tokens(1, REAL)
    cause = "padding is attended, or counted as positions"
    cases = {"right": {0: real}, "left": {1: real}, "left, longer": {3: real}, "mixed": {3: real, 0: real, 2: real}}
    for side, rows in cases.items():
        tokens, mask = _padded(rows, REAL + 3)
        found = list(_row_by_row(subject, "padding", rows, subject.logits(tokens, attention_mask=mask),
                                 f"{side}, attention_mask alone", cause))  # fmt: skip
        if found and subject.takes_positions:
            where = (mask.cumsum(-1) - 1).clamp(min=0)
            got = subject.logits(tokens, attention_mask=mask, position_ids=where)
            again = list(_row_by_row(subject, "padding", rows, got, f"{side}, mask and position_ids", cause))
            if not again:
                hint = "positions are not taken from the mask: without position_ids each pad moves the tokens"
                found = [Finding(f.law, f.input, f.expected, f.got, hint, f.kind) for f in found]
        yield from found
        if found:
            return


def generation(subject: ModelSubject) -> Iterator[Finding]:
    """A row of a left-padded batch generates what it generates alone, with the same logits."""
    if not hasattr(subject.model(), "generate"):
        raise NotApplicable("the model does not generate")
    short, long = subject.tokens(1, 2), subject.tokens(1, REAL, seed=1)
    tokens, mask = _padded({REAL - 2: short, 0: long}, REAL)
    together = _generated(subject, tokens, mask)
    for row, real in enumerate((short, long)):
        alone = _generated(subject, real, torch.ones_like(real))
        for step, (expected, got) in enumerate(zip(alone, together, strict=True)):
            given = f"row of {real.shape[1]} tokens, padded on the left to {REAL}, step {step + 1} of generate"
            cause = "positions, bias or mask of a decode step ignore the padding"
            tolerance = rounding(subject, expected)
            found = list(unequal("generation", given, expected[0], got[row], tolerance, cause))
            yield from found
            if found:
                return


def _generated(subject: ModelSubject, tokens: Tensor, mask: Tensor) -> list[Tensor]:
    """Logits of each step, (batch, vocabulary), always going on with token 5."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Always(LogitsProcessor):
        def __call__(self, input_ids, scores):  # type: ignore[override]
            forced = torch.full_like(scores, -torch.inf)
            forced[:, 5] = 0.0
            return forced

    with torch.no_grad(), quiet():
        made = subject.model().generate(
            tokens, attention_mask=mask, max_new_tokens=4, do_sample=False, output_logits=True, eos_token_id=None,
            pad_token_id=0, return_dict_in_generate=True, logits_processor=LogitsProcessorList([Always()]),
        )  # fmt: skip
    return [step.double() for step in made.logits]


def packing(subject: ModelSubject) -> Iterator[Finding | str]:
    """Documents in one row, with positions that restart and a mask between them, give what they give alone."""
    positions_given(subject)
    kinds = getattr(subject.config, "layer_types", None) or ()
    if "linear_attention" in kinds or any(isinstance(module, torch.nn.Conv1d) for module in subject.model().modules()):
        raise NotApplicable("it has recurrent layers, which read on from one document to the next")
    first, second = subject.tokens(1, 3), subject.tokens(1, 2, seed=1)
    tokens = torch.cat((first, second), dim=1)
    where = torch.tensor([[0, 1, 2, 0, 1]])
    document = torch.tensor([0, 0, 0, 1, 1])
    mask = (document[:, None] == document) & torch.ones(5, 5, dtype=torch.bool).tril()
    if subject.model().config._attn_implementation == "eager":  # which adds the mask that it is given
        mask = torch.zeros(5, 5, dtype=subject.dtype).masked_fill(~mask, torch.finfo(subject.dtype).min)
    alone = torch.cat((subject.logits(first), subject.logits(second)), dim=1)
    tolerance = rounding(subject, alone)
    try:
        got = subject.logits(tokens, position_ids=where, attention_mask=mask[None, None])
    except Exception as error:  # whatever a model says to a mask of four axes
        yield f"a mask of four axes is refused ({type(error).__name__})"
    else:
        cause = "positions or masks of packed documents are counted through the row"
        yield from unequal("packing", "3 and 2 tokens with a mask of four axes", alone, got, tolerance, cause)
        bare = subject.logits(tokens, position_ids=where)
        isolated = bool((bare - alone).abs().max() <= tolerance)
        yield f"position_ids that restart {'keep documents apart' if isolated else 'alone do not keep documents apart'}"
        return
    bare = subject.logits(tokens, position_ids=where)
    if (bare - alone).abs().max() > tolerance:
        raise NotApplicable("the model offers no way to keep documents apart")


def neighbours(subject: ModelSubject) -> Iterator[Finding]:
    """A row of a batch gives what it gives alone, whatever the other rows hold and wherever they stand."""
    row, other = subject.tokens(1, 6), subject.tokens(1, 6, seed=1)
    alone = subject.logits(row)
    tolerance = rounding(subject, alone)
    together = subject.logits(torch.cat((row, other)))[:1]
    cause = "rows of a batch are mixed"
    yield from unequal("neighbours", "6 tokens beside 6 others", alone, together, tolerance, cause, "K05")
    if subject.takes_positions:
        far = 2 * (subject.max_len or 4096)
        where = torch.stack((torch.arange(6), torch.arange(6) + far))
        options = {"attention_mask": torch.ones(2, 6, dtype=torch.long), "position_ids": where}
        try:
            together = subject.logits(torch.cat((row, other)), **options)[:1]
        except (IndexError, ValueError, RuntimeError):  # positions beyond the end, refused
            return
        given = f"6 tokens beside 6 others at position {far}"
        cause = "the longest row of a batch decides the frequencies of all"
        yield from unequal("neighbours", given, alone, together, tolerance, cause)


def causality(subject: ModelSubject) -> Iterator[Finding]:
    """A later token changes nothing for earlier ones."""
    tokens = subject.tokens(1, 8)
    changed = torch.cat((tokens[:, :5], subject.tokens(1, 3, seed=9)), dim=1)
    before, after = subject.logits(tokens)[:, :5], subject.logits(changed)[:, :5]
    yield from unequal("causality", "8 tokens, the last 3 changed", before, after, rounding(subject, before),
                       "a later token is attended")  # fmt: skip
