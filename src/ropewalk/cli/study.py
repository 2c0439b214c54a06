"""ropewalk study"""

import json
import shlex
import sys
from typing import Annotated

import typer

from ropewalk.cli.frame import app, integers, names


@app.command()
def study(
    preset: Annotated[
        str | None, typer.Option(help="smoke (seconds), quick (minutes, the default) or thorough.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="stdlib, a file, a folder, or hf:NAME[:CONFIG].")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="byte, or a JSON file of the tokenizers library.")] = None,
    encodings: Annotated[
        str | None, typer.Option(help="Names separated by commas; + composes, module:Class loads your own.")
    ] = None,
    train_length: Annotated[int | None, typer.Option(help="Tokens seen in training.")] = None,
    eval_lengths: Annotated[str | None, typer.Option(help="Evaluation lengths, tokens, separated by commas.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds, counted from 0.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per step.")] = None,
    documents: Annotated[int | None, typer.Option(help="Held-out documents.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs side by side; by default the cores are shared evenly.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto (measured), float32 or bfloat16.")] = None,
    out: Annotated[str | None, typer.Option(help="The study's folder; runs/study-PRESET by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the study in the folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and an estimate; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="No progress; a JSON summary on stdout.")] = False,
) -> None:
    """Train models that differ only in their encoding and show how they hold up beyond the training length.

    Example: ropewalk study --encodings rotary,alibi --seeds 3
    """
    from ropewalk.study import plan, run, summary

    folder = out or f"runs/study-{preset or 'quick'}"
    settings = run.settings_for(
        folder,
        preset=preset,
        resume=resume,
        data=data,
        tokenizer=tokenizer,
        encodings=names(encodings),
        train_len=train_length,
        eval_lens=integers("--eval-lengths", eval_lengths),
        seeds=None if seeds is None else tuple(range(seeds)),
        steps=steps,
        batch_size=batch_size,
        documents=documents,
        device=device,
        dtype=dtype,
    )
    if dry_run:
        planned = plan.plan(settings, jobs)
        print(json.dumps(planned) if as_json else summary.of_plan(planned))
        return
    command = shlex.join(["ropewalk", *sys.argv[1:]])
    try:
        ran = run.run(settings, folder, jobs=jobs, resume=resume, command=command, quiet=as_json)
    except KeyboardInterrupt:
        print("interrupted; --resume continues", file=sys.stderr)
        raise typer.Exit(130) from None
    print(json.dumps(ran) if as_json else summary.of_run(ran))
    _end(ran["failed"])


def _end(failed: dict[str, str]) -> None:
    """Exit code 1 with a line for each run that failed."""
    for cell, error in failed.items():
        print(f"error: {cell}: {error}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)
