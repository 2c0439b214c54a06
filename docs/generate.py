"""Writes the generated blocks of the pages: `python docs/generate.py`; with --check it only names stale pages.

A block stands between `<!-- generated: NAME -->` and `<!-- end -->`.  What is in it comes from the classes, the laws,
the command line or measured results, so that nothing is written twice.
"""

import functools
import importlib
import inspect
import json
import pathlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

HERE = pathlib.Path(__file__).parent
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
GROUPS = {"encoding": "an encoding", "rotation": "a rotation", "bias": "a bias", "attention": "attention"}
HOOKS = ("embed", "query", "key", "bias")
SIZES = {"head_dim": 64, "num_heads": 8, "model_dim": 512, "num_positions": 512}
CHINESE = {
    "behind a window of 256": "加上 256 个 token 的窗口",
    "build the n × n bias": "构造 n × n 偏置",
    "change of RoPE's perplexity": "RoPE 困惑度的变化",
    "change of perplexity at 4096": "4096 个 token 处困惑度的变化",
    "compared with, alone": "对照（无窗口）",
    "forward": "前向",
    "forward + backward": "前向加反向",
    "helps most": "最有效的方法",
    "memory, MiB, forward": "内存（MiB），前向",
    "perplexity per byte": "每字节困惑度",
    "time, ms": "时间（毫秒）",
    "tokens": "token 数",
    "turn q and k": "旋转 q 和 k",
}
Table = list[list[str]]


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


# --- from the code


def linked(text: str) -> str:
    """arXiv numbers as links."""
    return re.sub(r"arXiv:(\d{4}\.\d{5}(?:v\d+)?)", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def prose(docstring: str | None) -> str:
    """The first sentence or formula of a docstring, on one line."""
    first, second, *_ = [*inspect.cleandoc(docstring or "").split("\n\n"), ""]
    whole = first if first.endswith((".", ")")) else f"{first} {'; '.join(second.splitlines())}"
    return " ".join(whole.replace("`", "").split())


def encodings() -> str:
    """One row for each encoding, from its class, its signature and its module."""
    from ropewalk import naming

    rows = [["name", "formula", "hooks", "parameters", "relative", "source"]]
    for name in naming.names():
        built = naming.build(name, **SIZES)
        kind = type(built)
        source = re.search(r"\(([^()]*arXiv[^()]*)\)", " ".join((inspect.getmodule(kind).__doc__ or "").split()))
        own = [hook for hook in HOOKS if getattr(kind, hook) is not getattr(naming.Encoding, hook)]
        own_parameters = (p for p in inspect.signature(kind).parameters.values() if p.kind < p.VAR_KEYWORD)
        named = (p for p in own_parameters if p.kind != p.VAR_POSITIONAL)
        parameters = [str(p.replace(annotation=p.empty)) for p in named]
        rows.append([
            f"`{kind.__name__}`, `{name}`", escaped(prose(kind.__doc__)), ", ".join(own) or "none",
            f"`{', '.join(parameters)}`" if parameters else "", "yes" if built.relative else "no",
            linked(source[1]) if source else "",
        ])  # fmt: skip
    return table(rows)


def all_laws() -> dict[str, Any]:
    """Every law in `ropewalk.check`, by its place on the page."""
    import ropewalk.check as check

    found = {}
    for module in pkgutil.walk_packages(check.__path__, "ropewalk.check."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, tuple):
                found |= {law.page: law for law in value if isinstance(law, check.Law)}
    return found


def laws() -> str:
    """A section for each group of laws; headings give the anchors that findings name."""
    from ropewalk.check import KINDS

    lines, group, order = [], "", {name: i for i, name in enumerate(GROUPS)}
    for law in sorted(all_laws().values(), key=lambda law: order.get(law.group, len(order))):
        if law.group != group:
            group = law.group
            lines += [f"## Laws of {GROUPS.get(group, f'a {group}')}", ""]
        kind = KINDS[law.kind]
        anchor = f"#{law.kind.lower()}-{kind.name.replace(' ', '-')}"
        lines += [f"### {law.group}: {law.name}", "", escaped(law.sentence), ""]
        lines += [f"- Broken, it is a fault of kind [{law.kind}, {kind.name}]({anchor})."]
        lines += [f"- Tolerance: {escaped(law.tolerance)}."]
        lines += ["- It compiles, so it runs on request only."] * law.compiled + [""]
    return "\n".join(lines).rstrip()


def escaped(text: str) -> str:
    """Plain text whose stars and angles are not markup."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<])", r"\\\1", part) for part in parts)


def kinds() -> str:
    """A section for each kind of fault."""
    from ropewalk.check import KINDS

    return "\n\n".join(f"### {key}: {kind.name}\n\n{escaped(kind.sentence)}" for key, kind in KINDS.items())


def commands() -> str:
    """A section for each command, from the help that it prints."""
    import typer

    from ropewalk.cli import app

    return "\n\n".join(sections("ropewalk", typer.main.get_command(app), level=1))


def sections(path: str, command: Any, level: int) -> Iterator[str]:
    """One command and those below it."""
    if level > 1:
        yield "#" * level + f" {path}"
        text, _, example = inspect.cleandoc(command.help or "").partition("Example: ")
        yield escaped(text.strip())
        if example:
            yield f"```sh\n{example.strip()}\n```"
        context = command.context_class(command, info_name=path)
        records = (parameter.get_help_record(context) for parameter in command.params)
        rows = [[f"`{written}`", escaped(meaning)] for written, meaning in filter(None, records)]
        if rows:
            yield table([["argument or option", "meaning"], *rows])
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from sections(f"{path} {name}", child, level + 1)


# --- from measured results


@functools.cache
def study() -> list[dict]:
    return json.loads((HERE / "study" / "results.json").read_text())


def perplexity(encoding: str, protocol: str, eval_len: int) -> str:
    """Mean and standard deviation over seeds."""
    from ropewalk.study import statistics

    wanted = (encoding, protocol, eval_len)
    own = [r["perplexity"] for r in study() if (r["encoding"], r["protocol"], r["eval_len"]) == wanted]
    mean, spread = statistics.mean_and_sd(own)
    return f"{mean:.2f} ± {spread:.2f}"


def study_names() -> list[str]:
    return list(dict.fromkeys(row["encoding"] for row in study()))


def study_label(name: str) -> str:
    from ropewalk.study.verdicts import label

    return label(name)


def study_table() -> Table:
    lengths = sorted({row["eval_len"] for row in study() if row["protocol"] == "windows"})
    head = ["perplexity per byte", *map(str, lengths)]
    return [head, *([study_label(n), *(perplexity(n, "windows", x) for x in lengths)] for n in study_names())]


@functools.cache
def findings() -> str:
    """What the study's page says, which compares on equal text."""
    return (HERE / "study" / "README.md").read_text().partition("## Findings")[2]


def controls() -> Table:
    """What a plain window of the training length does to each model, far beyond it."""
    pattern = r"^- (.+?) behind a window of (\d+) tokens, at (\d+),(.*?)\(([-+][^()]*\])\)"
    found = re.findall(pattern, findings(), re.MULTILINE)
    rows = [[who, "ALiBi" if "from ALiBi" in said else who, change] for who, _, _, said, change in found]
    return [["behind a window of 256", "compared with, alone", "change of perplexity at 4096"], *rows]


def stretches() -> Table:
    """The best way to stretch RoPE without fine-tuning, by length."""
    said = re.search(r"^- Stretching RoPE without fine-tuning: (.*)$", findings(), re.MULTILINE)
    rows = re.findall(r"at (\d+), (.+?) helps most \(([^()]*\])\)", said[1]) if said else []
    return [["tokens", "helps most", "change of RoPE's perplexity"], *map(list, rows)]


@functools.cache
def costs() -> dict:
    return json.loads((HERE.parent / "benchmarks" / "attention-float32.json").read_text())


def by_length(title: str, cell: Callable[[dict], str]) -> Table:
    """One row for each way to attend."""
    lengths = sorted({row["seq_len"] for row in costs()["rows"]})
    found = {(row["name"], row["seq_len"]): cell(row) for row in costs()["rows"]}
    names = list(dict.fromkeys(row["name"] for row in costs()["rows"]))
    return [[title, *map(str, lengths)], *([name, *(found.get((name, n), "") for n in lengths)] for name in names)]


def cost(mode: str) -> Table:
    def cell(row: dict) -> str:
        return f"{row[mode]['ratio']:.2f} [{row[mode]['low']:.2f}, {row[mode]['high']:.2f}]"

    return by_length({"forward": "forward", "training": "forward + backward"}[mode], cell)


def memory() -> Table:
    return by_length("memory, MiB, forward", lambda row: f"{row['forward_memory']['bytes'] / 2**20:.1f}")


def encoding_alone() -> Table:
    """What the tutorials time: the bias alone and the rotation alone."""
    rows = costs()["tutorial"]
    return [
        ["time, ms", *(str(row["seq_len"]) for row in rows)],
        ["build the n × n bias", *(f"{1e3 * row['build_bias']['seconds']:.2f}" for row in rows)],
        ["turn q and k", *(f"{1e3 * row['rotate']['seconds']:.2f}" for row in rows)],
    ]


TEXTS: dict[str, Callable[[], str]] = {"encodings": encodings, "laws": laws, "kinds": kinds, "commands": commands}
TABLES: dict[str, Callable[[], Table]] = {
    "study": study_table, "controls": controls, "stretches": stretches, "memory": memory,
    "cost": lambda: cost("forward"), "cost-training": lambda: cost("training"), "encoding-alone": encoding_alone,
}  # fmt: skip


# --- the pages


def block(name: str, chinese: bool) -> str:
    """What belongs between the markers."""
    if name in TEXTS:
        return TEXTS[name]()
    rows = TABLES[name]()
    return table([[CHINESE.get(cell, cell) if chinese else cell for cell in row] for row in rows])


def filled(page: pathlib.Path) -> str:
    """A page with its blocks made anew."""
    chinese = "zh" in page.relative_to(HERE).parts
    return BLOCK.sub(lambda found: f"{found[1]}\n{block(found[2], chinese)}\n\n{found[3]}", page.read_text())


def stale() -> list[pathlib.Path]:
    """Pages whose blocks are not what they should be."""
    pages = (page for page in sorted(HERE.rglob("*.md")) if "_build" not in page.parts)
    return [page for page in pages if filled(page) != page.read_text()]


if __name__ == "__main__":
    pages = stale()
    for page in pages:
        print(page.relative_to(HERE.parent))
        if "--check" not in sys.argv:
            page.write_text(filled(page))
    sys.exit(1 if pages and "--check" in sys.argv else 0)
