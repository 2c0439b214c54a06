"""A tiny model with a tokenizer and a text, for tests of context extension."""

import pytest
import torch

import tiny_models
from ropewalk.extension import run

TRAINED = 32
WORDS = "".join(chr(97 + (i * i + 3 * i) % 23) for i in range(400))


def save_tokenizer(folder, begin=False):
    """One token for each letter."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocab = {"<s>": 1, "<unk>": 0, **{chr(97 + i): 2 + i for i in range(26)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
    fast.save_pretrained(folder)


def tokens(text=WORDS):
    return torch.tensor([ord(c) - 95 for c in text])


@pytest.fixture
def folder(tmp_path):
    """A tiny model trained to 32 tokens, with its tokenizer, and a text."""
    tiny_models.build("llama", max_position_embeddings=TRAINED).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "text").write_text(WORDS)
    return tmp_path / "model"


def settings(folder, **asked):
    return run.prepare(str(folder), **{"to": 64, "dtype": "float32", **asked})
