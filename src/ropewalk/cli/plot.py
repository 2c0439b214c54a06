"""ropewalk plot"""

import json
from typing import Annotated, Any

import typer

from ropewalk.cli.frame import app, integers, names, numbers, teller

plot = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(plot, name="plot")

Out = Annotated[str | None, typer.Option(help="The figure's file, .svg or .png; replaced once it is complete.")]
Show = Annotated[bool, typer.Option("--show", help="Open a window, where a display exists.")]
Json = Annotated[bool, typer.Option("--json", help="The figure's numbers as JSON on stdout.")]
Config = Annotated[str | None, typer.Option(help="A Hugging Face config.json, or its folder.")]
Layer = Annotated[int | None, typer.Option(help="A layer, counted from 0.")]
Encoding = Annotated[str | None, typer.Option(help="A name; + composes, module:Class loads your own.")]
Encodings = Annotated[str | None, typer.Option(help="Names separated by commas; + composes.")]
HeadDim = Annotated[int | None, typer.Option(help="Channels per head; 64 by default.")]
NumHeads = Annotated[int | None, typer.Option(help="Heads of the model.")]
Heads = Annotated[str | None, typer.Option(help="Which heads to show, counted from 0, separated by commas.")]
Base = Annotated[float | None, typer.Option(help="Base of the frequencies; 10000 by default.")]
Stretch = Annotated[float | None, typer.Option(help="Evaluation length / training length, at least 1.")]
TrainLength = Annotated[int | None, typer.Option(help="Tokens seen in training.")]
EvalLength = Annotated[int | None, typer.Option(help="Tokens to be read.")]
SeqLen = Annotated[int | None, typer.Option("--length", help="Tokens.")]
Seed = Annotated[int | None, typer.Option(help="Of random numbers, or of the study's models.")]
Study = Annotated[str | None, typer.Option(help="A study's folder: its trained models instead of random ones.")]


@plot.callback()
def _plot() -> None:
    """Draw what position encodings do, as SVG or PNG, or print the numbers.

    Example: ropewalk plot angles --out angles.svg
    """


def _make(kind: str, given: dict[str, Any], out: str | None, show: bool, as_json: bool) -> None:
    from ropewalk.plots import output

    drawn = output.make(kind, given, out, show, as_json, teller(as_json))
    if as_json:
        print(json.dumps(drawn))


@plot.command()
def angles(
    positions: Annotated[str | None, typer.Option(help="Tokens, separated by commas; 0,10,100,200,500.")] = None,
    encoding: Encoding = None,
    config: Config = None,
    layer: Layer = None,
    head_dim: HeadDim = None,
    base: Base = None,
    method: Annotated[str | None, typer.Option(help="linear, ntk, dynamic_ntk, yarn or llama3.")] = None,
    stretch: Stretch = None,
    train_length: TrainLength = None,
    eval_length: EvalLength = None,
    wrapped: Annotated[bool, typer.Option("--wrapped", help="Modulo one turn, as cosines see them.")] = False,
    out: Out = None,
    show: Show = False,
    as_json: Json = False,
) -> None:
    """The angle by which each pair of channels turns at chosen positions.

    Example: ropewalk plot angles --positions 0,10,100,200,500 --head-dim 64 --out angles.svg
    """
    from ropewalk.plots import sources

    more = {"method": method, "stretch": stretch, "train_len": train_length, "eval_len": eval_length}
    found = sources.asked(config=config, layer=layer, encoding=encoding, head_dim=head_dim, base=base, **more)
    given = {"positions": integers("--positions", positions), "spectrum": found.alone(), "wrapped": wrapped}
    _make("angles", given, out, show, as_json)


@plot.command()
def wavelengths(
    encoding: Encoding = None,
    config: Config = None,
    layer: Layer = None,
    head_dim: HeadDim = None,
    base: Base = None,
    methods: Annotated[
        str | None, typer.Option(help="Of plain, linear, ntk, dynamic_ntk, yarn, llama3, separated by commas.")
    ] = None,
    stretch: Stretch = None,
    train_length: TrainLength = None,
    eval_length: EvalLength = None,
    out: Out = None,
    show: Show = False,
    as_json: Json = False,
) -> None:
    """Tokens per turn of each pair of channels, with the lengths that they have to cover.

    Example: ropewalk plot wavelengths --config path/to/config.json --out wavelengths.svg
    """
    from ropewalk.plots import sources

    more = {"methods": names(methods), "stretch": stretch, "train_len": train_length, "eval_len": eval_length}
    found = sources.asked(config=config, layer=layer, encoding=encoding, head_dim=head_dim, base=base, **more)
    _make("wavelengths", found._asdict(), out, show, as_json)


@plot.command()
def decay(
    bases: Annotated[str | None, typer.Option(help="Bases, separated by commas; 500,10000,500000.")] = None,
    head_dim: HeadDim = None,
    max_distance: Annotated[int | None, typer.Option(help="Tokens; 4096 by default.")] = None,
    bound: Annotated[bool, typer.Option("--bound", help="The bound of any score instead.")] = False,
    out: Out = None,
    show: Show = False,
    as_json: Json = False,
) -> None:
    """The expected score of a key like its query over their distance, by base.

    Example: ropewalk plot decay --bases 10000,500000 --max-distance 32768 --out decay.svg
    """
    given = {"bases": numbers("--bases", bases), "rotary_dim": head_dim, "max_distance": max_distance, "bound": bound}
    _make("decay", given, out, show, as_json)


@plot.command()
def bias(
    encoding: Encoding = None,
    num_heads: NumHeads = None,
    head_dim: HeadDim = None,
    heads: Heads = None,
    length: SeqLen = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="The future too.")] = False,
    out: Out = None,
    show: Show = False,
    as_json: Json = False,
) -> None:
    """What an encoding adds to each head's score: over distance, and as a matrix of queries and keys.

    Example: ropewalk plot bias --encoding alibi --num-heads 12 --out bias.svg
    """
    given = {"encoding": encoding, "num_heads": num_heads, "head_dim": head_dim, "seq_len": length}
    given |= {"heads": integers("--heads", heads), "symmetric": symmetric}
    _make("bias", given, out, show, as_json)


@plot.command()
def attention(
    encodings: Encodings = None,
    of: Annotated[str, typer.Option(help="weights, or scores before the softmax.")] = "weights",
    heads: Heads = None,
    length: SeqLen = None,
    num_heads: NumHeads = None,
    head_dim: HeadDim = None,
    seed: Seed = None,
    study: Study = None,
    layer: Layer = None,
    out: Out = None,
    show: Show = False,
    as_json: Json = False,
) -> None:
    """What random or trained heads attend to, encodings side by side on one scale.

    Example: ropewalk plot attention --encodings rotary,alibi,rotary+alibi --out attention.svg
    """
    given = {"encodings": names(encodings), "of": of, "heads": integers("--heads", heads), "seq_len": length}
    given |= {"num_heads": num_heads, "head_dim": head_dim, "seed": seed, "study": study, "layer": layer}
    _make("attention", given, out, show, as_json)


@plot.command()
def lengths(
    results: Annotated[str, typer.Argument(metavar="RESULTS", help="A study's folder, or its results.json.")],
    protocol: Annotated[str, typer.Option(help="windows, sliding, limited, linear, ntk, yarn or context.")] = "windows",
    train_length: TrainLength = None,
    out: Out = None,
    show: Show = False,
    as_json: Json = False,
) -> None:
    """A study's perplexity over evaluation length.

    Example: ropewalk plot lengths runs/study-quick --out lengths.svg
    """
    given = {"results": results, "protocol": protocol, "train_len": train_length}
    _make("lengths", given, out, show, as_json)


@plot.command()
def receptive(
    encodings: Encodings = None,
    num_layers: Annotated[int | None, typer.Option(help="Layers; 4 by default.")] = None,
    length: SeqLen = None,
    num_heads: NumHeads = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels per head; 8 by default.")] = None,
    samples: Annotated[int | None, typer.Option(help="Random inputs; 2 by default.")] = None,
    seed: Seed = None,
    study: Study = None,
    out: Out = None,
    show: Show = False,
    as_json: Json = False,
) -> None:
    """How far back the output of a stack of layers depends on its input: norms of gradients over distance.

    Example: ropewalk plot receptive --encodings rotary,alibi --num-layers 2 --out receptive.svg
    """
    given = {"encodings": names(encodings), "num_layers": num_layers, "seq_len": length, "num_heads": num_heads}
    given |= {"head_dim": head_dim, "samples": samples, "seed": seed, "study": study}
    _make("receptive", given, out, show, as_json)


@plot.command()
def spectra(
    methods: Annotated[
        str | None, typer.Option(help="Of plain, linear, ntk, dynamic_ntk, yarn, llama3, separated by commas.")
    ] = None,
    head_dim: HeadDim = None,
    base: Base = None,
    stretch: Stretch = None,
    train_length: TrainLength = None,
    out: Out = None,
    show: Show = False,
    as_json: Json = False,
) -> None:
    """What each way to stretch a context does to the frequencies, at one stretch.

    Example: ropewalk plot spectra --stretch 8 --train-length 4096 --out spectra.svg
    """
    given = {"methods": names(methods), "rotary_dim": head_dim, "base": base, "stretch": stretch}
    _make("spectra", given | {"train_len": train_length}, out, show, as_json)
