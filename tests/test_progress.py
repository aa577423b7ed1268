"""Progress: a log gets whole stamped lines, few of them; a terminal gets a bar."""

from __future__ import annotations

import re

import pytest

from d2lib import progress


def show(total: int, **options: object) -> None:
    with progress.bar(total, "work", "step", **options) as bar:  # type: ignore[arg-type]
        for _ in range(total):
            bar.update()


def test_a_log_gets_few_whole_stamped_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(progress.TERMINAL, raising=False)
    show(5000)
    text = capsys.readouterr().err
    assert "\r" not in text
    assert text.endswith("\n")
    lines = text.splitlines()
    assert 1 <= len(lines) <= 3
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ work:", line) for line in lines)
    assert "5000/5000" in lines[-1]


def test_a_log_gets_a_line_in_every_interval(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(progress.TERMINAL, raising=False)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    show(20)
    assert len(capsys.readouterr().err.splitlines()) >= 20


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress.TERMINAL, "1")
    show(3)
    assert "\rwork: 100%|" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", ["0", "1"])
def test_silence(terminal: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress.TERMINAL, terminal)
    show(3, shown=False)
    assert capsys.readouterr().err == ""
