"""Finding, reading and writing the files of a project."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import stat
import tempfile
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pathspec


class BadInputError(Exception):
    """A file that cannot be worked on; the rest goes on.

    Attributes:
        path: the file.
        line: where in it, if that is known.
        reason: what is wrong, and what helps.
    """

    def __init__(self, path: Path, reason: str, line: int | None = None) -> None:
        where = f"{shown(path)}:{line}" if line else f"{shown(path)}"
        super().__init__(f"{where}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


@dataclass(frozen=True)
class Text:
    """What a file holds.

    Attributes:
        encoding: as its cookie or its byte-order mark says.
    """

    text: str
    encoding: str

    def encode(self, text: str) -> bytes:
        return text.encode(self.encoding)


def shown(path: Path) -> str:
    """A path as it is printed: relative to the working directory where it lies within."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def python_files(arguments: Iterable[Path]) -> tuple[list[Path], list[BadInputError]]:
    """The files that are meant: each file named, and all ``*.py`` within folders that no
    ``.gitignore`` leaves out; and the arguments that are neither."""
    found: dict[Path, None] = {}
    bad = []
    for argument in arguments:
        if argument.is_dir():
            top = argument.resolve()
            found.update(dict.fromkeys(_within(top, _specs_above(top))))
        elif argument.is_file():
            found[argument.resolve()] = None
        elif os.path.lexists(argument):
            bad.append(BadInputError(argument, "a link that leads nowhere"))
        else:
            bad.append(BadInputError(argument, "no such file or folder"))
    return list(found), bad


_Specs = tuple[tuple[Path, pathspec.GitIgnoreSpec], ...]


def _within(folder: Path, specs: _Specs) -> Iterator[Path]:
    specs = (*specs, *_specs_in(folder))
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        path = folder / entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name == ".git" or _is_ignored(path, is_folder, specs):
            continue
        if is_folder:
            yield from _within(path, specs)
        elif entry.name.endswith(".py"):
            # A link is the file that it leads to; one to itself is left as it is.
            try:
                yield path.resolve(strict=True)
            except (OSError, RuntimeError):
                yield path


def _specs_in(folder: Path) -> _Specs:
    try:
        lines = (folder / ".gitignore").read_text(errors="replace").splitlines()
    except OSError:
        return ()
    return ((folder, pathspec.GitIgnoreSpec.from_lines(lines)),)


def _specs_above(folder: Path) -> _Specs:
    """Those of the folders around it, up to the top of its work tree."""
    above: _Specs = ()
    for parent in folder.parents if not (folder / ".git").exists() else ():
        above = (*_specs_in(parent), *above)
        if (parent / ".git").exists():
            return above
    return ()


def _is_ignored(path: Path, is_folder: bool, specs: _Specs) -> bool:
    for folder, spec in reversed(specs):
        name = path.relative_to(folder).as_posix() + ("/" if is_folder else "")
        said = spec.check_file(name).include
        if said is not None:
            return said
    return False


def read(path: Path) -> Text:
    """A file's text, its line ends as they are.

    Raises:
        BadInputError: it cannot be read, or not be decoded.
    """
    return decoded(path, content(path))


def content(path: Path) -> bytes:
    """A file's bytes.

    Raises:
        BadInputError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInputError(path, f"cannot be read: {error.strerror}") from error


def decoded(path: Path, data: bytes) -> Text:
    """What a file's bytes say.

    Raises:
        BadInputError: they cannot be decoded.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return Text(data.decode(encoding), encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInputError(
            path, f"not {error.encoding}: name its encoding in a comment at its top", line
        ) from error
    except SyntaxError as error:
        raise BadInputError(path, f"not UTF-8, or of an unknown encoding: {error}") from error


def check_writable(path: Path) -> None:
    """Raise BadInputError for a file marked read-only, though root could write it."""
    if not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) or not os.access(
        path, os.W_OK
    ):
        raise BadInputError(path, "read-only: not changed")


def write_all(contents: Mapping[Path, bytes]) -> None:
    """Write files, each whole or not at all, and all of them or none.

    Raises:
        BadInputError: one cannot be written; none has been.
    """
    ready: list[tuple[Path, str]] = []
    before = {path: path.read_bytes() for path in contents}
    try:
        for path, data in contents.items():
            ready.append((path, _beside(path, data)))
    except OSError as error:
        _remove(name for _, name in ready)
        raise BadInputError(path, f"cannot be written: {error.strerror}") from error
    done: list[Path] = []
    try:
        for path, name in ready:
            os.replace(name, path)
            done.append(path)
    except BaseException as error:
        _remove(name for _, name in ready[len(done) :])
        for earlier in done:
            os.replace(_beside(earlier, before[earlier]), earlier)
        if isinstance(error, OSError):
            raise BadInputError(path, f"cannot be written: {error.strerror}") from error
        raise


def _beside(path: Path, data: bytes) -> str:
    """A new file with a file's mode, in its folder."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        shutil.copystat(path, name)
        os.utime(name)
        with contextlib.suppress(PermissionError):
            owner = path.stat()
            os.chown(name, owner.st_uid, owner.st_gid)
    except BaseException:
        _remove([name])
        raise
    return name


def _remove(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.remove(name)
