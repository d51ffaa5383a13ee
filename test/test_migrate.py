"""The migration codemod: files, bad input and modes. What becomes of code: test_migrate_shapes."""

import ast
import difflib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from test.conftest import ROOT
from torchcontinuous.migrate import __main__ as command

pytest.importorskip("libcst")

STOCK = """\
from torch.testing._internal.common_distributed import MultiProcessTestCase


class TestIt(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_one(self):
        pass
"""

OURS = STOCK.replace("torch.testing._internal.common_distributed", "torchcontinuous").replace(
    "MultiProcessTestCase", "MultiProcContinuousTest"
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_default_prints_a_diff_and_writes_nothing(project, capsys):
    file = project / "test_it.py"
    file.write_text(STOCK)
    assert command.main(["."]) == 0
    out = capsys.readouterr().out
    assert "-class TestIt(MultiProcessTestCase):\n+class TestIt(MultiProcContinuousTest):" in out
    assert "test_it.py:4: TestIt: shares workers" in out
    assert file.read_text() == STOCK


def test_check(project):
    (project / "test_it.py").write_text(STOCK)
    assert command.main(["--check", "."]) == 1
    assert command.main(["--write", "."]) == 0
    assert command.main(["--check", "."]) == 0
    assert (project / "test_it.py").read_text() == OURS


def test_revert(project):
    (project / "test_it.py").write_text(OURS)
    assert command.main(["--revert", "--write", "."]) == 0
    assert (project / "test_it.py").read_text() == STOCK


def test_a_class_that_cannot_be_migrated_is_a_finding(project):
    (project / "test_it.py").write_text(
        STOCK.replace("    def setUp", "    guard = 1\n\n    def setUp")
    )
    assert command.main(["--write", "."]) == 1


@pytest.mark.parametrize(
    ("encoding", "cookie", "newline"),
    [
        ("utf-8", "", "\n"),
        ("utf-8", "", "\r\n"),
        ("utf-8-sig", "", "\n"),
        ("latin-1", "# -*- coding: latin-1 -*-\n", "\n"),
        ("utf-8", "#!/usr/bin/env python\n# vim: set fileencoding=utf-8\n", "\r\n"),
    ],
)
def test_encoding_line_ends_and_mode_are_kept(project, encoding, cookie, newline):
    def data(text):
        whole = f"{cookie}{text}\n\n# Grüße:\ttab, no newline at the end"
        return whole.replace("\n", newline).encode(encoding)

    file = project / "test_it.py"
    file.write_bytes(data(STOCK))
    file.chmod(0o751)
    assert command.main(["--write", "test_it.py"]) == 0
    assert file.read_bytes() == data(OURS)
    assert file.stat().st_mode & 0o777 == 0o751


def test_gitignored_files_are_left_out_unless_named(project):
    (project / ".git").mkdir()
    (project / ".gitignore").write_text("/build/\ngenerated_*.py\n!generated_kept.py\n")
    names = ["build/a.py", "sub/b.py", "sub/generated_x.py", "sub/generated_kept.py", "sub/c.py"]
    for name in names:
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(STOCK)
    (project / "sub" / ".gitignore").write_text("c.py\n")
    command.main(["--write", "sub", "build/a.py"])
    changed = [name for name in names if (project / name).read_text() == OURS]
    assert changed == ["build/a.py", "sub/b.py", "sub/generated_kept.py"]


BAD = {
    "syntax.py": (STOCK + "def (:\n", "syntax.py:11: a syntax error"),
    "latin.py": (STOCK.encode() + b"# \xe9\n", "latin.py:11: not utf-8"),
    "cookie.py": (
        b"# coding: nonsense\n" + STOCK.encode(),
        "cookie.py: not UTF-8, or of an unknown",
    ),
    "python2.py": (STOCK + 'print "x"\n', "(Python 2?"),
    "null.py": (STOCK + "\0", "null.py"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_get_a_line_each_and_the_rest_goes_on(project, name, capsys):
    content, line = BAD[name]
    content = content.encode() if isinstance(content, str) else content
    (project / name).write_bytes(content)
    (project / "good.py").write_text(STOCK)
    assert command.main(["--write", "."]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert line in errors[0]
    assert (project / name).read_bytes() == content
    assert (project / "good.py").read_text() == OURS


def test_an_empty_file_is_nothing(project):
    (project / "empty.py").touch()
    assert command.main(["--write", "."]) == 0


def test_read_only_files_are_not_changed(project, capsys):
    file = project / "test_it.py"
    file.write_text(STOCK)
    file.chmod(0o444)
    (project / "good.py").write_text(STOCK)
    assert command.main(["--write", "."]) == 2
    assert capsys.readouterr().err == "test_it.py: read-only: not changed\n"
    assert file.read_text() == STOCK
    assert (project / "good.py").read_text() == OURS


@pytest.mark.parametrize("read_only", [False, True])
def test_what_derives_from_a_file_that_stays_as_it_is(project, capsys, read_only):
    """Not given, or read-only: the base is where the change belongs, so nothing changes."""
    base = project / "common.py"
    base.write_text(STOCK)
    test = project / "test_it.py"
    test.write_text("from common import TestIt\n\n\nclass TestMore(TestIt):\n    pass\n")
    before = test.read_text()
    if read_only:
        base.chmod(0o444)
    status = command.main(["--write", "." if read_only else "test_it.py"])
    assert status == (2 if read_only else 1)
    reason = "its file is read-only" if read_only else "its file is not among those given"
    assert (
        "test_it.py:4: TestMore: cannot be migrated\n"
        f"    common.py:4: it derives from TestIt: {reason}\n"
    ) in capsys.readouterr().out
    assert (base.read_text(), test.read_text()) == (STOCK, before)


def test_links(project, capsys):
    (project / "test_it.py").write_text(STOCK)
    (project / "loop.py").symlink_to("loop.py")
    (project / "sub").mkdir()
    (project / "sub" / "again").symlink_to(project)
    (project / "link.py").symlink_to("test_it.py")
    assert command.main(["--write", "."]) == 2
    assert capsys.readouterr().err == (
        "loop.py: cannot be read: Too many levels of symbolic links\n"
    )
    assert (project / "link.py").is_symlink()
    assert (project / "test_it.py").read_text() == OURS


def test_a_file_that_is_not_there(project, capsys):
    (project / "gone.py").symlink_to("nowhere.py")
    assert command.main(["--write", "."]) == 2
    assert "gone.py: cannot be read: No such file" in capsys.readouterr().err
    assert command.main(["missing"]) == 2
    assert "missing: no such file or folder" in capsys.readouterr().err


def test_a_file_without_permission(project, capsys, monkeypatch):
    """Root may read all: what the system says to others is made up."""
    (project / "test_it.py").write_text(STOCK)
    (project / "secret.py").write_text(STOCK)
    read = Path.read_bytes

    def refuses(path):
        if path.name == "secret.py":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuses)
    assert command.main(["--write", "."]) == 2
    assert capsys.readouterr().err == "secret.py: cannot be read: Permission denied\n"
    assert (project / "test_it.py").read_text() == OURS


def test_all_files_are_written_or_none(project, capsys, monkeypatch):
    for name in ("a.py", "b.py", "c.py"):
        (project / name).write_text(STOCK)
    replace, calls = os.replace, []

    def fails_once(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails_once)
    assert command.main(["--write", "."]) == 2
    assert "No space left on device; nothing was written" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in project.iterdir()} == dict.fromkeys(
        ("a.py", "b.py", "c.py"), STOCK
    )


def test_without_the_extra_a_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "libcst", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command.main(["."]) == 2
    assert "pip install 'torchcontinuous[migrate]'" in capsys.readouterr().err


def test_a_base_without_a_module_is_bad(capsys):
    with pytest.raises(SystemExit) as error:
        command.main(["--base", "Foo", "."])
    assert error.value.code == 2


BY_HAND = sorted((Path(__file__).parent / "data" / "bases").glob("stock_*.py"))


@pytest.mark.parametrize("stock", BY_HAND, ids=lambda path: path.stem)
def test_suites_on_torchs_bases_become_what_was_made_by_hand(project, stock):
    """But for isolation, which the codemod asks for. That outcomes are stock's: test_bases."""
    (project / "test_it.py").write_text(stock.read_text())
    assert command.main(["--write", "."]) == 0
    migrated, by_hand = (
        ast.parse(path.read_text())
        for path in (
            project / "test_it.py",
            stock.with_name(stock.name.replace("stock_", "continuous_")),
        )
    )
    assert imported(migrated) == imported(by_hand)
    assert without_imports(migrated) == without_imports(by_hand)


def imported(code):
    return {
        (getattr(node, "module", None), alias.name)
        for node in ast.walk(code)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if alias.name != "isolated"
    }


def without_imports(code):
    statements = [n for n in code.body if not isinstance(n, (ast.Import, ast.ImportFrom))]
    lines = (line for n in statements for line in ast.unparse(n).splitlines())
    return [line for line in lines if line.strip() != "@isolated('process')"]


#: The parts of torch's folder that hold classes of tests and are read in seconds.
PARTS = ("_tensor/common_dtensor.py", "_shard/sharded_tensor/__init__.py", "rpc_utils.py")


def test_torchs_own_folder(project, capsys):
    """A copy of it: nothing but parents, their imports and isolation changes, and it imports."""
    source = Path(importlib.util.find_spec("torch").origin).parent
    source = source / "testing" / "_internal" / "distributed"
    before = {}
    for name in PARTS:
        target = project / "theirs" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, target)
        before[name] = target.read_text()
    assert command.main(["--write", "theirs"]) == 1
    said = capsys.readouterr().out
    assert "DTensorTestBase: shares workers" in said
    assert "DTensorContinuousTestBase: cannot be migrated" in said, "its local form changes it"
    assert "SpawnHelper: needs fresh processes" in said
    changed = [
        line
        for name in PARTS
        for line in difflib.ndiff(
            before[name].splitlines(), (project / "theirs" / name).read_text().splitlines()
        )
        if line.startswith(("+ ", "- ")) and line[2:].strip()
    ]
    expected = ("from torchcontinuous import", "class ", 'isolation = "process"')
    assert all(line[2:].strip().startswith(expected) for line in changed if line[0] == "+")
    code = "import runpy, sys\nfor name in sys.argv[1:]: runpy.run_path(f'theirs/{name}')\n"
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TORCHCONTINUOUS_START_METHOD": "spawn"}
    run = subprocess.run(
        [sys.executable, "-c", code, *PARTS],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_a_long_file(project, capsys, record_property):
    """20,000 lines; how long it took is reported."""
    body = "".join(
        f"\n    def test_{number}(self):\n        self.assertEqual(self.rank, {number})\n"
        "        self.assertTrue(self.world_size)\n        del self.x\n"
        for number in range(4000)
    )
    text = STOCK.replace("        pass\n", "        pass\n" + body)
    assert text.count("\n") > 20_000
    (project / "test_it.py").write_text(text)
    started = time.monotonic()
    assert command.main(["--write", "."]) == 0
    record_property("seconds", time.monotonic() - started)
    print(f"{time.monotonic() - started:.1f} s")
    assert (project / "test_it.py").read_text() == OURS.replace(
        "        pass\n", "        pass\n" + body
    )
