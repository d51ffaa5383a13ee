"""Modules import only from the layers above them, and torch only where it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import torchcontinuous

PACKAGE = Path(torchcontinuous.__file__).parent

LAYERS = {
    "_version": 0, "errors": 0, "_settings": 0, "_report": 0, "_torch_api": 0,
    "_torch_state": 0, "_counts": 0, "_order": 0, "_devices": 0, "_hang": 0,
    "_messages": 1,
    "_channel": 2,
    "_context": 3, "_output": 3, "_process_group": 3, "_class_group": 3, "_meshes": 3,
    "_probes": 3, "_snapshots": 3, "_process_probes": 3, "_resource_probes": 3,
    "_torch_probes": 3, "_module_probes": 3, "_state_guard": 3,
    "_single": 4,
    "_worker": 5,
    "_nursery": 6, "_processes": 6, "_launcher": 6,
    "_generation": 7, "_pool": 7,
    "_registry": 8, "_leaks": 8, "_handles": 8, "_rerun": 8, "testcase": 8,
    "bases": 9, "_bisect": 9, "_adoption": 9, "_summary": 1, "__init__": 10,
    "_running": 11, "__main__": 12, "pytest_plugin": 12,
    # Layers of its own: it is about text, and runs suites in other processes.
    "migrate._files": 0, "migrate._table": 0, "migrate._module": 1, "migrate._project": 2,
    "migrate._judge": 3, "migrate._spawning": 3, "migrate._imports": 3, "migrate._edit": 4,
    "migrate._plan": 5, "migrate._reversal": 6, "migrate._run": 6, "migrate._verify": 6,
    "migrate._report": 7, "migrate._session": 8, "migrate._command": 9,
    "migrate.__init__": 10, "migrate.__main__": 10,
}  # fmt: skip

#: Within a layer: who may import whom.
WITHIN = {
    ("_settings", "errors"), ("_torch_state", "_devices"), ("_torch_api", "errors"),
    ("_report", "_hang"),
    ("_process_group", "_class_group"), ("_process_group", "_context"),
    ("_snapshots", "_probes"), ("_process_probes", "_probes"), ("_process_probes", "_snapshots"),
    ("_resource_probes", "_probes"), ("_torch_probes", "_probes"), ("_module_probes", "_probes"),
    ("_module_probes", "_snapshots"), ("_state_guard", "_probes"),
    ("_state_guard", "_process_probes"), ("_state_guard", "_resource_probes"),
    ("_state_guard", "_torch_probes"), ("_state_guard", "_module_probes"),
    ("_processes", "_nursery"), ("_launcher", "_nursery"), ("_launcher", "_processes"),
    ("_pool", "_generation"),
    ("testcase", "_rerun"), ("testcase", "_handles"), ("testcase", "_registry"),
    ("testcase", "_leaks"), ("_registry", "_leaks"), ("_adoption", "bases"),
}  # fmt: skip


def imported(module):
    """The package's modules that a module imports, anywhere in its text."""
    path = PACKAGE / f"{module.replace('.', '/')}.py"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchcontinuous"):
            _, _, name = (node.module or "").partition(".")
            if name in ("", "migrate"):
                prefix = f"{name}." if name else ""
                yield from (f"{prefix}{alias.name}" for alias in node.names)
            else:
                yield name
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.partition(".")[2]
                for alias in node.names
                if alias.name.startswith("torchcontinuous")
            )


def test_every_module_has_a_layer():
    found = {".".join(p.relative_to(PACKAGE).with_suffix("").parts) for p in PACKAGE.rglob("*.py")}
    assert found == set(LAYERS)


def test_imports_go_downwards():
    wrong = [
        f"{module} imports {name}"
        for module, layer in LAYERS.items()
        for name in imported(module)
        if not (LAYERS[name] < layer or (module, name) in WITHIN)
    ]
    assert wrong == []


def test_importing_the_package_does_not_import_torch():
    code = "import sys, torchcontinuous; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
