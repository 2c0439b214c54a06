"""The command line: parse, call, print; every command imports what it runs only when it runs."""

import json
import shlex
import sys
from typing import Annotated

import typer

app = typer.Typer(
    name="ropewalk", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        from ropewalk._version import __version__

        print(__version__)
        raise typer.Exit
    return wanted


@app.callback()
def _ropewalk(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Position encodings for transformers: train, compare, measure."""


def main() -> None:
    """Run a command; a user's mistake is told on stderr, with exit code 2."""
    sys.path.insert(0, "")  # module:Class may lie in the current folder, as with `python -m`
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(","))


def _integers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} must be integers separated by commas, got {text!r}") from None


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
    """Train models that differ only in their encoding and show how they hold up beyond the training length."""
    from ropewalk.study import plan, run, summary

    folder = out or f"runs/study-{preset or 'quick'}"
    settings = run.settings_for(
        folder,
        preset=preset,
        resume=resume,
        data=data,
        tokenizer=tokenizer,
        encodings=_names(encodings),
        train_len=train_length,
        eval_lens=_integers("--eval-lengths", eval_lengths),
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
    for cell, error in ran["failed"].items():
        print(f"error: {cell}: {error}", file=sys.stderr)
    if ran["failed"]:
        raise typer.Exit(1)


@app.command()
def bench(
    what: Annotated[
        str, typer.Argument(help="attention, or study: training steps beside plain PyTorch.")
    ] = "attention",
    encodings: Annotated[str | None, typer.Option(help="Names separated by commas.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Sequence lengths, tokens, separated by commas.")] = None,
    num_heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Channels per head.")] = 64,
    batch_size: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="What the whole measurement may take.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="No progress; JSON on stdout.")] = False,
) -> None:
    """Measure time and memory of attention with each encoding relative to attention without, or training speed."""
    from ropewalk import bench

    if what == "study":
        _bench_study(encodings, dtype, device, as_json)
        return
    if what != "attention":
        raise ValueError(f"what must be attention or study, got {what!r}")

    plan = bench.Plan(
        encodings=_names(encodings) or bench.ENCODINGS,
        lengths=_integers("--lengths", lengths) or bench.LENGTHS,
        num_heads=num_heads,
        head_dim=head_dim,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        budget_seconds=seconds,
    )
    result = bench.run(plan, (lambda _: None) if as_json else (lambda line: print(line, file=sys.stderr)))
    print(json.dumps(result) if as_json else bench.table(result))


def _bench_study(encodings: str | None, dtype: str, device: str, as_json: bool) -> None:
    import torch

    from ropewalk.study import settings, throughput, worker

    torch.set_num_threads(1)
    worker.keep_memory()
    quick = settings.customize(
        settings.preset("quick"),
        encodings=_names(encodings),
        dtype=dtype,
        device=device,
    )
    result = throughput.compare(quick, report=lambda done, of: print(f"round {done}/{of}", file=sys.stderr))
    print(json.dumps(result) if as_json else throughput.table(result))
