"""The steps that a newcomer tries first work as the docs say."""

from pathlib import Path

from tests.first_program import URL, check_first_program


def test_the_first_program_of_the_readme_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_first_program(URL, tmp_path)
