"""ropewalk extend"""

import json
import sys
from typing import Annotated

import typer

from ropewalk.cli.frame import app, integers, names


@app.command()
def extend(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A folder with config.json and safetensors, a .gguf, or package:NAME."),
    ],
    to: Annotated[int, typer.Option(help="Tokens that the model is to read.")],
    text: Annotated[
        list[str] | None, typer.Option(help="A text file; again for more. By default a long file of Python's library.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Of linear, ntk, dynamic, yarn, llama3.")] = "linear,ntk,yarn",
    lengths: Annotated[
        str | None, typer.Option(help="Window lengths, tokens; by default halves of --to, down to half of the trained.")
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of the longest length from each text.")] = 1,
    sliding: Annotated[
        bool, typer.Option("--sliding", help="Windows that overlap by three quarters; four times the time.")
    ] = False,
    train_length: Annotated[int | None, typer.Option(help="Tokens seen in training, if the config is silent.")] = None,
    dtype: Annotated[str, typer.Option(help="auto (measured), float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    out: Annotated[str | None, typer.Option(help="Where finished windows are kept; runs/extend-MODEL.")] = None,
    save: Annotated[str | None, typer.Option(help="The recommended config.json: the file, or its folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what lies at --save.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and an estimate; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="No progress; JSON on stdout.")] = False,
) -> None:
    """Measure what each way to stretch a model's context does to its loss on a text, and recommend one.

    Example: ropewalk extend path/to/model --to 16384 --text book.txt
    """
    from ropewalk.extension import run

    place = None if save is None else run.check_save(save, force)
    asked = {"to": to, "methods": names(methods), "windows": windows, "sliding": sliding, "train_len": train_length}
    asked |= {"lengths": integers("--lengths", lengths), "dtype": dtype, "device": device}
    settings = run.prepare(model, **asked)
    if dry_run:
        planned = run.estimate(settings, text or ())
        print(json.dumps(planned) if as_json else run.shown_plan(planned))
        return
    try:
        result = run.measure(settings, text or (), out, place, quiet=as_json)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        raise typer.Exit(130) from None
    print(json.dumps(result) if as_json else run.shown(result))
    if place is not None and result["saved"] is None:
        print("error: nothing saved, since no method helps", file=sys.stderr)
        raise typer.Exit(1)
