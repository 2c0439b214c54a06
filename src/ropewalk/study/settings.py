"""What determines the results of a study: one frozen record, saved as JSON beside them."""

import dataclasses
import hashlib
import json
from typing import Any

from ropewalk.errors import require_device

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that results depend on, besides the machine and the versions of its software.

    Lengths are in tokens, learning rates per step; `documents` held-out documents feed the headline,
    the first `control_documents` of them feed the controls.  `cost_seconds` bounds the measurement of what
    attention costs with each encoding; 0 leaves it out.
    """

    encodings: tuple[str, ...] = ("rotary", "alibi", "rotary+alibi")
    seeds: tuple[int, ...] = (0,)
    data: str = "stdlib"
    tokenizer: str = "byte"
    train_len: int = 256
    eval_lens: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    steps: int = 550
    batch_size: int = 8
    model_dim: int = 128
    num_layers: int = 3
    num_heads: int = 4
    warmup_steps: int = 55
    matrix_rate: float = 0.02
    vector_rate: float = 0.002
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    documents: int = 12
    control_documents: int = 6
    copy_trials: int = 24
    cost_seconds: float = 12.0
    dtype: str = "auto"
    device: str = "cpu"

    def __post_init__(self):
        _check(self)

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.model_dim // self.num_heads

    def replace(self, **changes) -> "Settings":
        """The same settings with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict:
        """Plain JSON values; `from_json` is its exact inverse."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: dict) -> "Settings":
        """Settings from `to_json`'s values; unknown or missing names are refused."""
        known = {field.name for field in dataclasses.fields(cls)}
        wrong = sorted(set(values) ^ known)
        if wrong:
            raise ValueError(f"settings must have exactly the known fields, got a difference in {', '.join(wrong)}")
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**fields)

    def hash(self) -> str:
        """Twelve hexadecimal digits that name these settings."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def difference(a: Settings, b: Settings) -> dict[str, tuple]:
    """The fields in which two settings differ, with both values.

    >>> difference(Settings(), Settings(steps=10))
    {'steps': (550, 10)}
    """
    return {
        field.name: (getattr(a, field.name), getattr(b, field.name))
        for field in dataclasses.fields(Settings)
        if getattr(a, field.name) != getattr(b, field.name)
    }


def customize(
    base: Settings,
    *,
    train_len: int | None = None,
    eval_lens: tuple[int, ...] | None = None,
    steps: int | None = None,
    documents: int | None = None,
    **others,
) -> Settings:
    """`base` with what a user asked for (None: nothing), and what follows from it.

    Evaluation lengths keep their ratio to the training length, warm-up is at most a tenth of the steps, and controls
    use at most all documents.

    >>> customize(Settings(), train_len=128, steps=200).eval_lens
    (128, 256, 512, 1024, 2048)
    """
    changes = {name: value for name, value in others.items() if value is not None}
    if train_len is not None:
        changes["train_len"] = train_len
        eval_lens = eval_lens or tuple(length * train_len // base.train_len for length in base.eval_lens)
    if eval_lens is not None:
        changes["eval_lens"] = eval_lens
    if steps is not None:
        changes |= {"steps": steps, "warmup_steps": min(base.warmup_steps, max(1, steps // 10))}
    if documents is not None:
        changes |= {"documents": documents, "control_documents": min(base.control_documents, documents)}
    return base.replace(**changes)


def cell_name(encoding: str, seed: int) -> str:
    """The folder of one trained model: an encoding and a seed.

    >>> cell_name("my/module:Class", 2)
    'my_module_Class-seed2'
    """
    return f"{encoding.replace('/', '_').replace(':', '_')}-seed{seed}"


def preset(name: str) -> Settings:
    """The settings behind a preset's name: smoke (seconds), quick (minutes) or thorough (an hour or more)."""
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]


POSITIVE = (
    "train_len",
    "steps",
    "batch_size",
    "model_dim",
    "num_layers",
    "num_heads",
    "documents",
    "control_documents",
    "copy_trials",
)


def _check(settings: Settings) -> None:
    for name in POSITIVE:
        value = getattr(settings, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    for name in ("encodings", "seeds", "eval_lens"):
        values = getattr(settings, name)
        if not values or len(set(values)) != len(values):
            raise ValueError(f"{name} must be at least one value and all different, got {list(values)}")
    names = [cell_name(encoding, 0) for encoding in settings.encodings]
    if len(set(names)) != len(names):
        raise ValueError(f"encodings must have different folder names, got {names}")
    if settings.control_documents > settings.documents:
        raise ValueError(
            f"control_documents must be at most documents = {settings.documents}, got {settings.control_documents}"
        )
    if settings.model_dim % settings.num_heads:
        raise ValueError(f"model_dim must be a multiple of num_heads = {settings.num_heads}, got {settings.model_dim}")
    if settings.dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"dtype must be auto, float32 or bfloat16, got {settings.dtype!r}")
    require_device(settings.device)
    _check_lengths(settings)


def _check_lengths(settings: Settings) -> None:
    if settings.train_len < 8:
        raise ValueError(f"train_len must be at least 8 tokens, got {settings.train_len}")
    if list(settings.eval_lens) != sorted(settings.eval_lens):
        raise ValueError(f"eval_lens must be in rising order, got {list(settings.eval_lens)}")
    for length in settings.eval_lens:
        if length < 8 or length % 4 or settings.eval_lens[-1] % length:
            raise ValueError(
                f"eval_lens must be multiples of 4 that divide the longest ({settings.eval_lens[-1]}), got {length}\n"
                "hint: only then every length scores the same tokens; powers of two do, for example 256,512,1024"
            )


PRESETS = {
    "smoke": Settings(
        encodings=("rotary", "alibi"),
        train_len=32,
        eval_lens=(32, 64, 128),
        steps=30,
        batch_size=4,
        model_dim=32,
        num_layers=2,
        num_heads=2,
        warmup_steps=5,
        documents=4,
        control_documents=2,
        copy_trials=4,
        cost_seconds=2.0,
    ),
    "quick": Settings(),
    "thorough": Settings(
        encodings=("rotary", "alibi", "rotary+alibi", "nope", "sinusoidal", "learned"),
        seeds=(0, 1, 2),
        steps=2000,
        num_layers=4,
        warmup_steps=100,
        eval_lens=(256, 512, 1024, 2048, 4096, 8192),
        documents=16,
        control_documents=8,
        copy_trials=32,
    ),
}
