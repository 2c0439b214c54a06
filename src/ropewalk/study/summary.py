"""A study in a few lines for the terminal."""

from ropewalk.study.progress import duration
from ropewalk.study.statistics import mean_and_sd


def of_plan(plan: dict) -> str:
    """What `plan` found, as text."""
    settings = plan["settings"]
    lines = [
        f"{plan['cells']} runs ({len(settings['encodings'])} encodings x {len(settings['seeds'])} seeds), "
        f"{plan['jobs']} at a time on {plan['cores']} cores, {settings['dtype']} on {settings['device']}"
    ]
    lines += [f"  {name}: {count:,} parameters" for name, count in plan["parameters"].items()]
    corpus = plan["corpus"]
    lines += [
        f"text: {corpus['name']}, {corpus['bytes']:,} bytes in {corpus['documents']} documents, "
        f"{len(corpus['held_out'])} of them held out",
        f"training: {settings['steps']} steps of {settings['batch_size']} x {settings['train_len']} tokens "
        f"({plan['train_tokens']:,} tokens a run)",
        f"evaluation: at {', '.join(map(str, settings['eval_lens']))} tokens",
        f"about {plan['estimated_minutes']} minutes",
    ]
    return "\n".join(lines)


def of_run(ran: dict) -> str:
    """Perplexity over length per encoding, the report's place and the time taken."""
    lines = []
    if ran["results"]:
        lines += [*table(ran["results"]), ""]
    done = ran["cells"] - len(ran["failed"])
    lines.append(f"{done} of {ran['cells']} runs in {ran['out']}, {duration(ran['seconds'])}")
    if ran["report"]:
        lines.append(f"report: {ran['report']}")
    return "\n".join(lines)


def table(rows: list[dict]) -> list[str]:
    """Perplexity per token in non-overlapping windows, mean over seeds; a dash where an encoding cannot answer."""
    headline = [row for row in rows if row["protocol"] == "windows"]
    lengths = sorted({row["eval_len"] for row in headline})
    names = list(dict.fromkeys(row["encoding"] for row in headline))
    width = max(map(len, [*names, "perplexity at"]))
    lines = ["  ".join(["perplexity at".ljust(width), *(f"{length:>8}" for length in lengths)])]
    for name in names:
        cells = [
            [row["perplexity"] for row in headline if (row["encoding"], row["eval_len"]) == (name, length)]
            for length in lengths
        ]
        shown = ["-" if None in values or not values else f"{mean_and_sd(values)[0]:.3f}" for values in cells]
        lines.append("  ".join([name.ljust(width), *(f"{text:>8}" for text in shown)]))
    return lines
