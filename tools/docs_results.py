"""mkdocs' hook: the site has every table of benchmarks/results/, which the pages link to as the repository has them."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

RESULTS = "benchmarks/results"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config["config_file_path"]).parent / RESULTS
    for path in sorted(root.glob("*/*.md")):
        files.append(File.generated(config, f"results/{path.relative_to(root)}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    return markdown.replace(f"../{RESULTS}/", "results/")
