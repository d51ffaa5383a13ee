"""A verification as the command runs it: files in place, processes, and what is kept on disk, so
that an interrupted one can go on."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchcontinuous.migrate import _files
from torchcontinuous.migrate._files import BadInputError
from torchcontinuous.migrate._project import import_folder, module_name
from torchcontinuous.migrate._report import Progress
from torchcontinuous.migrate._table import Table
from torchcontinuous.migrate._verify import Case, ClassKey, FileRun, Row, Verification

#: Where an interrupted verification is kept, in the working directory.
STATE = Path(".torchcontinuous-migrate.json")

#: Seconds between two looks at a run.
_LOOK = 0.2

#: Seconds that a run has to end by itself once it is told to.
_GRACE = 10.0


@dataclass
class State:
    """What is kept on disk.

    Attributes:
        originals: every file as it was, as bytes.
        written: what the files hold that have been changed.
    """

    originals: dict[Path, bytes]
    written: dict[Path, bytes]
    runs: dict[str, FileRun]
    levels: dict[ClassKey, str]
    reverted: dict[ClassKey, str]

    def save(self) -> None:
        """Write it, whole or not at all."""
        fields = {
            "originals": {str(p): _text(data) for p, data in self.originals.items()},
            "written": {str(p): _text(data) for p, data in self.written.items()},
            "runs": {key: _run_fields(run) for key, run in self.runs.items()},
            "levels": [[str(p), name, level] for (p, name), level in self.levels.items()],
            "reverted": [[str(p), name, why] for (p, name), why in self.reverted.items()],
        }
        temporary = STATE.with_suffix(".new")
        temporary.write_text(json.dumps(fields))
        os.replace(temporary, STATE)

    @classmethod
    def load(cls) -> State:
        """What an interrupted verification left.

        Raises:
            BadInputError: there is none, or it cannot be read.
        """
        try:
            fields = json.loads(STATE.read_text())
            return cls(
                {Path(p): base64.b64decode(data) for p, data in fields["originals"].items()},
                {Path(p): base64.b64decode(data) for p, data in fields["written"].items()},
                {key: _run_of(run) for key, run in fields["runs"].items()},
                {(Path(p), name): level for p, name, level in fields["levels"]},
                {(Path(p), name): why for p, name, why in fields["reverted"]},
            )
        except OSError as error:
            raise BadInputError(STATE, "there is nothing to resume") from error
        except (ValueError, KeyError, TypeError) as error:
            raise BadInputError(STATE, "cannot be read: remove it, and start anew") from error


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _run_fields(run: FileRun) -> dict[str, Any]:
    fields = asdict(run)
    for case in fields["cases"].values():
        case["classes"] = [[str(path), name] for path, name in case["classes"]]
    return fields


def _run_of(fields: dict[str, Any]) -> FileRun:
    cases = {name: _case(case) for name, case in fields["cases"].items()}
    return FileRun(cases, fields["seconds"], fields["problem"])


def _case(fields: Mapping[str, Any]) -> Case:
    return Case(
        fields["outcome"],
        fields["text"],
        fields["seconds"],
        fields.get("leaked", False),
        tuple((Path(path), name) for path, name in fields["classes"]),
    )


class Session:
    """Verifies files in place.

    Attributes:
        bad: files that cannot be read.

    Args:
        runner: ``"unittest"`` or ``"pytest"``.
        timeout: seconds that one run of a file may take.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        table: Table,
        runner: str,
        seed: int,
        timeout: float,
        resume: bool,
    ) -> None:
        self._runner, self._timeout = runner, timeout
        self.bad: list[BadInputError] = []
        self._state = State.load() if resume else self._new(paths)
        self._progress = Progress()
        self._check_unchanged()
        texts = {path: _files.decoded(path, data) for path, data in self._state.originals.items()}
        self._texts = texts
        self.verification = Verification(
            texts,
            table,
            self._run,
            self._put,
            seed,
            self._state.runs,
            self._state.levels,
            self._state.reverted,
        )

    def _new(self, paths: Sequence[Path]) -> State:
        if STATE.exists():
            raise BadInputError(
                STATE, "an interrupted verification is kept here: --resume it, or remove the file"
            )
        originals = {}
        for path in paths:
            try:
                text = _files.read(path)
                originals[path] = text.encode(text.text)
            except BadInputError as error:
                self.bad.append(error)
        return State(originals, {}, {}, {}, {})

    def _check_unchanged(self) -> None:
        """A file may hold what it held, or what we wrote: nothing else is overwritten."""
        for path, original in self._state.originals.items():
            if _files.content(path) not in (original, self._state.written.get(path)):
                raise BadInputError(path, f"changed since it was verified: remove {STATE}")

    def verify(self) -> list[Row]:
        """Run all; the files are migrated afterwards, or as they were if it is interrupted."""
        with _terminated_as_interrupt():
            try:
                self._state.save()
                rows = self.verification.verify()
            except BaseException:
                self._put({})
                self._state.save()
                raise
        STATE.unlink(missing_ok=True)
        return rows

    # Files

    def _put(self, texts: Mapping[Path, str]) -> None:
        wanted = {path: self._texts[path].encode(text) for path, text in texts.items()}
        changes = {}
        for path in {*wanted, *self._state.written}:
            data = wanted.get(path, self._state.originals[path])
            if _files.content(path) != data:
                changes[path] = data
        if not changes:
            return
        # Before the files: what is found on disk afterwards is known as ours.
        self._state.written = {**self._state.written, **wanted}
        self._state.save()
        _files.write_all(changes)

    # Processes

    def _run(self, path: Path, arm: str, order: str) -> FileRun:
        name = f"{_files.shown(path)}, {arm}, {order}"
        with tempfile.TemporaryDirectory(prefix="torchcontinuous-migrate-") as folder:
            notes, log = Path(folder, "notes"), Path(folder, "log")
            notes.touch()
            with log.open("wb") as output:
                process = subprocess.Popen(
                    self._command(path, order, notes),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                late = self._wait(process, notes, name)
            run = read_notes(notes, process.returncode, late)
            if run.problem:
                sys.stderr.write("".join(f"    {line}\n" for line in _tail(log)))
        self._progress.ended(f"{name}: {_counted(run)} in {run.seconds:.1f} s{_problem(run)}")
        self.note(path, arm, order, run)
        return run

    def note(self, path: Path, arm: str, order: str, run: FileRun) -> None:
        """Keep what a run gave, at once."""
        self._state.runs[self.verification.key(path, arm, order)] = run
        self._state.save()

    def _command(self, path: Path, order: str, notes: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "torchcontinuous.migrate._run",
            f"--order={order}",
            f"--runner={self._runner}",
            f"--notes={notes}",
            f"--folder={import_folder(path)}",
            f"--module={module_name(path)}",
            str(path),
        ]

    def _wait(self, process: subprocess.Popen[bytes], notes: Path, name: str) -> str | None:
        """Wait for a run, showing how far it is; why it was given up, if it was."""
        started = time.monotonic()
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK)
                    return None
                lines = [json.loads(line) for line in _whole_lines(notes)]
                planned = next((line["planned"] for line in lines if "planned" in line), None)
                done = sum(1 for line in lines if "id" in line)
                self._progress.running(name, done, planned, self._left(time.monotonic() - started))
                if time.monotonic() - started > self._timeout:
                    return f"given up after {self._timeout:g} s"
        finally:
            _end(process)

    def _left(self, running: float) -> float | None:
        """About how long the rest takes, going by the runs of the same kind so far."""
        seconds: dict[str, list[float]] = {}
        for key, run in self._state.runs.items():
            seconds.setdefault(key.split("|")[1], []).append(run.seconds)
        remaining = self.verification.remaining()
        if not all(arm in seconds for _, arm, _ in remaining):
            return None
        each = (sum(seconds[arm]) / len(seconds[arm]) for _, arm, _ in remaining)
        return max(sum(each) - running, 0.0)


def _end(process: subprocess.Popen[bytes]) -> None:
    """See to it that a run, and what it started in its session, is over."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        if process.poll() is not None and number is signal.SIGINT:
            continue
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM as Ctrl-C: the files are put back."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def read_notes(path: Path, code: int | None, late: str | None) -> FileRun:
    """What the process that ran a file has noted.

    Args:
        code: its exit code.
        late: why it was given up, if it was.
    """
    lines = [json.loads(line) for line in _whole_lines(path)]
    cases = {line["id"]: _case(line) for line in lines if "id" in line}
    ended = next((line["ended"] for line in lines if "ended" in line), None)
    if ended is None or late:
        how = late or f"its process ended early, with exit code {code}"
        return FileRun(cases, sum(case.seconds for case in cases.values()), how)
    return FileRun(cases, ended)


def _tail(log: Path, lines: int = 20) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-lines:]


def _counted(run: FileRun) -> str:
    outcomes = [case.outcome for case in run.cases.values()]
    return ", ".join(f"{outcomes.count(o)} {o}" for o in dict.fromkeys(outcomes)) or "no tests"


def _problem(run: FileRun) -> str:
    return f"; {run.problem}" if run.problem else ""
