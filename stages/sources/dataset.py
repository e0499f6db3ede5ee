"""`Dataset`: names a data set by path or hub name. Knows where rows are stored, not file formats.

    Dataset("data/gsm8k", split="train")                         # a folder with train.jsonl and test.jsonl
    Dataset("data/*.parquet", prompt="problem", name="math")
    Dataset("openai/gsm8k", config="main", split="train")        # on the Hugging Face hub

A path that exists on disk is never looked up on the hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from glob import glob, has_magic
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipeline import StageError
from pipeline.errors import Problem
from pipeline.reading import decode, readable, refused
from stages.sources.columns import template_problems

SUFFIXES = (".jsonl", ".parquet")
_SPLITS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_SHARD = re.compile(r"[-_.]\d+-of-\d+\Z")
_SHOWN = 5  # names in a message


@dataclass(frozen=True)
class Dataset:
    """Rows of JSONL or Parquet files, of a folder saved by `datasets`, or of a data set on the hub.

    path      a file, a folder, a pattern such as "data/*.parquet", several of these, or a hub name "owner/name"
    config    subset of a hub data set, or of a folder laid out like one, such as "main"
    split     split of a hub data set or saved folder; of plain files, those with this word in their name
    revision  commit or tag of a hub data set
    name      value of the field `dataset` for its rows; default: the path
    prompt, answer, template   override those of Prompts
    """

    path: str | Path | Sequence[str | Path]
    _: KW_ONLY
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    name: str | None = None
    prompt: str | None = None
    answer: str | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.path, list):
            object.__setattr__(self, "path", tuple(self.path))

    @property
    def label(self) -> str:
        """The name, or the path as given."""
        if self.name is not None:
            return self.name
        return str(self.path) if isinstance(self.path, str | Path) else ", ".join(map(str, self.path))


class Files(NamedTuple):
    """Data files of one kind, in row order."""

    paths: tuple[Path, ...]


class _Listing(msgspec.Struct):
    """dataset_dict.json."""

    splits: list[str]


class SavedDataset(NamedTuple):
    """A folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk` of the package `datasets`."""

    folder: Path
    split: str | None


class Hub(NamedTuple):
    """A hub name, or a folder laid out like a hub repository."""

    name: str


def locate(dataset: Dataset, where: str) -> Files | SavedDataset | Hub:
    """Find the rows, without network access. Raises StageError with one problem at `where` if they do not exist, or
    this user may not read them."""
    try:
        located = _located(dataset, where)
        for path in located.paths if isinstance(located, Files) else ():
            with path.open("rb"):
                pass
        return located
    except OSError as error:
        if (problem := refused(error, where)) is None:
            raise
        raise StageError(problem) from error


def _located(dataset: Dataset, where: str) -> Files | SavedDataset | Hub:
    parts = [dataset.path] if isinstance(dataset.path, str | Path) else list(dataset.path)
    if len(parts) == 1:
        path = Path(parts[0])
        if path.is_dir() and dataset.config is not None:
            return _needs("datasets", where, Hub(str(path)))
        if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            return _needs("datasets", where, SavedDataset(path, _saved_split(path, dataset, where)))
        if _is_hub_name(str(parts[0])):
            return _needs("datasets", where, Hub(str(parts[0])))
    for name in ("config", "revision"):
        if getattr(dataset, name) is not None:
            raise _error(
                where,
                f"{name}={getattr(dataset, name)!r} of {dataset.label!r}",
                f"data files have no {name}, only data sets on the hub do",
                f"leave out {name}=",
            )
    files = [file for part in parts for file in _files_of(part, dataset.split, where)]
    if dataset.split is not None:
        files = _of_split(files, dataset.split, dataset.label, where)
    kinds = {file.suffix == ".parquet" for file in files}
    if len(kinds) > 1:
        raise _error(
            where,
            f"{dataset.label!r} has Parquet files and others: {_listed(files)}",
            "all files of a data set are of one kind, and two kinds often hold the same rows",
            f"name those of one kind, such as {str(files[0].parent / '*.parquet')!r}",
        )
    return _needs("pyarrow", where, Files(tuple(files))) if True in kinds else Files(tuple(files))


def _is_hub_name(path: str) -> bool:
    owner = path.partition("/")[0]
    return (
        bool(_HUB.match(path))
        and not path.endswith((*SUFFIXES, ".json"))
        and not any(map(Path.exists, map(Path, (path, owner))))
    )


def _files_of(part: str | Path, split: str | None, where: str) -> list[Path]:
    """The data files of a path, a pattern or a folder, sorted by name."""
    path = Path(part)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _files_in(path, split, where)
    if not has_magic(str(part)):
        raise StageError(missing_file(path, where))
    found = sorted(file for name in glob(str(part), recursive=True) if (file := Path(name)).is_file())
    if not found:
        raise _error(
            where,
            f"no file matches {str(part)!r}",
            "a pattern is relative to the working directory",
            "name a file, or the folder with the files",
        )
    return found


def _files_in(folder: Path, split: str | None, where: str) -> list[Path]:
    found = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not found:
        below = sorted({str(file.parent) for kind in SUFFIXES for file in folder.glob(f"*/*{kind}")})
        raise _error(
            where,
            f"{str(folder)!r} is a folder without a data file",
            f"a folder holds {' or '.join(SUFFIXES)} files, or the output of save_to_disk of `datasets`",
            f"did you mean {below[0]!r}?" if below else "give the path of a file with one JSON object per line",
        )
    words = {word for file in found for word in _words(file) if word in _SPLITS}
    if split is None and len(words) > 1:
        named = [file for file in found if words & set(_words(file))]
        raise _error(
            where,
            f"{str(folder)!r} holds {_listed(named)}",
            "training and held-out rows would be mixed",
            f"write Dataset({str(folder)!r}, split={'train' if 'train' in words else sorted(words)[0]!r})",
        )
    return found


def _of_split(files: Sequence[Path], split: str, label: str, where: str) -> list[Path]:
    """The files of a split: those with this name, or else those with the word in their name."""
    stems = {file: _SHARD.sub("", file.stem) for file in files}
    named = [file for file in files if stems[file] == split] or [file for file in files if split in _words(file)]
    if named:
        return named
    words = list(dict.fromkeys(word for file in files for word in (stems[file], *_words(file))))
    close = get_close_matches(split, words, n=1) or [word for word in words if word in _SPLITS][:1]
    raise _error(
        where,
        f"no file of {label!r} has {split!r} in its name",
        f"the files are {_listed(files)}",
        f"split={close[0]!r}, or leave it out" if close else "leave out split=",
    )


def _saved_split(folder: Path, dataset: Dataset, where: str) -> str | None:
    listing = folder / "dataset_dict.json"
    fix = "save the data set again"
    splits: list[str] = []
    if listing.is_file():
        with readable(listing, StageError, why="save_to_disk of `datasets` wrote it", fix=fix):
            splits = decode(listing.read_bytes(), _Listing).splits
    if dataset.split in splits or (not splits and dataset.split is None):
        return dataset.split
    if dataset.split is None and len(splits) == 1:
        return splits[0]
    raise _error(where, *split_choice(str(folder), dataset.split, splits))


def split_choice(name: str, split: str | None, splits: Sequence[str]) -> tuple[str, str, str]:
    """(what, why, fix) for a split that the user must choose."""
    close = get_close_matches(split or "train", splits, n=1) or list(splits[:1])
    return (
        f"{name!r} has no split {split!r}" if split is not None else f"no split of {name!r} is chosen",
        f"its splits are {', '.join(splits)}" if splits else "it was saved without splits",
        f"write Dataset({name!r}, split={close[0]!r})" if close else "leave out split=",
    )


def missing_file(path: Path, where: str) -> Problem:
    """The problem of a path at which there is neither a file nor a folder."""
    folder, is_there = path.parent, path.exists()  # a device, say
    beside = [entry.name for entry in folder.iterdir()] if folder.is_dir() and not is_there else []
    beside = [name for name in beside if name != path.name]  # a link to nothing
    close = [str(folder / name) for name in get_close_matches(path.name, beside, n=1)]
    kind = "Parquet" if path.suffix == ".parquet" else "JSONL"
    fix = f"did you mean {close[0]!r}?" if close else "give the path of a file with one JSON object per line"
    if str(path).startswith("~"):
        fix = "expand the home folder, such as Path('~/train.jsonl').expanduser()"
    return Problem(
        where=where,
        what=f"{str(path)!r} " + ("is neither a file nor a folder" if is_there else "does not exist"),
        why=f"rows are read from a {kind} file, by its path from the working directory",
        fix=fix,
    )


def dataset_problems(dataset: Dataset, where: str) -> Iterator[Problem]:
    """Check the types of the parameters."""
    paths = [dataset.path] if isinstance(dataset.path, str | Path) else dataset.path
    if (
        not isinstance(paths, Sequence)
        or not paths
        or not all(isinstance(path, str | Path) and str(path) for path in paths)
    ):
        yield Problem(
            where=where,
            what=f"Dataset({dataset.path!r:.60})",
            why="a data set is the path of a file or a folder, a pattern, several of these, or a hub name",
            fix='write Dataset("train.jsonl")',
        )
    for name in ("config", "split", "revision", "name", "prompt", "answer", "template"):
        value = getattr(dataset, name)
        if value is not None and not (isinstance(value, str) and value):
            yield Problem(
                where=where,
                what=f"Dataset(..., {name}={value!r:.40})",
                why=f"{name} must be a string, or left out",
                fix=f"leave out {name}=",
            )
    if dataset.template is not None:
        yield from template_problems(dataset.template, "prompt" if dataset.prompt is None else dataset.prompt, where)


def _needs(package: str, where: str, located: Files | SavedDataset | Hub) -> Files | SavedDataset | Hub:
    if find_spec(package) is None:
        raise _error(
            where,
            f"the package {package!r} is not installed",
            "it reads Parquet files" if package == "pyarrow" else "it reads data sets of the Hugging Face hub",
            "pip install 'sluice-rl[data]'",
        )
    return located


def _words(file: Path) -> list[str]:
    return re.split(r"[^A-Za-z0-9]+", file.stem)


def _listed(files: Sequence[Path]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(file.name for file in files[:_SHOWN]) + more


def _error(where: str, what: str, why: str, fix: str) -> StageError:
    return StageError(Problem(where=where, what=what, why=why, fix=fix))
