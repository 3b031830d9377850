"""The page of audits says what its files say."""

from pathlib import Path

from benchmarks.audits import page, read

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_tables_of_the_page_are_those_of_the_files() -> None:
    shown = (DOCS / "audits.md").read_text(encoding="utf-8").partition("<!-- tables -->\n")[2]
    assert shown.partition("<!-- end of tables -->")[0].strip() == page(DOCS / "audits")


def test_each_audit_is_there_once_and_says_what_it_was_of() -> None:
    audits = [each for path in sorted((DOCS / "audits").glob("*.jsonl")) for each in read(path)]
    names = [each["environment"].partition("?")[0] for each in audits]
    assert len(names) == len(set(names)) >= 150
    assert all(each["not_audited"] or len(each["versions"]) >= 2 for each in audits)
    assert not any("/root/" in str(each) or "/home/" in str(each) for each in audits)
