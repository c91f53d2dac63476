"""Tests of words that the files of the project may not have, and of those that they must have."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.house.rooms import ROOT, packages

# In pieces, so that this file passes its own test.
FOREIGN = re.compile(
    "|".join(
        first + second
        for first, second in [
            ("/wo", "rk/"),
            ("/fa", "rm/"),
            ("/tmp/te", "am"),
            (r"maven\.", "org"),
            (r"maven\.", "apache"),
            (r"pypi\.", "org"),
            ("python", "hosted"),
            ("npm", "js"),
            ("pip install 'txn", r"bridge\["),  # it is on no index: a clone is installed, with pip install -e '.[…]'
        ]
    )
)


def project_files() -> list[Path]:
    """Return the files that are in git or would be added to it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [path for name in names if name and (path := ROOT / name).is_file()]


def foreign_lines(text: str) -> list[str]:
    """The lines that name a path of one machine, the host of a package registry, or what is not there."""
    return [line for line in text.splitlines() if FOREIGN.search(line)]


def commands(readme: str) -> dict[str, str]:
    """The README's commands: each the one line of a block behind its marker."""
    return dict(re.findall(r"^<!-- command: (\w+) -->\n```bash\n(.+)\n```$", readme, re.MULTILINE))


def broken_links(page: Path) -> list[str]:
    """The links of a page to files of the project that are not there."""
    targets = re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text())
    return [target for target in targets if not (page.parent / target).exists()]


def test_no_file_names_a_machine_path_or_a_registry():
    texts = {path: path.read_bytes() for path in project_files()}
    assert len(texts) > 10
    found = {
        path.relative_to(ROOT): lines
        for path, data in texts.items()
        if b"\0" not in data and (lines := foreign_lines(data.decode()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    ["see /fa" + "rm/x", "https://pypi" + ".org/simple", "cd /wo" + "rk/main", "pip install 'txn" + "bridge[x]'"],
)
def test_a_line_that_names_a_foreign_place_is_found(line):
    assert foreign_lines(f"good\n{line}\ngood") == [line]


def test_no_lock_file_is_kept():
    assert ROOT / "uv.lock" not in project_files()


def test_the_readme_has_its_two_commands_each_in_one_line():
    prepare = "python3 -m venv .venv && .venv/bin/pip install -q -e"
    assert commands((ROOT / "README.md").read_text()) == {
        "demo": f"{prepare} . && .venv/bin/txnbridge demo",
        "tests": f"{prepare} '.[test]' && .venv/bin/pytest -n 5 --dist loadgroup --assert=plain",
    }


def test_every_link_to_a_file_leads_somewhere():
    pages = [path for path in project_files() if path.suffix == ".md"]
    assert {page.relative_to(ROOT): links for page in pages if (links := broken_links(page))} == {}


def test_the_map_in_contributing_is_the_real_tree():
    rooms = (ROOT / "CONTRIBUTING.md").read_text().partition("## The rooms")[2].split("```")[1]
    named = {name.rpartition("/")[2] for name in re.findall(r"([\w/]+)/(?!\w)", rooms)}
    folders = {parent.name for path in project_files() for parent in path.relative_to(ROOT).parents}
    assert named - folders == set()
    assert {package.name for package in packages()} - named == set()


def test_every_module_and_test_of_the_tables_of_hazards_is_there():
    pages = sorted((ROOT / "docs").glob("architecture*.md"))
    missing = [f"{page.name}: {name}" for page in pages for name in missing_names(page)]
    assert len(pages) == 4 and missing == []


def missing_names(page: Path) -> list[str]:
    """The modules and tests that a page names and that are not there."""
    text = page.read_text()
    tests = re.findall(r"([\w/]+/test_\w+\.py) ((?:`test_\w+`(?:, )?)+)", text)
    modules = re.findall(r"`([\w/]+\.py)`", text)
    backend = ROOT / "backends" / page.stem.replace("architecture-", "txnbridge_")
    assert len(tests) > 5 and len(modules) > 5
    missing = [
        name
        for file, names in tests
        for name in re.findall(r"\w+", names)
        if f"def {name}(" not in (ROOT / "tests" / file).read_text()
    ]
    return missing + [name for name in modules if not any((at / name).exists() for at in (ROOT, backend))]


def test_each_hazard_has_a_number_of_its_own_and_the_code_cites_only_those():
    pages = sorted((ROOT / "docs").glob("architecture*.md"))
    numbers = [int(number) for page in pages for number in re.findall(r"^\| H(\d+) \|", page.read_text(), re.MULTILINE)]
    cited = {
        int(number)
        for package in packages()
        for path in package.rglob("*.py")
        for citation in re.findall(r"hazards? (H\d+(?:(?:, | and )H\d+)*)", path.read_text())
        for number in re.findall(r"\d+", citation)
    }
    assert len(numbers) == len(set(numbers)) > 30
    assert len(cited) > 20 and cited - set(numbers) == set()


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[a](page.md#top) [b](gone.md#top) [c](https://example.org/gone) [d](#here) [e](gone/x.md)")
    assert broken_links(page) == ["gone.md", "gone/x.md"]
