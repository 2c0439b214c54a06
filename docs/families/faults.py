"""The faults that the checker found, each in a few lines of transformers and torch alone.

    python docs/families/faults.py            all of them
    python docs/families/faults.py dory       those of one family

A script prints what it saw; the word FAULT stands in it if the fault is there.
"""

import sys
import warnings

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

WORDS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, **WORDS}


def small(family, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)
    return model


def tokens(count):
    return torch.randint(3, 60, (1, count), generator=torch.Generator().manual_seed(0))


def said(difference, words):
    return f"{'FAULT' if not difference < 1e-3 else 'fine'}: {words} {difference:.2g}"


@torch.no_grad()
def cast_rounds_frequencies(family="llama"):
    """`model.to(torch.bfloat16)` rounds inv_freq; loading in bfloat16 does not."""
    model = small(family)
    before = {name: buffer.double() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model.to(torch.bfloat16)
    after = {name: buffer.double() for name, buffer in model.named_buffers() if name in before}
    worst = max(float((4000 * (after[name] - before[name])).abs().max()) for name in before)
    return said(worst, "over 4000 tokens of distance the angle of a pair is off by, in radians:")


@torch.no_grad()
def padding_makes_eager_float64_nan(family="llama"):
    """A float64 model with eager attention gives NaN for every token of a left-padded row."""
    model = small(family, torch.float64)
    model.set_attn_implementation("eager")
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    logits = model(input_ids=tokens(5), attention_mask=mask).logits[0, 2:]
    return said(float(logits.isnan().double().mean()), "share of logits of real tokens that are NaN:")


def cached(model, ids, sizes):
    outputs, cache, start = [], None, 0
    for size in sizes:
        out = model(input_ids=ids[:, start : start + size], past_key_values=cache, use_cache=True)
        cache, start = out.past_key_values, start + size
        outputs.append(out.logits)
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def moshi_sees_beyond_its_window_in_one_pass():
    """Moshi in one pass attends to all tokens before, with a cache to those of its sliding window."""
    model, ids = small("moshi", sliding_window=6), tokens(9)
    gap = (model(input_ids=ids).logits - cached(model, ids, (1,) * 9)).abs()[0].amax(-1)
    return said(float(gap[6:].max()), f"logits of tokens 6 to 8 differ (0 to 5: {gap[:6].max():.1g}) by")


@torch.no_grad()
def dory_decodes_other_logits_than_one_pass():
    """Dory decodes other logits than one pass gives, from the second token on; in float64, so it is no rounding."""
    model, ids = small("dory", torch.float64, num_hidden_layers=72), tokens(6)
    gap = (model(input_ids=ids).logits - cached(model, ids, (1,) * 6)).abs()
    return said(float(gap.max()), "logits of 6 tokens, one by one, differ by")


@torch.no_grad()
def jamba_goes_on_with_two_tokens_as_if_nothing_came_before():
    """Jamba's recurrent layers forget their state when a cached prompt goes on with more than one token at once."""
    model, ids = small("jamba", num_hidden_layers=8, num_experts=2, num_key_value_heads=2), tokens(3)
    whole = model(input_ids=ids).logits
    one, two = ((whole - cached(model, ids, sizes)).abs().max() for sizes in ((1, 1, 1), (1, 2)))
    return said(float(two), f"logits in chunks of 1 and 2 (one by one: {one:.1g}) differ by")


@torch.no_grad()
def padding_moves_the_blocks_of_deepseek_v4():
    """DeepSeek-V4 compresses tokens in blocks counted from the start of the row, so left padding changes what is in
    one block with what."""
    return padded_on_the_left(small("deepseek_v4", num_hidden_layers=4), 9)


@torch.no_grad()
def padding_is_read_by_recurrent_gemma():
    """RecurrentGemma's recurrent layers read the padding on the left."""
    return padded_on_the_left(small("recurrent_gemma", lru_width=64, num_hidden_layers=3), 5)


@torch.no_grad()
def padding_changes_roformer():
    """RoFormer as a decoder gives real tokens other logits after padding on the left, although it is told by the mask
    and its rotation is relative."""
    return padded_on_the_left(small("roformer", is_decoder=True, embedding_size=64), 5)


def padded_on_the_left(model, count):
    ids = tokens(count)
    mask = torch.tensor([[0] + [1] * count])
    padded = model(input_ids=torch.cat((ids[:, :1], ids), dim=1), attention_mask=mask).logits[:, 1:]
    return said(float((model(input_ids=ids).logits - padded).abs().max()), "logits of real tokens change by")


FAULTS = (
    cast_rounds_frequencies,
    padding_makes_eager_float64_nan,
    moshi_sees_beyond_its_window_in_one_pass,
    dory_decodes_other_logits_than_one_pass,
    jamba_goes_on_with_two_tokens_as_if_nothing_came_before,
    padding_moves_the_blocks_of_deepseek_v4,
    padding_is_read_by_recurrent_gemma,
    padding_changes_roformer,
)


def main(only=""):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for fault in FAULTS:
        if only in fault.__name__:
            print(f"{fault.__name__}: {fault()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2])
