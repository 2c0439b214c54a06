"""ropewalk bench"""

import json
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from ropewalk.cli.frame import app, integers, names, teller


@app.command()
def bench(
    what: Annotated[
        str, typer.Argument(help="attention, rotate, decode, study (training steps), all of them, or the page of all.")
    ] = "attention",
    encodings: Annotated[str | None, typer.Option(help="Names separated by commas.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Tokens, separated by commas; decode: cached keys.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    num_kv_heads: Annotated[str | None, typer.Option(help="Key heads; decode: several, separated by commas.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels per head.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences at once.")] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Attention that sees the future too.")] = False,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Attention without gradients.")] = False,
    backends: Annotated[str | None, typer.Option(help="Backends timed beside the chosen one; or none.")] = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Other libraries, where installed.")] = True,
    compiled: Annotated[bool, typer.Option("--compiled", help="rotate: also under torch.compile.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32 (default), bfloat16, float16 or float64.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu (default), cuda or cuda:N.")] = None,
    threads: Annotated[int, typer.Option(help="One thread's own time is read; of more, the clock on the wall.")] = 1,
    default_allocator: Annotated[bool, typer.Option("--default-allocator", help="Hand freed memory back.")] = False,
    seconds: Annotated[float | None, typer.Option(help="What a measurement may take.")] = None,
    out: Annotated[str, typer.Option(help="The folder of all and page.")] = "benchmarks",
    only: Annotated[str | None, typer.Option(help="all: names of files, separated by commas.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="No progress; JSON on stdout.")] = False,
) -> None:
    """Measure time and memory relative to a limit of the same run: rotation, attention, decoding, training.

    Example: ropewalk bench attention --encodings alibi --lengths 4096
    """
    from ropewalk.bench import suite

    tell = teller(as_json)
    given = {
        "encodings": names(encodings),
        "lengths": integers("--lengths", lengths),
        "num_heads": num_heads,
        "num_kv_heads": integers("--num-kv-heads", num_kv_heads),
        "head_dim": head_dim,
        "batch_size": batch_size,
        "causal": False if symmetric else None,
        "modes": ("forward",) if forward_only else None,
        "backends": () if backends == "none" else names(backends),
        "peers": None if peers else False,
        "compiled": compiled or None,
        "dtype": dtype,
        "device": device,
        "budget_seconds": seconds,
    }
    if what in ("all", "page"):
        _bench_folder(what, out, given, names(only), tell)
        return
    plan = suite.plan_for(what, given)
    suite.prepare(threads, default_allocator)
    result = suite.measure(what, plan, tell)
    print(json.dumps(result) if as_json else suite.shown(what, result))


def _bench_folder(what: str, out: str, given: dict, only: tuple[str, ...] | None, tell: Callable[[str], None]) -> None:
    from ropewalk.bench import suite

    failed = suite.measure_all(out, given, only, tell) if what == "all" else {}
    for name, error in failed.items():
        print(f"error: {name}: {error}", file=sys.stderr)
    if what == "page":
        print(suite.write_page(out, given))
    if failed:
        raise typer.Exit(1)
