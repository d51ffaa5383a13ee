"""What the README shows works as pasted."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example(suites):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    path = suites.write("", "test_all_reduce.py", header=blocks[0])
    for command in (
        (str(path),),
        ("-m", "unittest", "test_all_reduce"),
        ("-m", "pytest", "-p", "no:cacheprovider"),
    ):
        run = suites.python(*command)
        assert run.code == 0, run.output
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 11


def test_every_variable_is_told():
    from torchcontinuous import _settings

    for name in vars(_settings).values():
        if isinstance(name, str) and name.startswith("TORCHCONTINUOUS_"):
            assert f"`{name}`" in README


def test_the_two_commands():
    commands = re.findall(r"^pip install .*$", README, re.MULTILINE)
    assert commands == [
        "pip install . && python -m benchmarks --quick",
        "pip install -e '.[test]' && python -m pytest test",
    ]
