"""A study's tokens: training text in one row, whole documents held out, and a sampler without state."""

import dataclasses
import hashlib
import pathlib
import re

import torch
from torch import Tensor

from ropewalk.errors import message
from ropewalk.study import corpus
from ropewalk.study.settings import Settings

# Windows of training text needed before training is more than memorising
TRAIN_WINDOWS = 8


@dataclasses.dataclass(frozen=True)
class Block:
    """The first tokens of one held-out document; `ends[i]` is the byte of the document at which token i ends."""

    id: str
    tokens: Tensor
    ends: Tensor


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The text of a study as tokens, split by whole documents."""

    name: str
    bytes: int
    documents: int
    fingerprint: str
    vocab_size: int
    train: Tensor
    held_out: tuple[Block, ...]

    def to_json(self) -> dict:
        """What identifies the text, for study.json."""
        return {
            "name": self.name,
            "bytes": self.bytes,
            "documents": self.documents,
            "fingerprint": self.fingerprint,
            "held_out": [block.id for block in self.held_out],
        }


NO_UTF8 = re.compile("[\udc80-\udcff]")


class Bytes:
    """The default tokenizer: a token is a byte."""

    vocab_size = 256

    def encode(self, text: bytes) -> tuple[Tensor, Tensor]:
        """Tokens, and the byte at which each ends."""
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        return tokens, torch.arange(1, len(text) + 1)


class FromFile:
    """A tokenizer in the JSON format of the `tokenizers` library."""

    def __init__(self, path: str):
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                f"tokenizer must be byte without the `tokenizers` library, got {path!r}\n"
                "hint: pip install 'ropewalk[text]'"
            ) from error
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the library raises bare Exception for every unreadable file
            raise ValueError(
                message("tokenizer", "byte or a JSON file of the tokenizers library", f"{path!r} ({error})")
            ) from error
        # files from a hub often say how to cut and fill rows for another purpose
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1  # ids may have holes

    def encode(self, text: bytes) -> tuple[Tensor, Tensor]:
        """Tokens, and the byte at which each ends; a character that is split counts with its first token."""
        characters = text.decode(errors="surrogateescape")  # a byte that is no UTF-8 becomes one character
        encoded = self.tokenizer.encode(NO_UTF8.sub("\ufffd", characters), add_special_tokens=False)
        sizes = [1 if NO_UTF8.match(character) else len(character.encode()) for character in characters]
        sizes = torch.tensor(sizes, dtype=torch.int64)
        ends_at = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        last = torch.tensor([end for _, end in encoded.offsets], dtype=torch.int64)
        ends = ends_at[last]
        return torch.tensor(encoded.ids, dtype=torch.int32), ends.cummax(0).values if len(ends) else ends


def tokenizer(name: str) -> Bytes | FromFile:
    """`byte`, or a file of the `tokenizers` library."""
    return Bytes() if name == "byte" else FromFile(name)


def load(settings: Settings) -> Corpus:
    """Read, tokenize and split the text that the settings name.

    Raises:
        ValueError: when the text is too short for the asked lengths; the message names the length that would fit.
    """
    documents = corpus.read(settings.data)
    digest = hashlib.sha256()
    for name, text in documents.items():
        digest.update(f"{name}\0{hashlib.sha256(text).hexdigest()}\n".encode())
    encoder = tokenizer(settings.tokenizer)
    if settings.tokenizer != "byte":
        digest.update(pathlib.Path(settings.tokenizer).read_bytes())
    encoded = {name: encoder.encode(text) for name, text in documents.items()}
    train, held_out = split_or_refuse(encoded, settings)
    return Corpus(
        settings.data,
        sum(map(len, documents.values())),
        len(documents),
        digest.hexdigest()[:16],
        encoder.vocab_size,
        train,
        held_out,
    )


def split_or_refuse(encoded: dict[str, tuple[Tensor, Tensor]], settings: Settings):
    """`split`, or a ValueError that names the longest evaluation length for which the text suffices."""
    longest = settings.eval_lens[-1]
    found = split(encoded, longest, settings.documents, settings.train_len)
    if found is not None:
        return found
    shorter = {n for n in settings.eval_lens if n < longest}
    shorter |= {longest >> halvings for halvings in range(1, longest.bit_length())}
    fits = (n for n in sorted(shorter, reverse=True) if n >= 8 and n % 4 == 0)
    fitting = next((n for n in fits if split(encoded, n, settings.documents, settings.train_len) is not None), 0)
    total = sum(len(tokens) for tokens, _ in encoded.values())
    if fitting < 8:
        raise ValueError(
            message(
                "data",
                f"long enough to hold out {settings.documents} documents beside {TRAIN_WINDOWS} windows of "
                f"train_len = {settings.train_len}",
                f"{total} tokens in {len(encoded)} documents",
                hint="a longer text, fewer --documents or a smaller --train-length",
            )
        )
    lengths = sorted({n for n in settings.eval_lens if n <= fitting and fitting % n == 0} | {fitting})
    raise ValueError(
        message(
            "eval_lens",
            f"at most {fitting} for this text ({total} tokens, {settings.documents} documents held out)",
            longest,
            hint=f"--eval-lengths {','.join(map(str, lengths))}",
        )
    )


def split(encoded, longest: int, documents: int, train_len: int) -> tuple[Tensor, tuple[Block, ...]] | None:
    """Training tokens and held-out blocks of `longest` + 1 tokens, or None where the text is too short for them.

    A document is held out whole, by the md5 of its name, with everything in its `family`.  A text that is a single
    document is first cut into parts of one block each.  At least as much text is left for training as is held out.
    """
    needed = longest + 1
    if len(encoded) == 1:
        [(name, only)] = encoded.items()
        encoded = parts(name, only, needed)
    families: dict[str, list[str]] = {}
    for name in encoded:
        families.setdefault(family(name), []).append(name)
    order = sorted(families, key=lambda name: hashlib.md5(name.encode()).hexdigest())
    blocks, taken = [], set()
    for group in order:
        long_enough = [name for name in families[group] if len(encoded[name][0]) >= needed]
        if long_enough and len(blocks) < documents:
            tokens, ends = encoded[long_enough[0]]
            blocks.append(Block(long_enough[0], tokens[:needed].long(), ends[:needed]))
            taken.add(group)
    rest = [encoded[name][0] for group in families if group not in taken for name in families[group]]
    left = sum(map(len, rest))
    if len(blocks) < documents or left < max(documents * needed, TRAIN_WINDOWS * train_len + 1):
        return None
    return torch.cat(rest), tuple(blocks)


def parts(name: str, encoded: tuple[Tensor, Tensor], size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """One document cut into parts of `size` tokens, each with its own byte count."""
    tokens, ends = encoded
    cut = {}
    for index, start in enumerate(range(0, len(tokens), size)):
        before = ends[start - 1] if start else 0
        cut[f"{name}#{index:06d}"] = (tokens[start : start + size], ends[start : start + size] - before)
    return cut


def family(name: str) -> str:
    """Names of one content share a family and stay on one side of the split.

    >>> family("_pydecimal.py"), family("asyncio/unix_events.py"), family("_weakrefset.py")
    ('decimal.py', 'asyncio/events.py', 'weakrefset.py')
    """
    folder, slash, file = name.rpartition("/")
    file = re.sub(r"^(_py|_+)(?=[a-z])", "", file)
    if folder == "asyncio":
        file = re.sub(r"^\w+_events\.py$", "events.py", file)
    return folder + slash + file


def batch(train: Tensor, seed: int, step: int, batch_size: int, train_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step, a function of (seed, step) alone: equal for every encoding, and resumable."""
    number = hashlib.md5(f"{seed}/{step}".encode()).digest()[:7]
    generator = torch.Generator().manual_seed(int.from_bytes(number, "big"))
    starts = torch.randint(len(train) - train_len, (batch_size, 1), generator=generator)
    rows = train[starts + torch.arange(train_len + 1)].long()
    return rows[:, :-1], rows[:, 1:]
