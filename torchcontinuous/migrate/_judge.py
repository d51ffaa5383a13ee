"""Signs that a class, or one of its tests, cannot share workers: seen in its text, so a guess that
running it (``--verify``) has to confirm."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchcontinuous import _devices
from torchcontinuous.migrate import _files
from torchcontinuous.migrate._module import ClassDef, Module
from torchcontinuous.migrate._table import RPC_FIXTURES

LEVELS = ("none", "group", "process")


@dataclass(frozen=True)
class Sign:
    """Something in the text that says how far workers can be shared.

    Attributes:
        level: what it calls for; ``"none"`` for what is only worth a note.
    """

    path: Path
    line: int
    text: str
    level: str = "none"

    def __str__(self) -> str:
        return f"{_files.shown(self.path)}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Judgement:
    """How far a class's own text lets it share workers.

    Attributes:
        of_class: signs that concern all its tests.
        of_tests: by test, the signs that concern it alone.
    """

    of_class: tuple[Sign, ...]
    of_tests: Mapping[str, tuple[Sign, ...]]

    @property
    def level(self) -> str:
        """For the whole class."""
        return strictest(sign.level for sign in self.of_class)

    @property
    def test_levels(self) -> dict[str, str]:
        """For the tests that need more than the class."""
        levels = {name: strictest(s.level for s in signs) for name, signs in self.of_tests.items()}
        return {
            name: level
            for name, level in levels.items()
            if LEVELS.index(level) > LEVELS.index(self.level)
        }

    @property
    def signs(self) -> list[Sign]:
        found = [*self.of_class, *(sign for signs in self.of_tests.values() for sign in signs)]
        return list(dict.fromkeys(found))


def strictest(levels: Iterable[str]) -> str:
    return max(levels, key=LEVELS.index, default="none")


_DEATH = "ends or signals a process"
_RPC = "RPC keeps state of the whole process"
_OWN_PROCESSES = "starts processes of its own"
_ABORT = "aborts a process group"

#: Calls by dotted name (as a regular expression on the whole of it): level and reason.
_CALLS = [
    (re.compile(pattern), level, reason)
    for pattern, level, reason in (
        (r"os\.(_exit|abort|kill|killpg)|signal\.(raise_signal|pthread_kill)", "process", _DEATH),
        (r"faulthandler\._\w+|ctypes\.string_at", "process", _DEATH),
        (r"os\.(fork|forkpty)", "process", _OWN_PROCESSES),
        (r"torch\.distributed\.rpc\.\w+(\.\w+)*|(.*\.)?(init_rpc|dist_init)", "process", _RPC),
        (r"(.*\.)?(_abort_process_group|_abort|abort|shrink_group)", "process", _ABORT),
        (
            r"(torch\.)?multiprocessing\.(\w+\.)*(Process|Pool|Manager|spawn|start_processes|"
            r"get_context|SpawnContext)|concurrent\.futures\.(\w+\.)?ProcessPoolExecutor",
            "process",
            _OWN_PROCESSES,
        ),
        (r"(.*\.)?set_start_method", "process", "sets the start method of processes"),
        (r"torch\.set_num_interop_threads", "process", "can be set once in a process"),
        (
            r"torch\.library\.(Library|define|impl|custom_op|register_\w+)",
            "process",
            "registers operators, which stay registered",
        ),
        (
            r"(.*\.)?(register_backend|register_rendezvous_handler)",
            "process",
            "registers what stays registered in the process",
        ),
        (r"subprocess\.\w+|os\.(system|popen|spawn\w+)", "none", "starts a command"),
        (r"threading\.(Thread|Timer)|(.*\.)?ThreadPoolExecutor", "none", "starts threads"),
        (
            r"torch\.(set_default_\w+|set_num_threads|use_deterministic_algorithms|"
            r"set_float32_matmul_precision|set_grad_enabled|set_printoptions)",
            "none",
            "sets what holds for all of torch",
        ),
        (r"os\.(chdir|umask|putenv|unsetenv)", "none", "changes its process"),
    )
]

#: What native code reads once in a process: a test that sets one needs workers of its own.
_READ_ONCE = re.compile(
    r"(TORCH_)?(NCCL|GLOO|UCC|XCCL)_\w+|TORCH_(DISTRIBUTED|CPP|LOGS|SHOW|FR)\w*|OMP_\w+|"
    r"MKL_\w+|KMP_\w+|PYTORCH_\w+|TORCHINDUCTOR_\w+|TORCHDYNAMO_\w+|LD_\w+|"
    rf"({'|'.join(_devices.PREFIXES_ON_FIRST_USE)})\w+|{'|'.join(_devices.VARIABLES_ON_LOAD)}"
)

_WATCHDOG = re.compile(r"watchdog|desync|flight_?recorder|heartbeat|nccl_?error", re.IGNORECASE)

#: Overrides of what stock does around a test.
_OVERRIDES = {
    "_join_processes": ("process", "has its own way to join its processes"),
    "_check_return_codes": ("process", "has its own way to check return codes"),
    "_run": ("none", "has a _run of its own, which is called as stock calls it"),
    "run_test": ("none", "has a run_test of its own, which is called as stock calls it"),
    "_spawn_processes": ("none", "has a _spawn_processes of its own"),
}

_RETURN_CODES = ("special_return_code_checks", "skip_return_code_checks")


def judge(found: ClassDef) -> Judgement:
    """What a class's own text says."""
    return _Judge(found).judgement()


class _Judge:
    def __init__(self, found: ClassDef) -> None:
        self._class = found
        self._module = found.module
        self._names = _imported_names(found.module)

    def judgement(self) -> Judgement:
        of_class = [*self._of_parents(), *self._of_module(), *self._of_overrides()]
        of_tests: dict[str, list[Sign]] = {name: [] for name in self._class.tests}
        for name in self._class.methods:
            signs = list(self._reached(name))
            (of_tests[name] if name in of_tests else _ours(name, of_class)).extend(signs)
        for sign, tests in self._return_codes():
            own = [test for test in tests if test in of_tests]
            for test in own:
                of_tests[test].append(sign)
            if not own:
                # Of tests that are defined elsewhere, it is enough that they declared it.
                of_class.append(dataclasses.replace(sign, level="none") if tests else sign)
        shared = _shared_by_all(of_tests)
        return Judgement(
            tuple(dict.fromkeys([*of_class, *shared])),
            {name: tuple(dict.fromkeys(signs)) for name, signs in of_tests.items() if signs},
        )

    def _sign(self, node: ast.AST, text: str, level: str = "none") -> Sign:
        return Sign(self._module.path, getattr(node, "lineno", self._class.line), text, level)

    # The class as a whole

    def _of_parents(self) -> Iterator[Sign]:
        for base in self._class.code.bases:
            name = _dotted(base) or ""
            if name.rpartition(".")[2] in RPC_FIXTURES:
                yield self._sign(self._class.code, f"derives from {name}: {_RPC}", "process")
        if not self._class.tests:
            for node in self._module.code.body:
                if isinstance(node, (ast.Import, ast.ImportFrom)) and _imports_rpc_tests(node):
                    text = f"a base for tests of RPC: {_RPC}"
                    yield self._sign(node, text, "process")
                    return

    def _of_module(self) -> Iterator[Sign]:
        for node in self._module.code.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                continue
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                continue
            for part in ast.walk(node):
                name = self._environment_written(part)
                if name is not None:
                    yield self._sign(part, f"sets {name} when it is imported")
                    continue
                called = (self._dotted(part.func) or "") if isinstance(part, ast.Call) else ""
                if called.endswith("set_start_method") or called.startswith("torch.set_"):
                    yield self._sign(part, f"calls {called}() when it is imported")

    def _of_overrides(self) -> Iterator[Sign]:
        for name, (level, reason) in _OVERRIDES.items():
            if name in self._class.methods:
                yield self._sign(self._class.methods[name], reason, level)

    def _return_codes(self) -> Iterator[tuple[Sign, list[str]]]:
        if not self._module.words.intersection(_RETURN_CODES):
            return
        for method in self._class.methods.values():
            for node in ast.walk(method):
                if not (isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Call))):
                    continue
                text = ast.unparse(node)
                names = [name for name in _RETURN_CODES if f"self.{name}" in text]
                if not names or not _has_values(node):
                    continue
                tests = list(re.findall(r"self\.(test\w*)\.__wrapped__", text))
                reason = f"its exit code is declared ({names[0]})"
                yield self._sign(node, reason, "process"), tests

    # Functions, and those that they call

    def _reached(self, method: str) -> Iterator[Sign]:
        """The signs in a method, and in what it calls within its file."""
        pending: list[ast.FunctionDef] = [self._class.methods[method]]
        seen: set[int] = set()
        while pending:
            function = pending.pop()
            if id(function) in seen:
                continue
            seen.add(id(function))
            yield from self._in(function, method.startswith("test"))
            pending += self._called(function)

    def _called(self, function: ast.FunctionDef) -> Iterator[ast.FunctionDef]:
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and _is_self(node.value):
                if node.attr in self._class.methods and not node.attr.startswith("test"):
                    yield self._class.methods[node.attr]
            elif isinstance(node, ast.Name) and node.id in self._module.functions:
                yield self._module.functions[node.id]

    def _in(self, function: ast.FunctionDef, in_test: bool) -> Iterator[Sign]:
        if _WATCHDOG.search(function.name):
            yield self._sign(function, "a test of the watchdog", "process")
        yield from self._of_groups(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                yield from self._of_call(node)
            elif self._dotted(node) == _RPC_WITH_COMMS and not _without_rpc(function):
                yield self._sign(function, f"with_comms starts RPC: {_RPC}", "process")
            yield from self._of_write(node, in_test)

    def _of_call(self, call: ast.Call) -> Iterator[Sign]:
        name = self._dotted(call.func) or (
            f"?.{call.func.attr}" if isinstance(call.func, ast.Attribute) else ""
        )
        if name == "sys.exit" and _is_code(call):
            yield self._sign(call, f"ends with a code of its own: {ast.unparse(call)}", "process")
        for pattern, level, reason in _CALLS:
            if pattern.fullmatch(name):
                shown = name.removeprefix("?.")
                yield self._sign(call, f"{shown}(): {reason}", level)
                return

    def _of_groups(self, function: ast.FunctionDef) -> Iterator[Sign]:
        """Tests of making and destroying groups, as against tests that only need one."""
        made = [n for n in ast.walk(function) if self._calls(n, "init_process_group")]
        if len(made) > 1 and function.name.startswith("test"):
            yield self._sign(made[1], "makes the default process group more than once", "group")
        for node in ast.walk(function):
            if isinstance(node, ast.With) and any(
                "assertRaises" in ast.unparse(item.context_expr) for item in node.items
            ):
                for name in ("init_process_group", "destroy_process_group"):
                    if any(self._calls(part, name) for part in ast.walk(node)):
                        yield self._sign(node, f"a test of {name} itself", "group")
        if re.match(r"test\w*_(init|destroy)\w*_(pg|process_group|group)", function.name):
            yield self._sign(function, "a test of making or destroying process groups", "group")

    def _calls(self, node: ast.AST, name: str) -> bool:
        return isinstance(node, ast.Call) and (_dotted(node.func) or "").split(".")[-1] == name

    def _of_write(self, node: ast.AST, in_test: bool) -> Iterator[Sign]:
        name = self._environment_written(node)
        if name is not None:
            once = in_test and _READ_ONCE.fullmatch(name)
            text = f"sets {name}" + (", which is read once in a process" if once else "")
            yield self._sign(node, text, "process" if once else "none")
            return
        for target in _targets_of(node):
            written = self._dotted(target) or ""
            if re.match(r"(cls|type|self\.__class__)\.\w+$", written) or (
                written.startswith(f"{self._class.code.name}.")
            ):
                yield self._sign(node, f"changes the class: {written}")
            elif written.startswith("torch."):
                yield self._sign(node, f"changes {written}")
            elif written.split(".")[0] in self._names and "." in written:
                yield self._sign(node, f"changes another module: {written}", "process")
        if isinstance(node, ast.Global):
            yield self._sign(node, f"changes the module: {', '.join(node.names)}")

    def _environment_written(self, node: ast.AST) -> str | None:
        for target in _targets_of(node):
            if isinstance(target, ast.Subscript) and self._dotted(target.value) == "os.environ":
                return _text(target.slice)
        if isinstance(node, ast.Call):
            called = self._dotted(node.func)
            if called in ("os.environ.setdefault", "os.environ.pop", "os.putenv") and node.args:
                return _text(node.args[0])
            if called == "os.environ.update":
                return "environment variables"
        return None

    def _dotted(self, node: ast.AST) -> str | None:
        """A dotted name, its head as it was imported."""
        text = _dotted(node)
        if text is None:
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "type(self)":
                return f"type.{node.attr}"
            return None
        head, dot, rest = text.partition(".")
        return self._names.get(head, head) + dot + rest


_RPC_WITH_COMMS = "torch.testing._internal.distributed._shard.sharded_tensor.with_comms"


def _ours(name: str, of_class: list[Sign]) -> list[Sign]:
    """Where the signs of a method that is no test go: a helper's come with its tests."""
    lifecycle = {"setUp", "tearDown", "_run", "run_test", "__init__", "setUpClass", "tearDownClass"}
    return of_class if name in lifecycle else []


def _shared_by_all(of_tests: dict[str, list[Sign]]) -> list[Sign]:
    """Where every test needs fresh processes, the class does."""
    levels = [strictest(sign.level for sign in signs) for signs in of_tests.values()]
    if len(levels) > 1 and all(level == "process" for level in levels):
        return [sign for signs in of_tests.values() for sign in signs]
    return []


@functools.lru_cache(maxsize=64)
def _imported_names(module: Module) -> dict[str, str]:
    names = {}
    for node in ast.walk(module.code):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    names[alias.asname] = alias.name
                else:
                    head = alias.name.partition(".")[0]
                    names[head] = head
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            names.update({a.asname or a.name: f"{prefix}.{a.name}" for a in node.names})
    return names


def _imports_rpc_tests(node: ast.Import | ast.ImportFrom) -> bool:
    fixtures = "torch.testing._internal.distributed.rpc"
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith(fixtures)
    return any(alias.name.startswith(fixtures) for alias in node.names)


def _dotted(node: ast.AST) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _targets_of(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return [node.target]
    return list(node.targets) if isinstance(node, ast.Delete) else []


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node)


def _has_values(node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Call) -> bool:
    """Not an empty list or dictionary."""
    value = node if isinstance(node, ast.Call) else node.value
    empty = isinstance(value, (ast.List, ast.Tuple)) and not value.elts
    return not empty and not (isinstance(value, ast.Dict) and not value.keys)


def _is_code(call: ast.Call) -> bool:
    """Whether sys.exit is given an exit code that is neither success nor one of stock's skips."""
    if not call.args:
        return False
    argument = call.args[0]
    if isinstance(argument, ast.Constant):
        return argument.value not in (0, None)
    return "exit_code" not in ast.unparse(argument)


def _without_rpc(function: ast.FunctionDef) -> bool:
    return any("init_rpc=False" in ast.unparse(d) for d in function.decorator_list)
