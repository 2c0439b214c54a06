"""Where a study's text comes from: named documents of bytes, from this Python, a file, a folder or `datasets`."""

import os
import pathlib
import re
import sysconfig

from ropewalk.errors import require

SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "lib2to3",
    "ensurepip",
    "turtledemo",
    "__pycache__",
}
SMALLEST_SOURCE = 2048

# WikiText keeps lines; an article starts at a heading of the first level
ARTICLE = re.compile(r"^ = [^=].* = $")

Documents = dict[str, bytes]


def read(data: str) -> Documents:
    """The documents behind `--data`: stdlib, FILE, FOLDER or hf:NAME[:CONFIG], in order of their names.

    Documents of equal content are kept once, under the first name.
    """
    if data == "stdlib":
        documents = stdlib()
    elif data.startswith("hf:"):
        documents = from_datasets(data.removeprefix("hf:"))
    else:
        documents = from_path(pathlib.Path(data))
    seen: set[bytes] = set()
    kept = {}
    for name in sorted(documents):
        if documents[name] not in seen:
            seen.add(documents[name])
            kept[name] = documents[name]
    return kept


def stdlib() -> Documents:
    """The sources of this Python's standard library, without tests, tables and very short files."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    documents = {}
    for folder, subfolders, files in _walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        for file in files:
            if not file.endswith(".py") or file.startswith("_sysconfigdata"):
                continue
            text = (folder / file).read_bytes()
            if len(text) >= SMALLEST_SOURCE:
                documents[(folder / file).relative_to(root).as_posix()] = text
    return documents


def from_path(path: pathlib.Path) -> Documents:
    """One file as one document, or every text file below a folder (hidden and binary ones are left out)."""
    require(path.exists(), "data", "stdlib, hf:NAME or an existing file or folder", repr(str(path)))
    if path.is_file():
        return {path.name: path.read_bytes()}
    documents = {}
    for folder, subfolders, files in _walk(path):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for file in files:
            readable = (folder / file).is_file() and not file.startswith(".")  # a pipe would be waited for
            text = (folder / file).read_bytes() if readable else b""
            if text and b"\0" not in text:
                documents[(folder / file).relative_to(path).as_posix()] = text
    return documents


def from_datasets(name: str) -> Documents:
    """The rows of a dataset's text column as documents; WikiText's lines are joined to articles.

    A folder or file on this machine is read without any network; a name is fetched by the `datasets` library.
    """
    require(bool(name.strip()), "data", "hf:NAME with a name", "'hf:'")
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ImportError(
            f"data must be readable without the `datasets` library, got 'hf:{name}'\nhint: pip install 'ropewalk[text]'"
        ) from error
    place, _, config = (name, "", "") if pathlib.Path(name).exists() else name.partition(":")
    try:
        loaded = _load(datasets, place, config)
    except (OSError, ValueError, DatasetsError) as error:
        raise ValueError(
            f"data must be a dataset that `datasets` can load, got 'hf:{name}' ({str(error).splitlines()[0]})"
        ) from error
    rows = loaded["train"] if "train" in loaded else loaded[sorted(loaded)[0]]
    columns = [
        column for column, kind in rows.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")
    ]
    require(bool(columns), "data", "a dataset with a column of text", f"columns {list(rows.features)}")
    texts = rows["text" if "text" in columns else columns[0]]
    return {f"{index:08d}": text.encode() for index, text in enumerate(_articles(texts)) if text}


def _load(datasets, place: str, config: str):
    path = pathlib.Path(place)
    if not path.is_file():
        return datasets.load_dataset(place, config or None)
    kind = {".jsonl": "json", ".txt": "text"}.get(path.suffix, path.suffix.lstrip("."))
    return datasets.load_dataset(kind, data_files=str(path))


def _articles(texts) -> list[str]:
    """Rows as they are, unless they are lines with WikiText's headings: those are joined to one text per article."""
    texts = [text or "" for text in texts]
    starts = [index for index, text in enumerate(texts) if ARTICLE.match(text.rstrip("\n"))]
    if not starts:
        return texts
    return [
        "".join(line if line.endswith("\n") else line + "\n" for line in texts[start:end])
        for start, end in zip(starts, [*starts[1:], len(texts)], strict=True)
    ]


def _walk(root: pathlib.Path):
    for folder, subfolders, files in os.walk(root):
        yield pathlib.Path(folder), subfolders, sorted(files)
