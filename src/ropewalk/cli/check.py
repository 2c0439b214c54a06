"""ropewalk check"""

import json
import pathlib
import sys
from typing import Annotated

import typer

from ropewalk.cli.frame import app, names, teller


@app.command()
def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="An encoding (rotary+alibi), module:name (a class, function, adapter or model), or the path of a"
            " Hugging Face config or checkpoint.",
        ),
    ],
    laws: Annotated[str | None, typer.Option(help="Names of laws, separated by commas; all by default.")] = None,
    dtypes: Annotated[
        str, typer.Option(help="Of models: the dtype that laws run in, then those compared with it.")
    ] = "float32,float64,bfloat16",
    compiled: Annotated[bool, typer.Option("--compiled", help="Also the laws that compile; a minute.")] = False,
    num_heads: Annotated[int | None, typer.Option(help="Query heads that an encoding is built for.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels per head that an encoding is built for.")] = None,
    junit: Annotated[str | None, typer.Option(help="Write JUnit XML to this file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="A Markdown table on stdout.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="No progress; JSON on stdout.")] = False,
) -> None:
    """Does an encoding, a function or a model keep the laws of positions?

    Exit code 0: yes; 1: a law is broken, and the smallest input that shows it is printed; 2: it could not run.

    Example: ropewalk check path/to/config.json --dtypes float32
    """
    from ropewalk.check import render, run
    from ropewalk.study import files

    if as_json and markdown:
        raise ValueError("--markdown must be given without --json, got both")
    tell = teller(as_json)
    report = run.check(
        target,
        laws=names(laws),
        dtypes=names(dtypes) or (),
        compiled=compiled,
        num_heads=num_heads,
        head_dim=head_dim,
        progress=lambda law: tell(f"  {law}"),
    )
    if junit is not None:
        files.write_bytes(pathlib.Path(junit), render.junit([report]).encode())
    if as_json:
        print(json.dumps(render.plain(report)))
    else:
        print(render.markdown(report) if markdown else report)
    if report.findings:
        raise typer.Exit(1)
    if not report.passed:
        print("error: no law applies", file=sys.stderr)
        raise typer.Exit(2)
