"""Shapes of code: each is a file in data/codemod: what goes in, what comes out, what is said.

``UPDATE_SHAPES=1`` writes what comes out, to be read before it is committed.
"""

import ast
import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from test.conftest import ROOT
from torchcontinuous.migrate import __main__ as command

pytest.importorskip("libcst")

FOLDER = Path(__file__).parent / "data" / "codemod"
SHAPES = sorted(FOLDER.glob("*.txt"))
MARK = "=== "


class Shape:
    """One of the files."""

    def __init__(self, path):
        self.path = path
        self.about, self.sections = "", {}
        into = None
        for line in path.read_text().splitlines(keepends=True):
            if line.startswith(MARK):
                into = line.removeprefix(MARK).strip()
                self.sections[into] = ""
            elif into is None:
                self.about += line
            else:
                self.sections[into] += line

    def files(self, kind):
        return {
            name.partition(" ")[2]: text
            for name, text in self.sections.items()
            if name.startswith(f"{kind} ")
        }

    @property
    def arguments(self):
        return shlex.split(self.sections.get("arguments", ""))

    def update(self, after, said):
        kept = {name: text for name, text in self.sections.items() if not name.startswith("after ")}
        changed = {f: text for f, text in after.items() if text != self.files("before")[f]}
        kept |= {f"after {name}": text for name, text in changed.items()}
        kept.pop("says", None)
        kept["says"] = said
        self.path.write_text(
            self.about + "".join(f"{MARK}{name}\n{text}" for name, text in kept.items())
        )


def migrate(folder, *arguments):
    return command.main(["--write", *arguments, str(folder)])


def written(folder, names):
    return {name: (folder / name).read_text() for name in names}


def bases(text):
    """How many parents each class has: names given to them by ``as`` do not come back."""
    return [
        (node.name, len(node.bases))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    ]


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_shape(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shape = Shape(path)
    before = shape.files("before")
    for name, text in before.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    migrate(tmp_path, *shape.arguments)
    printed = capsys.readouterr()
    said = "".join(f"{line}\n" for line in (printed.err + printed.out).splitlines()[:-1])
    after = written(tmp_path, before)
    if os.environ.get("UPDATE_SHAPES"):
        shape.update(after, said)
        shape = Shape(path)
    assert after == before | shape.files("after")
    assert said == shape.sections["says"]

    migrate(tmp_path, *shape.arguments)
    assert written(tmp_path, before) == after, "a second run changes more"

    if not shape.arguments and not any("torchcontinuous" in text for text in before.values()):
        migrate(tmp_path, "--revert")
        reverted = written(tmp_path, before)
        assert not any("torchcontinuous" in text for text in reverted.values())
        assert [bases(reverted[name]) for name in before] == [
            bases(before[name]) for name in before
        ]


def test_there_is_no_shape_without_a_purpose():
    assert all(Shape(path).about.strip() for path in SHAPES)
    assert len(SHAPES) >= 60


#: Shapes that cannot be imported as they stand, before as after.
UNIMPORTABLE = {
    "given_base": "another package",
    "writes": "another module",
    "torchcomms": "needs torchcomms",
    "checkout_of_torch": "no whole torch",
    "old_continuous": "another release of torch",
    "old_continuous_run_rank": "another release of torch",
    "dist_backend": "needs a backend in the environment",
}


def test_results_can_be_imported(tmp_path):
    """As can what went in: in one process, without a nursery."""
    for path in SHAPES:
        shape = Shape(path)
        if path.stem in UNIMPORTABLE:
            continue
        for name, text in (shape.files("before") | shape.files("after")).items():
            file = tmp_path / path.stem / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    driver = tmp_path / "driver.py"
    driver.write_text(
        textwrap.dedent(
            """
            import importlib, pathlib, sys, traceback

            failed = []
            for folder in sorted(p for p in pathlib.Path().iterdir() if p.is_dir()):
                sys.path.insert(0, str(folder.resolve()))
                names = set(sys.modules)
                for file in folder.rglob("*.py"):
                    name = ".".join(file.relative_to(folder).with_suffix("").parts)
                    try:
                        importlib.import_module(name.removesuffix(".__init__"))
                    except BaseException:
                        failed.append(f"{file}: {traceback.format_exc()}")
                sys.path.pop(0)
                for name in set(sys.modules) - names:
                    if not name.startswith(("torch", "numpy")):
                        del sys.modules[name]
            sys.exit("\\n".join(failed) or 0)
            """
        )
    )
    run = subprocess.run(
        [sys.executable, str(driver)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TORCHCONTINUOUS_START_METHOD": "spawn"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-5000:]
