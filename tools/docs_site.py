"""Show on mkdocs' site, as its hook, files that live elsewhere in the repository, under the links that the pages have there.

The tables of ``benchmarks/results/`` become ``results/``, ``benchmarks/NOTES.md`` becomes ``notes.md``, and the README of each switch
becomes a page under ``switches/``. Links of ``reference.md`` to sources are left out: their docstrings stand there.
On a narrow screen, options such as ``--fastdet`` and numbers with their units stay on one line, and names in tables break behind "_".
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"
SWITCHES = "torch_fastdet/switches"
NOTES = "benchmarks/NOTES.md"
SOURCE = re.compile(r"^(Code: )?\[torch_fastdet/[\w/]+\.py\](: .*)?\n+", re.MULTILINE)
CODE = re.compile(r"(?<=<code>).*?(?=</code>)", re.DOTALL)
NAME = re.compile(r"(?<=<code>)[^<]*_[^<]*(?=</code>)")
OPTION = re.compile(r"(?<![\w!/-])--?[a-z][\w-]*")
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
ROW = re.compile(r"<t[hd]\b.*?</t[hd]>", re.DOTALL)
TEXT = re.compile(r"(?<=>)[^<]+")
BREAK = re.compile(r"(?<=torch_)(?=fastdet)|(?<=forward\+)(?=backward)|(?<=fp16)(?=\()")
TOGETHER = re.compile(
    r"(?<=\d) (?=(?:ns|us|ms|s|kB|MB|MiB|GB|TB)\b)|(?<=\bn) (?== \d)|(?<=\bn =) (?=\d)|(?<=\bbatch) (?=\d)"
)


def switches() -> list[Path]:
    return sorted((ROOT / SWITCHES).glob("*/README.md"))


def page_of(switch: Path) -> str:
    return f"switches/{switch.parent.name}.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the switches' pages behind ``switches.md`` in the navigation."""
    section = next(item["Switches"] for item in config["nav"] if isinstance(item, dict) and "Switches" in item)
    section.extend(page_of(path) for path in switches() if page_of(path) not in section)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in sorted((ROOT / RESULTS).glob("*/*.md")):
        target = f"results/{path.relative_to(ROOT / RESULTS)}"
        files.append(File.generated(config, target, abs_src_path=str(path)))
    files.append(File.generated(config, "notes.md", abs_src_path=str(ROOT / NOTES)))
    for path in switches():
        files.append(File.generated(config, page_of(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    if page.file.src_uri.startswith("results/") or page.file.src_uri == "notes.md":
        page.meta["search"] = {"exclude": True}  # their rows would answer most searches
    elif page.file.src_uri == "reference.md":
        page.meta["search"] = {"boost": 0.3}
        markdown = SOURCE.sub("", markdown)
    if page.file.src_uri.startswith("switches/"):
        markdown = markdown.replace("../../../docs/", "../")
        markdown = re.sub(r"\]\(\.\./(\w+)/README\.md", r"](\1.md", markdown)
        return re.sub(r"\[([^\]]+)\]\(\.\./\.\./[^)]*\)", r"\1", markdown)  # files of the repository that are no pages
    up = "../" * (1 + page.file.src_uri.count("/"))
    markdown = markdown.replace(f"{up}{RESULTS}/", f"{up[3:]}results/").replace(f"{up}{NOTES}", f"{up[3:]}notes.md")
    return re.sub(rf"{re.escape(up)}{SWITCHES}/(\w+)/README\.md", rf"{up[3:]}switches/\1.md", markdown)


def on_page_content(html: str, **_: object) -> str:
    html = CODE.sub(lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)
    html = ROW.sub(lambda cell: TEXT.sub(lambda text: BREAK.sub("<wbr>", text[0]), cell[0]), html)
    html = CELL.sub(lambda cell: TOGETHER.sub("&nbsp;", cell[0]), html)
    return CELL.sub(lambda cell: NAME.sub(lambda name: name[0].replace("_", "_<wbr>"), cell[0]), html)
