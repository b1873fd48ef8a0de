"""Show on mkdocs' site, as its hook, files that live elsewhere in the repository, under the links that the pages have there.

The tables of ``benchmarks/results/`` become ``results/``, and the README of each switch becomes a page under ``switches/``. In ``reference.md``, the docstrings take the place of the links to their sources.
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
# This page is not copied to the site.
NOTES = re.compile(r"^\[benchmarks/NOTES\.md\]: .*\n?|\[(benchmarks/NOTES\.md)\]", re.MULTILINE)
SOURCE = re.compile(r"^- \[(torch_fastdet\.[\w.]+)\]\(\S+\.py\)$", re.MULTILINE)
CODE = re.compile(r"(?<=<code>).*?(?=</code>)", re.DOTALL)
OPTION = re.compile(r"(?<![\w!/-])--?[a-z][\w-]*")
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
ROW = re.compile(r"<t[hd]\b.*?</t[hd]>", re.DOTALL)
TEXT = re.compile(r"(?<=>)[^<]+")
BREAK = re.compile(
    r"(?<=\w_)(?=\w)|(?<=[a-z]\.)(?=[a-z]+_)|(?<=EMA\.)(?=\w)|(?<=forward\+)(?=backward)|(?<=NHWC)(?=fp)|(?<=NCHW)(?=fp)|(?<=fp16)(?=\()"
)
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
    for path in switches():
        files.append(File.generated(config, page_of(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    if page.file.src_uri.startswith("results/"):
        page.meta["search"] = {"exclude": True}  # their rows would answer most searches
    elif page.file.src_uri == "reference.md":
        page.meta["search"] = {"boost": 0.3}
        markdown = SOURCE.sub(r"\n::: \1\n", markdown)
    if page.file.src_uri.startswith("switches/"):
        markdown = markdown.replace("../../../docs/", "../")
        markdown = re.sub(r"\]\(\.\./(\w+)/README\.md", r"](\1.md", markdown)
        return re.sub(r"\[([^\]]+)\]\(\.\./\.\./[^)]*\)", r"\1", markdown)  # files of the repository that are no pages
    up = "../" * (1 + page.file.src_uri.count("/"))
    markdown = NOTES.sub(lambda link: link[1] or "", markdown.replace(f"{up}{RESULTS}/", f"{up[3:]}results/"))
    return re.sub(rf"{re.escape(up)}{SWITCHES}/(\w+)/README\.md", rf"{up[3:]}switches/\1.md", markdown)


def on_page_content(html: str, **_: object) -> str:
    html = CODE.sub(lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)
    html = ROW.sub(lambda cell: TEXT.sub(lambda text: BREAK.sub("<wbr>", text[0]), cell[0]), html)
    return CELL.sub(lambda cell: TOGETHER.sub("&nbsp;", cell[0]), html)
