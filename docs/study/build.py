"""Makes this folder out of a finished study: `python docs/study/build.py runs/FOLDER`.

The page holds what the study's own tables and findings say; nothing in it is written by hand.
"""

import json
import pathlib
import shutil
import sys

from ropewalk.study import evidence, statistics
from ropewalk.study.findings import findings
from ropewalk.study.verdicts import gate, label

HERE = pathlib.Path(__file__).parent
COPIED = ("results.json", "study.json", "cost.json", "report.html", "figures/perplexity.svg")


def table(rows: list[dict]) -> list[str]:
    """Perplexity per token by encoding and length, mean and standard deviation over seeds, from results.json."""
    rows = [row for row in rows if row["protocol"] == "windows"]
    lengths = sorted({row["eval_len"] for row in rows})
    lines = ["| perplexity per byte | " + " | ".join(map(str, lengths)) + " |", "|---" * (len(lengths) + 1) + "|"]
    for name in dict.fromkeys(row["encoding"] for row in rows):
        cells = []
        for length in lengths:
            own = [row["perplexity"] for row in rows if (row["encoding"], row["eval_len"]) == (name, length)]
            mean, spread = statistics.mean_and_sd(own)
            cells.append(f"{mean:.2f} ± {spread:.2f}" if spread is not None else f"{mean:.2f}")
        lines.append(f"| {label(name)} | " + " | ".join(cells) + " |")
    return lines


def page(folder: pathlib.Path) -> str:
    """README.md of this folder."""
    study = evidence.load(folder)
    settings = study.settings
    tokens = settings["steps"] * settings["batch_size"] * settings["train_len"]
    parts = [
        "# The study behind the README's figure",
        "",
        f"`ropewalk study --seeds {len(study.seeds)}`, the quick preset: models of {settings['num_layers']} layers and"
        f" {settings['model_dim']} channels trained on {tokens / 1e6:.2f} million bytes, {settings['train_len']} at a"
        f" time, {len(study.seeds)} seeds, evaluated on {settings['documents']} whole held-out documents,"
        f" {study.machine}, {settings['dtype']}, torch {study.versions['torch']}, Python {study.versions['python']}."
        " [The whole report](report.html), [every number](results.json), [the settings](study.json).",
        "",
        *table(json.loads((folder / "results.json").read_text())),
        "",
        "Mean and standard deviation over seeds.",
        "",
        "![Perplexity over evaluation length](perplexity.svg)",
        "",
        "## Findings",
        "",
        gate(study).text,
        "",
        *(f"- {finding.text}" for finding in findings(study)[1:]),
        "",
        "Percentages are changes of perplexity; in brackets, 95 % intervals of a paired bootstrap over documents.",
    ]
    return "\n".join(parts) + "\n"


def main(folder: pathlib.Path) -> None:
    """Copy the results, write the page."""
    for name in COPIED:
        shutil.copyfile(folder / name, HERE / pathlib.Path(name).name)
    (HERE / "README.md").write_text(page(folder))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("one folder must be named: python docs/study/build.py runs/FOLDER")
    main(pathlib.Path(sys.argv[1]))
