"""Say what stands against a release of this tree: ``make release-check``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tools import api, gpu_report

ROOT = Path(__file__).resolve().parents[1]
NAME = re.compile(r"^(?:class |torch_fastdet::)?([\w.]+)", re.MULTILINE)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def newest_section() -> tuple[str, str, str]:
    """Return version, date and text of the changelog's first section."""
    _, version, date, text, *_ = re.split(
        r"^## \[(.*?)\] - (.*)\n", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE
    )
    return version, date, text


def unmentioned(before: str, now: str, changelog: str) -> list[str]:
    """Return the public names whose lines differ from the last release's, and that no word of the changelog's section names."""
    changed = set(before.splitlines()) ^ set(now.splitlines())
    full = {found[1].removesuffix(".__init__") for line in changed if (found := NAME.match(line))}
    names = {name.rpartition(".")[2] for name in full}
    return sorted(name for name in names if not re.search(rf"\b{re.escape(name)}\b", changelog))


def problems() -> list[str]:
    found = []
    version = (ROOT / "torch_fastdet/_version.py").read_text().split('"')[1]
    section, date, text = newest_section()
    if section != version:
        found.append(f"CHANGELOG.md begins with {section}, but torch_fastdet/_version.py says {version}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        found.append(f"CHANGELOG.md gives {section} the date {date!r}; write year-month-day")
    if "[project.urls]" not in (ROOT / "pyproject.toml").read_text() or not (ROOT / ".github/CODEOWNERS").exists():
        found.append(
            "[project.urls] of pyproject.toml or .github/CODEOWNERS is missing; write the public address and its owners"
        )
    if "example.invalid" in (ROOT / "mkdocs.yml").read_text():
        found.append("site_url or repo_url of mkdocs.yml is a placeholder; write the public addresses")
    if api.FILE.read_text() != api.text():
        found.append("tests/api.txt is not of this tree; type: python -m tools.api")
    if git("status", "--porcelain"):
        found.append("git status names files that are not committed")
    if git("tag", "--list", f"v{version}"):
        found.append(f"there is a tag v{version} already; set torch_fastdet/_version.py")
    before = git("describe", "--tags", "--abbrev=0", "--match", "v*")
    missing = unmentioned(git("show", f"{before}:tests/api.txt"), api.FILE.read_text(), text) if before else []
    if missing:
        found.append(f"CHANGELOG.md says nothing of what differs from {before}: {', '.join(missing)}")
    if gpu_report.check():
        found.append("a GPU report is missing, of another tree or failed, as the line above says")
    return found


def main() -> int:
    found = problems()
    for problem in found:
        print(f"release-check: {problem}")
    if not found:
        print("release-check: nothing stands against a release; next: make test-all lint test-asan wheels")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
