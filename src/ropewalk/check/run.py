"""`check(target)`: which laws a target has to keep, and what each of them says."""

import copy
import dataclasses
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ropewalk import naming
from ropewalk.check.laws import LAWS
from ropewalk.check.libraries import adapt
from ropewalk.check.outside import check_callable, laws_of
from ropewalk.check.subject import Subject
from ropewalk.check.verdict import Law, Report, Verdict
from ropewalk.encodings import Encoding, Learned
from ropewalk.errors import message, require, require_count

DTYPES = ("float32", "float64", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A target made ready: what it is called, what the laws are handed, and the laws."""

    name: str
    subject: Any
    laws: tuple[Law, ...]


def check(
    target: Any,
    *,
    laws: Iterable[str] | None = None,
    dtypes: Sequence[str | torch.dtype] = DTYPES,
    compiled: bool = False,
    num_heads: int | None = None,
    head_dim: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Does `target` keep the laws of positions?  Behaviour alone decides.

    Args:
        target: an encoding, its class, its name ("rotary+alibi", "module:Class") or a function that builds it; an
            adapter around a stranger's function (`Rotation`, `Bias`, `AttentionFunction`), or a rotary module that is
            recognised; a causal model of transformers, its class, or its config (object, dict, folder, file).
        laws: names of those to apply; all by default.
        dtypes: of models: the one that laws run in, then those that are compared with it; names or torch dtypes.
        compiled: apply the laws that compile, too.
        num_heads, head_dim: to build an encoding for, where its name or class leaves them open.
        progress: called with each law's name before it runs.

    Raises:
        ValueError, TypeError: the target is none of these or cannot be built, or a law is not known.

    >>> check("alibi", laws=["slopes", "bias"]).passed
    True
    """
    plan = plan_for(target, dtypes=dtypes, num_heads=num_heads, head_dim=head_dim)
    chosen = _chosen(plan, laws, compiled)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the inputs are tiny: threads would only wait for each other
    try:
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers go on as if nothing had been drawn
            return Report(plan.name, tuple(_applied(law, plan.subject, progress) for law in chosen))
    finally:
        torch.set_num_threads(threads)


def _applied(law: Law, subject: Any, progress: Callable[[str], None] | None) -> Verdict:
    if progress is not None:
        progress(law.name)
    return law.verdict(subject)


def _chosen(plan: Plan, wanted: Iterable[str] | None, compiled: bool) -> list[Law]:
    if wanted is None:
        return [law for law in plan.laws if compiled or not law.compiled]
    names = list(dict.fromkeys(wanted))
    known = {law.name: law for law in plan.laws}
    for name in names:
        require(name in known, "laws", f"among {', '.join(known)}", repr(name))
    require(names != [], "laws", "at least one", names)
    return [known[name] for name in names]


class BoundLaw:
    """A law and the target that has to keep it: call it in a test."""

    def __init__(self, law: Law, plan: Plan):
        self._law, self._plan = law, plan
        self.__name__ = law.name.replace(" ", "-")

    def __repr__(self) -> str:
        return f"{self._law.name} of {self._plan.name}"

    def __call__(self) -> None:
        """AssertionError if the law is broken; a skipped test if it does not apply."""
        verdict = self._law.verdict(self._plan.subject)
        if verdict.status == "not applicable":
            import unittest  # which takes its time, and is needed by tests alone

            raise unittest.SkipTest(verdict.reason)
        if verdict.status == "fail":
            raise AssertionError(f"{verdict.sentence}\n" + "\n".join(map(str, verdict.findings)))


def laws_for(target: Any, *, compiled: bool = False, **options: Any) -> list[BoundLaw]:
    """The laws of a target, each a test: `@pytest.mark.parametrize("law", laws_for(target))`, then `law()`.

    Args:
        target, compiled, options: as in `check`.
    """
    plan = plan_for(target, **options)
    return [BoundLaw(law, plan) for law in _chosen(plan, None, compiled)]


def plan_for(
    target: Any,
    *,
    dtypes: Sequence[str | torch.dtype] = DTYPES,
    num_heads: int | None = None,
    head_dim: int | None = None,
) -> Plan:
    """What `check` would do; arguments and errors as there."""
    found = tuple(_dtype(given) for given in dtypes)
    require(len(found) > 0, "dtypes", "at least one", dtypes)
    for size, given in (("num_heads", num_heads), ("head_dim", head_dim)):
        if given is not None:
            require_count(given, size)
    name = target if isinstance(target, str) else ""
    if isinstance(target, str) and not os.path.exists(target):
        target = _named(target)
    adapter = adapt(target)
    if adapter is not None:
        check_callable(adapter)
        return Plan(name or adapter.name, adapter, laws_of(adapter))
    if _is_model(target):
        from ropewalk.check.models import LAWS_OF_MODELS, ModelSubject

        subject = ModelSubject(target, found[0], found)
        return Plan(subject.name, subject, LAWS_OF_MODELS)
    make = _maker(target, {"num_heads": num_heads or 8, "head_dim": head_dim or 16})
    made = None if make is None else make()
    if make is None or made is None:
        hint = "ropewalk.check.Rotation(f, head_dim), Bias(f, num_heads) and AttentionFunction(f, ...) adapt functions"
        kinds = "an encoding, an adapter, or a causal model of transformers or its config"
        raise TypeError(message("target", kinds, repr(target) if name else type(target).__name__, hint))
    return Plan(name or " ".join(str(made).split()), _subject(make, made, num_heads, head_dim), LAWS)


def _dtype(given: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, given, None) if isinstance(given, str) else given
    good = isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1
    require(good, "dtypes", "of float32, float64, bfloat16, float16", repr(given))
    assert isinstance(found, torch.dtype)
    return found


def _named(name: str) -> Any:
    """What `module:attribute` is, or a function that builds the encoding called `name`."""
    if ":" in name and "+" not in name:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(message("target", "importable as module:name", f"{name!r} ({error})")) from error
    unknown = [part for part in name.split("+") if ":" not in part and part not in naming.names()]
    known = f"{', '.join(naming.names())}, a sum of them, module:name, or the path of a config or a checkpoint"
    require(not unknown, "target", known, repr(name))
    return lambda **sizes: naming.build(name, **sizes)


def _is_model(target: Any) -> bool:
    if isinstance(target, (str, os.PathLike, Mapping)):
        return True
    kind = target if isinstance(target, type) else type(target)
    return any(base.__name__ in ("PreTrainedModel", "PretrainedConfig", "PreTrainedConfig") for base in kind.__mro__)


def _maker(target: Any, sizes: dict[str, int]) -> Callable[[], Encoding | None] | None:
    """A function that builds a fresh encoding, equal each time; None if `target` builds none."""
    if isinstance(target, Encoding):
        return lambda: copy.deepcopy(target)
    if isinstance(target, nn.Module) or not callable(target):
        return None
    standard = {**sizes, "model_dim": sizes["num_heads"] * sizes["head_dim"], "num_positions": 700}
    parameters = inspect.signature(target).parameters.values()
    own = getattr(target, "__init__", None) is not nn.Module.__init__  # which names **kwargs and takes none
    every = own and any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: standard[p.name] for p in parameters if p.name in standard}
    wanted = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if any(p.name not in named for p in wanted):
        return None  # it wants what no encoding is built from

    def make() -> Encoding | None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)  # what is learned starts equal
            try:
                made = target(**(standard if every else named))
            except Exception as error:
                found = f"{type(error).__name__}: {error}".splitlines()[0]
                raise ValueError(message("target", "built without an error", found)) from error
        return made if isinstance(made, Encoding) else None

    return make


def _subject(make: Callable[[], Any], made: Encoding, num_heads: int | None, head_dim: int | None) -> Subject:
    """The encoding with attention of the sizes that it was built for."""
    found: dict[str, int] = {}
    for part in made.modules():
        for name in ("num_heads", "head_dim", "model_dim"):
            size = getattr(part, name, None)
            if isinstance(size, int):
                found.setdefault(name, size)
        if isinstance(part, Learned):
            found.setdefault("model_dim", part.table.shape[-1])
    model_dim = found.get("model_dim")
    fitting = next((w for w in (16, 8, 4, 2) if model_dim is None or model_dim % w == 0), 1)
    width = head_dim or found.get("head_dim") or fitting
    few = 8 if width <= 64 else 4 if width <= 128 else 2  # wide heads take long, and few of them show as much
    heads = num_heads or found.get("num_heads") or (few if model_dim is None else max(1, model_dim // width))
    kv = 2 if heads % 2 == 0 and heads > 4 else 1  # a ratio that shows when one count is taken for the other
    return Subject(make, backend="auto", head_dim=width, num_heads=heads, num_kv_heads=kv)
