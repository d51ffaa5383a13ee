"""Environment variables: good values, defaults, and a clear error that names the variable."""

import pytest

from torchcontinuous import _settings
from torchcontinuous.errors import ConfigurationError


def test_defaults(monkeypatch):
    for name in (_settings.ISOLATION, _settings.STRICT, _settings.START_METHOD,
                 _settings.START_TIMEOUT, _settings.PRELOAD):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    assert _settings.isolation() is None
    assert _settings.strict() is False
    assert _settings.start_method() == ("fork" if _settings.can_fork() else "spawn")
    assert _settings.start_timeout() == _settings.DEFAULT_START_TIMEOUT
    assert _settings.preload() == ()


def test_values(monkeypatch):
    monkeypatch.setenv(_settings.ISOLATION, "process")
    monkeypatch.setenv(_settings.STRICT, "1")
    monkeypatch.setenv(_settings.START_METHOD, "spawn")
    monkeypatch.setenv(_settings.START_TIMEOUT, "2.5")
    monkeypatch.setenv(_settings.PRELOAD, "json, my.module")
    assert _settings.isolation() == "process"
    assert _settings.strict() is True
    assert _settings.start_method() == "spawn"
    assert _settings.start_timeout() == 2.5
    assert _settings.preload() == ("json", "my.module")


@pytest.mark.parametrize(
    ("name", "reader", "value"),
    [
        (_settings.ISOLATION, _settings.isolation, "thread"),
        (_settings.VERBOSE, _settings.verbose, "very"),
        (_settings.STRICT, _settings.strict, "yes"),
        (_settings.START_METHOD, _settings.start_method, "forkserver"),
        (_settings.START_TIMEOUT, _settings.start_timeout, "soon"),
        (_settings.START_TIMEOUT, _settings.start_timeout, "0"),
        (_settings.START_TIMEOUT, _settings.start_timeout, "nan"),
    ],
)
def test_bad_values_name_the_variable(monkeypatch, name, reader, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        reader()
    assert caught.value.setting == name
    assert caught.value.value == value
    assert name in str(caught.value)
    assert value in str(caught.value)


def test_fork_where_there_is_none(monkeypatch):
    monkeypatch.setattr(_settings, "can_fork", lambda: False)
    monkeypatch.delenv(_settings.START_METHOD, raising=False)
    assert _settings.start_method() == "spawn"
    monkeypatch.setenv(_settings.START_METHOD, "fork")
    with pytest.raises(ConfigurationError, match="can only 'spawn'"):
        _settings.start_method()
