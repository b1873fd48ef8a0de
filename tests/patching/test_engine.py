"""On modules made here, patch() and unpatch() replace, leave alone and restore the right names."""

import dataclasses
import functools
import importlib
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from torch_fastdet import _say
from torch_fastdet.patching.command_line import Launcher
from torch_fastdet.patching.engine import ALL, Host
from torch_fastdet.patching.evidence import Asks, Obstacle, plainly_on_the_cpu
from torch_fastdet.patching.replace import SwitchError, with_names
from torch_fastdet.patching.switch import GPU, Outside, Switch, Target


class Liar:
    """Claim to be a type and have no attribute at all, like absl's FLAGS, which tensorboard leaves behind."""

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


STOCK = "def area(width, height=1):\n    return 'stock'\n\n\nclass Box:\n    def size(self):\n        return 'stock'\n"


AREA = Switch("area_optim", "area", (Target(("host.shapes",), "area", area),), modules=("shapes",))


def over(active, stock, owner):
    return lambda box: f"ours over {stock(box)}"


SIZE = Switch("size_optim", "size", (Target(("host.shapes",), "Box.size", make=over),))


@pytest.fixture
def loaded(monkeypatch):
    """Put modules into sys.modules for a test."""

    def load(*modules):
        for each in modules:
            monkeypatch.setitem(sys.modules, vars(each)["__name__"], each)
        return modules[0]

    return load


@pytest.fixture
def host():
    made = Host({switch.name: switch for switch in (AREA, SIZE)}, ("host",))
    yield made
    made.unpatch()


def test_every_holder_is_replaced_and_put_back(loaded, host):
    shapes = loaded(module("host.shapes", STOCK))
    user = loaded(module("user", area=shapes.area, other=shapes.area, mine=area))
    stock = dict(vars(shapes)), dict(vars(user))
    lines = host.patch({"area_optim": True})
    assert shapes.area is user.area is user.other is area
    assert len(lines) == 3 and all(" -> tests.patching.test_engine.area" in line for line in lines)
    later = loaded(module("later", area=shapes.area))
    assert host.patch({"area_optim": True}) == lines, "twice is once"
    host.unpatch()
    assert (dict(vars(shapes)), dict(vars(user))) == stock and later.area is stock[0]["area"]
    assert user.mine is area, "who imported ours on purpose keeps it"


def test_objects_that_are_nobodys_business_are_not_touched(loaded, host):
    """No attribute of them is read: one that claims to be a type would raise for each, and a lazy module would be imported."""
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
    assert f"area_optim does not apply: area stays: it is {__name__}.test_what_a_user" in capsys.readouterr().err
    with pytest.raises(SwitchError, match=r"area_optim cannot apply: area stays: it is .*mine\."):
        host.patch({"area_optim": True})
    assert shapes.area is mine


def test_what_a_user_replaces_later_stays(loaded, host, capsys):
    shapes = loaded(module("host.shapes", STOCK))
    host.patch({})
    shapes.area = later = lambda width, height=1: "user's"
    host.unpatch()
    assert shapes.area is later and shapes.Box().size() == "stock"
    assert (
        "host.shapes.area -> tests.patching.test_engine.area was replaced since by somebody else"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("named", [False, True])
def test_a_method_that_a_user_has_wrapped_stays(loaded, host, capsys, named):
    """It stays even if the wrapper bears the original's names."""

    own = Target(("host.shapes",), "Box.size", make=lambda *_: lambda box: "ours", own=True)
    shapes = loaded(module("host.shapes", STOCK))
    stock = shapes.Box.size
    shapes.Box.size = theirs = functools.wraps(stock)(lambda box: f"user's over {stock(box)}")
    host.switches = {"size_optim": Switch("size_optim", "size", (own,))}
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
    """Each restores the function below its own, in whatever order they are undone."""

    shapes = loaded(module("host.shapes", STOCK))
    stock, hosts = shapes.area, [host, Host({}, ())]
    hosts[0].patch({"area_optim": True})
    hosts[1].patches.replace("twice", shapes, "area", area)
    hosts[order[0]].unpatch()
    assert shapes.area is area
    hosts[order[1]].unpatch()
    assert shapes.area is stock


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_hosts_may_replace_their_functions_by_one(loaded, order):
    """Each restores its own names, as the doors of YOLOv5 and Ultralytics do with bbox_iou."""
    modules = [loaded(module(f"{name}.shapes", STOCK)) for name in ("first", "second")]
    stock, hosts = [each.area for each in modules], [Host({}, (name,)) for name in ("first", "second")]
    for each, shapes in zip(hosts, modules):
        each.patches.replace("area_optim", shapes, "area", area)
    for index in order:
        hosts[index].unpatch()
        assert modules[index].area is stock[index]
        assert modules[1 - index].area is (area if index == order[0] else stock[1 - index])


def test_other_parameters_are_refused(loaded, host, capsys):
    shapes = loaded(module("host.shapes", "def area(width, depth): pass"))
    host.patch({})
    line = "host.shapes.area takes (width, depth), not (width, height)."
    assert capsys.readouterr().err.count(f"area_optim does not apply: {line}") == 1
    with pytest.raises(SwitchError, match=r"area_optim cannot apply: host\.shapes\.area takes"):
        host.patch({"area_optim": True})
    assert shapes.area is not area and not host.on and not host.patches.requests


def test_modules_that_are_imported_later(tmp_path, monkeypatch, host):
    package = tmp_path / "host"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "shapes.py").write_text(f"import host.early\n{STOCK}")
    # early is imported while shapes is. shapes has no area yet, but early's function asks for it later.
    (package / "early.py").write_text("def area():\n    from host.shapes import area\n    return area(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    host.patch({}, import_now=False)
    shapes = importlib.import_module("host.shapes")
    assert importlib.import_module("host.early").area() == "ours" and shapes.Box().size() == "ours over stock"
    assert type(shapes.__loader__).__name__ == "SourceFileLoader" and not vars(shapes.__loader__).get("exec_module")
    host.unpatch()
    assert shapes.area(2) == "stock" and shapes.Box().size() == "stock"
    for name in ("host", "host.shapes", "host.early"):
        del sys.modules[name]


def test_what_no_training_needs_is_imported_by_name(monkeypatch, host):
    """Importing Ultralytics' trackers takes half a second, so only an explicit switch does it."""
    host.switches = {"area_optim": dataclasses.replace(AREA, on_demand=True)}
    imported = []
    monkeypatch.setattr(host, "import_modules", imported.extend)
    host.patch({})
    assert host.on["area_optim"].why_not is None and not imported
    with pytest.raises(SwitchError, match="found nothing to replace"):
        host.patch({"area_optim": True})
    assert imported == ["shapes"]


def test_a_reloaded_module_is_searched_for_as_without_us(tmp_path, monkeypatch, host):
    """The module may have moved since: here it became a package."""
    package = tmp_path / "host"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "shapes.py").write_text(STOCK)
    monkeypatch.syspath_prepend(tmp_path)
    host.patch({"area_optim": True}, import_now=False)
    shapes = importlib.import_module("host.shapes")
    (package / "shapes.py").unlink()
    (package / "shapes").mkdir()
    (package / "shapes/__init__.py").write_text(f"{STOCK}\n\nmoved = True\n")
    importlib.invalidate_caches()
    assert importlib.reload(shapes).moved and shapes.area(2) == "ours"
    host.unpatch()
    assert shapes.area(2) == "stock"
    for name in ("host", "host.shapes"):
        del sys.modules[name]


def test_a_late_module_gets_the_original_of_its_package_or_the_first_one(loaded):
    target = Target(("first.shapes", "second.shapes"), "area", area)
    both = Host({"both_optim": Switch("both_optim", "area", (target,))}, ("first", "second"))
    first, second = loaded(module("first.shapes", STOCK)), loaded(module("second.shapes", STOCK))
    originals = first.area, second.area
    both.patch({})
    late = [loaded(module(name, area=first.area)) for name in ("first.late", "second.late", "train")]
    both.unpatch()
    assert (first.area, second.area) == originals
    assert [each.area for each in late] == [*originals, originals[0]]


def test_a_switch_that_needs_a_gpu(loaded, host, monkeypatch, capsys):
    host.switches = {"area_optim": AREA, "size_optim": dataclasses.replace(SIZE, evidence=(GPU,))}
    monkeypatch.setattr("torch_fastdet.patching.switch.obstacle_to_gpu", lambda: "there is no GPU.")
    loaded(module("host.shapes", STOCK))
    assert len(host.patch({ALL: True})) == 1
    assert capsys.readouterr().err.count("torch_fastdet: size_optim does not apply: there is no GPU.\n") == 1
    with pytest.raises(SwitchError, match=r"size_optim cannot apply: there is no GPU\."):
        host.patch({"size_optim": True})


def test_the_rows_of_a_class(loaded, host, capsys):
    """One method is added, one follows it, one stays with a line, one is missing, and one belongs to a class of torch."""

    def unknown(stock):
        return Obstacle("it is unknown.")

    where = ("host.shapes",)
    targets = (
        Target(where, "Box.copy", make=lambda *_: lambda box: "copied", adds=True),
        Target(where, "Box.size", make=over, after="Box.copy"),
        Target(where, "Box.area", make=over, evidence=(Asks("why", unknown),), otherwise="say"),
        Target(where, "Box.quiet", make=over, class_evidence=(Asks("why", unknown),), otherwise="nothing"),
        Target(where, "Box.gone", make=over, otherwise="nothing"),
        Target(where, "area", make=lambda *_: None),
        Target(where, "Box", make=lambda *_: Obstacle("it may be derived from."), otherwise="say"),
        Outside(torch.nn.Identity, "forward", forward := lambda self, x: x),
    )
    source = STOCK + "\n    def area(self):\n        return 1\n\n    def quiet(self):\n        return 2\n"
    shapes = loaded(module("host.shapes", source))
    stock, identity = dict(vars(shapes.Box)), torch.nn.Identity.forward
    host.switches = {"box": Switch("box", "box", targets)}
    lines = host.patch({"box": True})
    assert [line.partition(" -> ")[0] for line in lines] == [
        "box: torch.nn.modules.linear.Identity.forward",
        "box: host.shapes.Box.copy",
        "box: host.shapes.Box.size",
    ]
    said = capsys.readouterr().err
    assert said.count("box: host.shapes.Box stays: it may be") == 1
    assert said.count("box: host.shapes.Box.area stays: it is unknown.\n") == 1 and said.count("unknown") == 1
    assert shapes.Box().size() == "ours over stock" and shapes.Box().copy() == "copied" and shapes.Box().area() == 1
    assert torch.nn.Identity.forward is forward
    host.unpatch()
    assert dict(vars(shapes.Box)) == stock and torch.nn.Identity.forward is identity
    missing = Target(where, "Box.gone", make=over)
    host.switches = {"box": Switch("box", "box", (missing, Target(where, "Cube.size", make=over)))}
    host.patch({})
    said = capsys.readouterr().err
    assert "box does not apply: host.shapes has no Box.gone." in said and "host.shapes has no Cube." in said


MOVED = Switch("area_optim", "area", (Target(("host.shapes",), "area", area, moved=("host.new",)), *SIZE.targets))


@pytest.mark.parametrize("by_name", [False, True])
def test_a_main_function_that_is_gone_is_said(loaded, capsys, by_name):
    """This holds even if the module that lost it is imported later. The rest of the switch stays on, unless it was asked for by name."""
    loaded(
        module("host.shapes", STOCK.partition("class")[0].replace("area", "surface") + STOCK[STOCK.index("class") :])
    )
    loaded(module("host.new"))
    host = Host({MOVED.name: MOVED}, ("host",))
    try:
        if by_name:
            with pytest.raises(SwitchError, match="cannot apply: no area is defined in host"):
                host.patch({"area_optim": True})
            assert not host.patches.replacements
        else:
            assert len(host.patch({})) == 1
            assert "in part: area_optim (no area is defined in host.shapes" in capsys.readouterr().err
        tried = host.try_switch(MOVED)
        assert "no area is defined in host.shapes" in tried.why_not and tried.has_replaced_any()
    finally:
        host.unpatch()


def test_a_module_that_may_define_it_can_still_come(loaded, capsys):
    loaded(module("host.shapes", STOCK[STOCK.index("class") :]))
    host = Host({MOVED.name: MOVED}, ("host",))
    host.patch({"area_optim": True})
    assert "no area is defined" not in capsys.readouterr().err
    host.unpatch()


@pytest.mark.parametrize("theirs, missing", [("/clone/host/shapes.py", True), ("/user/host/shapes.py", False)])
def test_a_module_of_the_same_name_is_somebody_elses(loaded, theirs, missing):
    """A user's own top-level ``val`` does not count as YOLOv5's if it lies in another folder than YOLOv5's modules."""
    loaded(module("host.shapes", __file__=theirs), module("host.new", __file__="/clone/host/new.py"))
    host = Host({MOVED.name: MOVED}, ("host",))
    active = host.try_switch(MOVED)
    assert ("no area is defined" in (active.why_not or "")) == missing


def test_a_main_function_is_found_where_it_has_moved_to(loaded):
    loaded(module("host.shapes", STOCK[STOCK.index("class") :]))
    new = loaded(module("host.new", STOCK.partition("class")[0]))
    host = Host({MOVED.name: MOVED}, ("host",))
    host.patch({"area_optim": True})
    assert new.area is area
    host.unpatch()


def test_trying_a_switch_runs_make_and_replaces_nothing(loaded, host):
    shapes = loaded(module("host.shapes", STOCK))
    before, made = dict(vars(shapes)), []

    def make(active, stock, owner):
        made.append(stock)
        active.replace(owner, "further", area)
        return Obstacle("it is Tuesday.")

    tried = host.try_switch(Switch("box", "", (Target(("host.shapes",), "Box.size", make=make),)))
    assert made == [shapes.Box.size] and tried.why_not == "it is Tuesday." and tried.replacement(shapes.Box, "further")
    assert dict(vars(shapes)) == before and not hasattr(shapes.Box, "further") and not host.on


def test_one_line_says_what_is_on(loaded, host, capsys, monkeypatch):
    monkeypatch.setenv("TORCH_FASTDET_LOG", "info")
    loaded(module("host.shapes", STOCK))
    for name in ("a", "b"):
        host.switches[name] = Switch(name, "", (), evidence=(Asks("a GPU", lambda _: "there is no GPU."),))
    _say._showing.clear()
    _say._remove()  # of other tests in this process
    host.patch({})
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "2 switches on; off: a, b (there is no GPU); details: python -m torch_fastdet doctor" in said


def test_a_later_call_turns_no_switch_off(loaded, host, capsys):
    loaded(module("host.shapes", STOCK))
    host.patch({"area_optim": True})
    capsys.readouterr()
    assert host.patch({"fastdet": True, "area_optim": False})
    assert (
        "area_optim stays on, as an earlier patch() has turned it on: call unpatch() first" in capsys.readouterr().err
    )
    host.unpatch()
    assert not any("area_optim" in line for line in host.patch({"fastdet": True, "area_optim": False}))


def test_trials_are_not_counted():
    _say.counts.clear()
    with plainly_on_the_cpu():
        _say.count("area_optim", "areas")
    assert not _say.counts
    _say.count("area_optim", "areas")
    assert _say.counts.pop(("area_optim", "areas")) == 1


def test_a_trial_leaves_the_usual_dtype_to_other_threads(monkeypatch):
    """The default dtype is the whole process's: a thread that makes tensors meanwhile would see another one."""
    assert torch.get_default_dtype() == torch.float32
    monkeypatch.setattr(torch, "set_default_dtype", lambda _: pytest.fail("the default dtype is set"))
    with plainly_on_the_cpu():
        assert torch.ones(1).dtype == torch.float32


def test_counts_are_kept_until_the_last_framework_is_put_back(host):
    other = Host({}, ())
    for each in (host, other):
        each.patch({})
    _say.hide("tests")  # which conftest.py shows lines for
    _say.count("area_optim", "areas")
    _say.note_fallback("area_optim: a line")
    host.unpatch()
    assert _say.counts == {("area_optim", "areas"): 1} and list(_say.fallbacks) == ["area_optim: a line"]
    other.unpatch()
    assert not _say.counts and not _say.fallbacks


def test_a_copy_of_a_function_sees_what_its_module_holds_later():
    host = module("host", "def size():\n    return width * height\n", width=2, height=3)
    copy = with_names(host.size, height=5)
    assert copy() == 10
    host.width = 4
    assert copy() == 20 and host.size() == 12
    del host.width
    with pytest.raises(NameError, match="width"):
        copy()


def test_a_former_name_still_means_its_switch(host):
    new = Switch("new", "", (), needs_host=False, formerly="old")
    host.switches = {"new": new, "size": Switch("size", "", (), needs_host=False)}
    host.patch({"old": True})
    assert list(host.on) == ["new"]
    host.unpatch()
    host.patch({"fastdet": True, "old": False})
    assert list(host.on) == ["size"]
    host.unpatch()
    host.patch({"new": False, "old": True, "size": True})  # the new name decides
    assert list(host.on) == ["size"]
    flags = Launcher(host, "", "", "").split(["--old", "--no-size", "x"])
    assert flags == ({"new": True, "size": False}, ["x"])
