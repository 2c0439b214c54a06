"""ropewalk explain"""

import json
from typing import Annotated

import typer

from ropewalk.cli.frame import app, numbers

_OPTIONS = {
    name: f"--{name}"
    for name in ("vector", "key", "position", "distance", "base", "layout", "share", "slopes", "alpha", "length")
}
_OPTIONS |= {"num_heads": "--heads", "model_dim": "--dim"}  # fmt: skip


@app.command()
def explain(
    encoding: Annotated[
        str | None, typer.Argument(metavar="ENCODING", help="rotary, alibi, sinusoidal or hybrid.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="A model instead: its config.json or folder.")] = None,
    vector: Annotated[str | None, typer.Option(help="A query's channels, separated by commas.")] = None,
    key: Annotated[str | None, typer.Option(help="The key that it is scored with; the same vector by default.")] = None,
    position: Annotated[int | None, typer.Option(help="Of the vector, tokens; 1 by default.")] = None,
    distance: Annotated[int | None, typer.Option(help="hybrid: from key to query, tokens; 3 by default.")] = None,
    base: Annotated[float | None, typer.Option(help="10000 by default.")] = None,
    layout: Annotated[str | None, typer.Option(help="interleaved (the paper, the default) or half.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads of the whole model.")] = None,
    slopes: Annotated[str | None, typer.Option(help="alibi: numbers instead of the published rule.")] = None,
    share: Annotated[float | None, typer.Option(help="alibi: below this weight a key is unseen; 0.01.")] = None,
    dim: Annotated[int | None, typer.Option(help="sinusoidal: channels of the embedding.")] = None,
    alpha: Annotated[float | None, typer.Option(help="hybrid: the weight in place of the plain sum.")] = None,
    length: Annotated[int | None, typer.Option(help="--config: tokens, for frequencies that depend on it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every number as JSON.")] = False,
) -> None:
    """Show step by step where an encoding's numbers come from, or what a model does about positions.

    Example: ropewalk explain rotary --vector 0.2,0.1,-0.3,0.7 --position 1
    """
    from ropewalk import explain as rooms
    from ropewalk.cli.flags import named

    given = {"vector": numbers("--vector", vector), "key": numbers("--key", key), "position": position}
    given |= {"distance": distance, "base": base, "layout": layout, "num_heads": heads, "share": share}
    given |= {"slopes": numbers("--slopes", slopes), "model_dim": dim, "alpha": alpha}
    if (encoding is None) == (config is None):
        raise ValueError(
            f"ENCODING must be given, or --config instead of it, got {'neither' if not config else 'both'}"
        )
    if encoding is not None:
        with named(_OPTIONS):
            made = rooms.explained(encoding, **given, length=length)
    else:
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise ValueError(f"{_OPTIONS[extra[0]]} must be absent with --config, got {given[extra[0]]}")
        made = rooms.config(config, length=length)
    print(json.dumps(made.numbers, allow_nan=False) if as_json else made)
