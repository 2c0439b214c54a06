"""The command line: parse, call, print; every command imports what it runs only when it runs."""

import json
import shlex
import sys
from collections.abc import Callable
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
    """Measure time and memory relative to a limit of the same run: rotation, attention, decoding, training."""
    from ropewalk.bench import suite

    tell = (lambda _: None) if as_json else (lambda line: print(line, file=sys.stderr))
    given = {
        "encodings": _names(encodings),
        "lengths": _integers("--lengths", lengths),
        "num_heads": num_heads,
        "num_kv_heads": _integers("--num-kv-heads", num_kv_heads),
        "head_dim": head_dim,
        "batch_size": batch_size,
        "causal": False if symmetric else None,
        "modes": ("forward",) if forward_only else None,
        "backends": () if backends == "none" else _names(backends),
        "peers": None if peers else False,
        "compiled": compiled or None,
        "dtype": dtype,
        "device": device,
        "budget_seconds": seconds,
    }
    if what in ("all", "page"):
        _bench_folder(what, out, given, _names(only), tell)
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
    """Reorder the query and key channels of a checkpoint for the other rotary layout; its logits stay the same."""
    from ropewalk import checkpoints

    if detect:
        found = checkpoints.detect(source, config)
        print(json.dumps(found._asdict()) if as_json else found)
        raise typer.Exit(found.layout is None)
    if out is None or to is None:
        raise ValueError(f"{'OUT' if out is None else '--to'} must be given, got none")
    tell = (lambda _: None) if as_json else (lambda line: print(line, file=sys.stderr))
    done = checkpoints.convert(source, out, to, layout=layout, config=config, force=force, tell=tell)
    print(json.dumps(done) if as_json else checkpoints.summary(done))


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
    """Measure what each way to stretch a model's context does to its loss on a text, and recommend one."""
    from ropewalk.extension import run

    place = None if save is None else run.check_save(save, force)
    asked = {"to": to, "methods": _names(methods), "windows": windows, "sliding": sliding, "train_len": train_length}
    asked |= {"lengths": _integers("--lengths", lengths), "dtype": dtype, "device": device}
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
