"""The core stays free of Torch, the glue includes narrow headers, and Python imports go one way."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = sorted(path for path in (ROOT / "csrc/core").rglob("*") if path.suffix in {".h", ".cuh", ".cu", ".cpp"})


def name(path: Path) -> str:
    return str(path.relative_to(ROOT / "csrc"))


def test_core_includes_no_torch():
    for path in CORE:
        found = re.findall(
            r'#\s*include\s*[<"]((?:torch/|ATen/|c10/|pybind11|Python\.h|ops/)[/\w.]*)', path.read_text()
        )
        assert not found, f"{name(path)} includes {found}; csrc/core must stay free of Torch"


def test_glue_includes_narrow_headers():
    wide = re.compile(r"#\s*include\s*[<\"](torch/extension\.h|torch/all\.h|torch/torch\.h|ATen/ATen\.h)")
    for path in (ROOT / "csrc").rglob("*.cpp"):
        found = wide.findall(path.read_text())
        assert not found, f"{name(path)} includes {found}, which costs a minute of compilation; include narrow headers"


PACKAGE = ROOT / "torch_fastdet"
THIRD_PARTIES = {"yolov5", "ultralytics", "utils", "models"}  # the modules of a YOLOv5 checkout are utils and models


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(name: str, everywhere: bool = False) -> set[str]:
    """Return full names that a module imports at import time, or with ``everywhere`` inside functions as well."""

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not everywhere:
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{name} imports relatively"
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    found.add(full if full in MODULES else str(child.module))
            visit(child)

    found: set[str] = set()
    visit(ast.parse(MODULES[name].read_text()))
    return found


def test_no_import_circle():
    """Packages run before their modules, so that a module also needs the ``__init__`` of every package above it."""
    needs = {name: {other for other in imports_of(name) if other in MODULES} for name in MODULES}
    for name, others in needs.items():
        for other in list(others):
            parts = other.split(".")
            # This begins at 2, as the top-level package loads parts at first use.
            above = {".".join(parts[:i]) for i in range(2, len(parts))}
            others |= {package for package in above if not name.startswith(package + ".") and package != name}
    del needs["torch_fastdet"]  # likewise: it imports ops and flops, and everything imports it
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "imports go round: " + " -> ".join([*path[path.index(name) :], name])
        if name in done or name not in needs:
            return
        for other in sorted(needs[name] - {name}):
            visit(other, (*path, name))
        done.add(name)

    for name in needs:
        visit(name, ())


def test_graphs_know_no_host():
    hosts = ("torch_fastdet.yolov5", "torch_fastdet.ultralytics")
    for name in (name for name in MODULES if name.startswith("torch_fastdet.graphs")):
        assert not [other for other in imports_of(name, everywhere=True) if other.startswith(hosts)], name


def test_only_the_hosts_import_third_parties():
    for name in (name for name in MODULES if not {"yolov5", "ultralytics"} & set(name.split("."))):
        found = {other for other in imports_of(name, everywhere=True) if other.partition(".")[0] in THIRD_PARTIES}
        assert not found, (
            f"{name} imports {found}; only yolov5/, ultralytics/ and the files of these names import third parties"
        )


def test_no_private_name_is_imported_across_folders():
    """A name with an underscore belongs to its folder. Those beside the folders belong to the package."""
    for name, path in MODULES.items():
        folder = path.parent.relative_to(ROOT).parts
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        found = [(*(node.module or "").split("."), alias.name) for node in nodes for alias in node.names]
        private = [
            ".".join(parts)
            for parts in found
            if parts[0] == "torch_fastdet" and parts[: len(folder)] != folder
            if any(part.startswith("_") and not part.endswith("__") for part in parts[2:])
        ]
        assert not private, name
