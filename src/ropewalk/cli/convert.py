"""ropewalk convert"""

import json
from typing import Annotated

import typer

from ropewalk.cli.frame import app, teller


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="A .safetensors or .gguf file, or a checkpoint's folder.")
    ],
    out: Annotated[
        str | None, typer.Argument(metavar="OUT", help="A file for a file, a folder for a folder or GGUF.")
    ] = None,
    to: Annotated[
        str | None, typer.Option(help="half (Hugging Face's LLaMA) or interleaved (Meta's, GPT-J, the paper).")
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--from", help="The layout of IN; by default told from its weights.")
    ] = None,
    detect: Annotated[
        bool, typer.Option("--detect", help="Print the layout of IN with the evidence; exit code 1: not conclusive.")
    ] = False,
    config: Annotated[str | None, typer.Option(help="config.json, if not beside IN (a LoRA's base model).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT, and what a killed conversion left.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="No progress; JSON on stdout.")] = False,
) -> None:
    """Reorder the query and key channels of a checkpoint for the other rotary layout; its logits stay the same.

    Example: ropewalk convert model.safetensors turned.safetensors --to interleaved
    """
    from ropewalk import checkpoints

    if detect:
        found = checkpoints.detect(source, config)
        print(json.dumps(found._asdict()) if as_json else found)
        raise typer.Exit(found.layout is None)
    if out is None or to is None:
        raise ValueError(f"{'OUT' if out is None else '--to'} must be given, got none")
    tell = teller(as_json)
    done = checkpoints.convert(source, out, to, layout=layout, config=config, force=force, tell=tell)
    print(json.dumps(done) if as_json else checkpoints.summary(done))
