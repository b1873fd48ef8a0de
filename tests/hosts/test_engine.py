"""The engine of patch() and unpatch() on modules made here: what is replaced, what is left alone, what is put back."""

import ast
import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torch_fastdet
from torch_fastdet.hosts.engine.host import ALL, Host
from torch_fastdet.hosts.engine.replace import SwitchError
from torch_fastdet.hosts.engine.switch import Name, Switch, class_of


class Liar:
    """As absl's FLAGS, which tensorboard leaves behind: it says that it is a type, and has no attribute at all."""

    def __getattribute__(self, name):
        if name == "__class__":
            return type
        raise AttributeError(name)


def area(width, height=1):
    return "ours"


def module(name, source="", **values):
    made = ModuleType(name)
    exec(source, vars(made))
    vars(made).update(values)
    return made


# The modules of these tests: other tests load packages that have a Box, too.
OURS = ("host", "later", "user")
STOCK = "def area(width, height=1):\n    return 'stock'\n\n\nclass Box:\n    def size(self):\n        return 'stock'\n"


class AreaOptim(Switch):
    name = "area_optim"
    help = "area"
    modules = ("shapes",)
    names = (Name("area", area, ("host.shapes",)),)


class SizeOptim(Switch):
    name = "size_optim"
    help = "size"

    def visit(self, module):
        box = class_of(module, "Box")
        if box is not None and box.__module__.partition(".")[0] in OURS and not self.has_replaced(box):
            stock = box.size
            self.replace(box, "size", lambda box: f"ours over {stock(box)}")


@pytest.fixture
def loaded(monkeypatch):
    """Puts modules into sys.modules for a test."""

    def load(*modules):
        for each in modules:
            monkeypatch.setitem(sys.modules, vars(each)["__name__"], each)
        return modules[0]

    return load


@pytest.fixture
def host():
    made = Host({switch.name: switch for switch in (AreaOptim, SizeOptim)}, ("host",))
    yield made
    made.unpatch()


def test_every_holder_is_replaced_and_put_back(loaded, host):
    shapes = loaded(module("host.shapes", STOCK))
    user = loaded(module("user", area=shapes.area, other=shapes.area, mine=area))
    stock = dict(vars(shapes)), dict(vars(user))
    lines = host.patch({"area_optim": True})
    assert shapes.area is user.area is user.other is area
    assert len(lines) == 3 and all(" -> tests.hosts.test_engine.area" in line for line in lines)
    later = loaded(module("later", area=shapes.area))
    assert host.patch({"area_optim": True}) == lines, "twice is once"
    host.unpatch()
    assert (dict(vars(shapes)), dict(vars(user))) == stock and later.area is stock[0]["area"]
    assert user.mine is area, "who imported ours on purpose keeps it"


def test_objects_that_are_nobodys_business_are_not_touched(loaded, host):
    """No attribute of them is read: one that claims to be a type raises for each, a lazy module would be imported."""
    shapes = loaded(module("host.shapes", STOCK, flags=Liar(), area_of_flags=Liar()))
    loaded(module("user", flags=Liar(), Box=Liar(), area=Liar()))
    spec = importlib.util.find_spec("wave")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    loaded_before = type(lazy)
    sys.modules["not_a_module"] = Liar()
    sys.modules["lazy_wave"] = lazy
    try:
        host.patch({})
        assert shapes.area is area and shapes.Box().size() == "ours over stock"
        host.unpatch()
        assert type(lazy) is loaded_before is not ModuleType, "it has been loaded"
    finally:
        del sys.modules["not_a_module"], sys.modules["lazy_wave"]


def test_what_a_user_has_replaced_stays(loaded, host, capsys):
    def mine(width, height=1):
        return "user's"

    shapes = loaded(module("host.shapes", STOCK))
    shapes.area = mine
    assert host.patch({"fastdet": True, "size_optim": False}) == ()
    assert shapes.area is mine
    assert (
        "area_optim does not apply: found nothing to replace: there is no host.shapes.area" in capsys.readouterr().err
    )
    with pytest.raises(SwitchError, match="area_optim cannot apply: found nothing to replace"):
        host.patch({"area_optim": True})
    assert shapes.area is mine


def test_what_a_user_replaces_later_stays(loaded, host, capsys):
    shapes = loaded(module("host.shapes", STOCK))
    host.patch({})
    shapes.area = later = lambda width, height=1: "user's"
    host.unpatch()
    assert shapes.area is later and shapes.Box().size() == "stock"
    assert (
        "host.shapes.area -> tests.hosts.test_engine.area was replaced since by somebody else"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("named", [False, True])
def test_a_method_that_a_user_has_wrapped_stays(loaded, host, capsys, named):
    """Even in a wrapper that bears stock's names."""

    class Stock(Switch):
        name, help = "size_optim", "size"

        def visit(self, module):
            box = class_of(module, "Box")
            if box is not None and box.__module__ == "host.shapes":
                self.replace_stock(box, "size", lambda box: "ours", "host")

    shapes = loaded(module("host.shapes", STOCK))
    stock = shapes.Box.size
    shapes.Box.size = theirs = functools.wraps(stock)(lambda box: f"user's over {stock(box)}")
    host.switches = {"size_optim": Stock}
    if named:
        with pytest.raises(
            SwitchError, match=r"size_optim cannot apply: host\.shapes\.Box\.size has been replaced by somebody"
        ):
            host.patch({"size_optim": True})
    else:
        host.patch({})
        assert capsys.readouterr().err.count("size_optim does not apply: host.shapes.Box.size has been replaced") == 1
    assert shapes.Box.size is theirs
    shapes.Box.size = stock
    host.patch({"size_optim": True})
    assert shapes.Box().size() == "ours"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_hosts_may_replace_one_name(loaded, host, order):
    """Each goes on with what lies below it, in whatever order they are put back."""

    class Twice(Switch):
        name, help = "twice", "twice"

        def start(self):
            self.replace(sys.modules["host.shapes"], "area", area)

    shapes = loaded(module("host.shapes", STOCK))
    stock, hosts = shapes.area, [host, Host({"twice": Twice}, ())]
    hosts[0].patch({"area_optim": True})
    hosts[1].patch({"twice": True})
    hosts[order[0]].unpatch()
    assert shapes.area is area
    hosts[order[1]].unpatch()
    assert shapes.area is stock


def test_other_parameters_are_refused(loaded, host, capsys):
    shapes = loaded(module("host.shapes", "def area(width, depth): pass"))
    host.patch({})
    line = "host.shapes.area takes (width, depth), not (width, height)."
    assert capsys.readouterr().err.count(f"area_optim does not apply: {line}") == 1
    with pytest.raises(SwitchError, match=r"area_optim cannot apply: host\.shapes\.area takes"):
        host.patch({"area_optim": True})
    assert shapes.area is not area and not host.on and not host.requests


def test_modules_that_are_imported_later(tmp_path, monkeypatch, host):
    package = tmp_path / "host"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "shapes.py").write_text(f"import host.early\n{STOCK}")
    # It is imported while shapes is: what it takes is not there yet, but its function is asked for later.
    (package / "early.py").write_text("def area():\n    from host.shapes import area\n    return area(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    host.switch_on(["area_optim", "size_optim"], (), import_now=False)
    shapes = importlib.import_module("host.shapes")
    assert importlib.import_module("host.early").area() == "ours" and shapes.Box().size() == "ours over stock"
    assert type(shapes.__loader__).__name__ == "SourceFileLoader" and not vars(shapes.__loader__).get("exec_module")
    host.unpatch()
    assert shapes.area(2) == "stock" and shapes.Box().size() == "stock"
    for name in ("host", "host.shapes", "host.early"):
        del sys.modules[name]


def test_a_late_module_gets_the_original_of_its_package_or_the_first_one(loaded):
    class BothOptim(Switch):
        name, help = "both_optim", "area"
        names = (Name("area", area, ("first.shapes", "second.shapes")),)

    both = Host({"both_optim": BothOptim}, ("first", "second"))
    first, second = loaded(module("first.shapes", STOCK)), loaded(module("second.shapes", STOCK))
    originals = first.area, second.area
    both.patch({})
    late = [loaded(module(name, area=first.area)) for name in ("first.late", "second.late", "train")]
    both.unpatch()
    assert (first.area, second.area) == originals
    assert [each.area for each in late] == [*originals, originals[0]]


def test_a_switch_that_needs_a_gpu(loaded, host, monkeypatch, capsys):
    monkeypatch.setattr(SizeOptim, "needs_gpu", True)
    monkeypatch.setattr("torch_fastdet.hosts.engine.switch.missing_gpu", lambda: "there is no GPU.")
    loaded(module("host.shapes", STOCK))
    assert len(host.patch({ALL: True})) == 1
    assert capsys.readouterr().err.count("torch_fastdet: size_optim does not apply: there is no GPU.\n") == 1
    with pytest.raises(SwitchError, match=r"size_optim cannot apply: there is no GPU\."):
        host.patch({"size_optim": True})


PACKAGE = Path(torch_fastdet.__file__).parent


def test_the_engine_knows_no_host():
    """And its modules import each other in one direction."""
    order = ["signature", "import_hook", "replace", "switch", "host", "launcher"]
    for place, name in enumerate(order):
        tree = ast.parse((PACKAGE / "hosts/engine" / f"{name}.py").read_text())
        imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [each for each in imported if each.startswith(("torch_fastdet.yolov5", "torch_fastdet.ultralytics"))]
        of_the_engine = [each.rpartition(".")[2] for each in imported if each.startswith("torch_fastdet.hosts.engine.")]
        assert all(order.index(each) < place for each in of_the_engine), name
