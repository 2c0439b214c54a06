"""ropewalk advise"""

import json
from typing import Annotated

import typer

from ropewalk.cli.frame import app


@app.command()
def advise(
    eval_length: Annotated[int, typer.Option(help="Tokens that the model is to read.")],
    train_length: Annotated[int | None, typer.Option(help="Tokens seen in training, if no config tells.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads, if no config tells.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels of a head, if no config tells.")] = None,
    task: Annotated[str, typer.Option(help="retrieval (tokens from anywhere) or local (recent ones).")] = "retrieval",
    budget: Annotated[
        str | None, typer.Option(help="none or finetune with --config, pretrain without; none, pretrain by default.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="Of weights that exist: config.json or its folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Which encoding, or which stretch of existing weights, with its numbers, source, cost and config.

    Example: ropewalk advise --train-length 4096 --eval-length 32768 --heads 32 --head-dim 128
    """
    from ropewalk import advise as rooms
    from ropewalk.cli.flags import named

    sizes = {"train_len": train_length, "num_heads": heads, "head_dim": head_dim}
    options = {"eval_len": "--eval-length", "train_len": "--train-length", "num_heads": "--heads"}
    options |= {"head_dim": "--head-dim", "task": "--task", "budget": "--budget", "config": "--config"}
    with named(options):
        answer = rooms.advise(eval_len=eval_length, task=task, budget=budget, config=config, **sizes)
    print(json.dumps(answer.as_dict()) if as_json else answer)
