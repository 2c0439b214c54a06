"""The copy task: does a trained model find a span of text again when it comes a second time?"""

import torch
import torch.nn.functional as F

from ropewalk.study import scoring
from ropewalk.study.data import Block
from ropewalk.study.scoring import Scorer
from ropewalk.study.settings import Settings

SPAN = 32


def copy_span(settings: Settings) -> tuple[int, int]:
    """Tokens of the span that is repeated, and how many of its first tokens are only its cue."""
    span = max(2, min(SPAN, settings.train_len // 8))
    return span, span // 4


def copy_distances(settings: Settings) -> list[int]:
    """Distances between the two copies: three within the training length, then the evaluation lengths, as far as the
    held-out text of one document reaches."""
    quarter, longest, span = settings.train_len // 4, settings.eval_lens[-1], copy_span(settings)[0]
    asked = {quarter, 2 * quarter, 3 * quarter, *(n for n in settings.eval_lens if n >= settings.train_len)}
    return sorted(distance for distance in asked if 2 * span <= distance <= longest)


def copy_tokens(settings: Settings, distance: int) -> int:
    """Tokens that the model reads: some text, the span, filler, the span again without its last token."""
    return distance + 2 * copy_span(settings)[0] - 1


def copy_rows(blocks: tuple[Block, ...], settings: Settings, distance: int) -> tuple[torch.Tensor, int]:
    """One row of tokens per trial, and the bytes of all scored tokens; every model gets the same rows.

    The span comes from one held-out document, what lies before and between its copies from the start of another.
    """
    span, cue = copy_span(settings)
    rows, size = [], 0
    for trial in range(settings.copy_trials):
        generator = torch.Generator().manual_seed(trial)
        source, ends = blocks[(trial + 1) % len(blocks)].tokens, blocks[(trial + 1) % len(blocks)].ends
        start = 1 + int(torch.randint(len(source) - span, (), generator=generator))
        size += int(ends[start + span - 1] - ends[start + cue - 1])
        text = blocks[trial % len(blocks)].tokens
        copied = source[start : start + span]
        rows.append(torch.cat([text[:span], copied, text[span:distance], copied]))
    return torch.stack(rows), size


@torch.inference_mode()
def copy_task(scorer: Scorer, blocks: tuple[Block, ...], settings: Settings, distance: int) -> dict:
    """How well a span of text is predicted when it comes a second time, `distance` tokens after the first.

    Scored are the tokens after the cue, in the second copy (`nats`, `accuracy`) and, for comparison, in the first.
    """
    span, cue = copy_span(settings)
    rows, size = copy_rows(blocks, settings, distance)
    nats, hits = torch.zeros(2, dtype=torch.float64), [0, 0]
    for row in rows.split(max(1, scoring.TOKENS_AT_ONCE // rows.size(1))):
        hidden = scorer.hidden(row[:, :-1])
        for index, begin in enumerate((span, span + distance)):
            scored = slice(begin + cue, begin + span)
            logits = scorer.logits(hidden[:, scored.start - 1 : scored.stop - 1]).cpu()
            targets = row[:, scored]
            nats[index] += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").double().sum()
            hits[index] += int((logits.argmax(-1) == targets).sum())
    tokens = len(rows) * (span - cue)
    return {
        "trials": len(rows),
        "span": span,
        "cue": cue,
        "tokens": tokens,
        "bytes": size,
        "nats": nats[1].item(),
        "accuracy": hits[1] / tokens,
        "first_nats": nats[0].item(),
        "first_accuracy": hits[0] / tokens,
    }
