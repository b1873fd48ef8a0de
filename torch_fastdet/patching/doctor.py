"""Implements ``python -m torch_fastdet.<framework> doctor``: runs ``patch()`` without replacing, and prints what applies, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from torch_fastdet import memory
from torch_fastdet._build_info import build_info
from torch_fastdet.patching.engine import Host
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.patching.replace import describe
from torch_fastdet.patching.switch import Active, Outcome, Outside, Switch, Target


@dataclass
class SwitchReport:
    """Hold what was found of one switch. With ``in_part`` it replaces something although ``why_not`` says why not everything."""

    name: str
    asked: bool
    why_not: Obstacle | None
    in_part: bool = False
    notice: str | None = None
    targets: list[Outcome] = field(default_factory=list)
    rewrites: dict[str, str] = field(default_factory=dict)  # and the evidence for each

    @property
    def applies(self) -> bool:
        return self.why_not is None


def examine(host: Host, asked: Collection[str] = (), options: Mapping[str, str] | None = None) -> list[SwitchReport]:
    """Return what ``patch()`` would do for each switch. ``options`` are the training's own, by their names, as the user typed them."""
    if host.obstacle_to_host() is None and (prefix := host.prefix()):
        # patch() looks at some modules when the framework imports them.
        targets = [
            target for switch in host.switches.values() for target in switch.targets if isinstance(target, Target)
        ]
        places = {place: None for target in targets for place in target.places if place.startswith(prefix)}
        with contextlib.suppress(Exception):  # the switch that needs it says why
            host.import_modules(place.removeprefix(prefix) for place in places)
    return [_examine(host, switch, switch.name in asked, options or {}) for switch in host.switches.values()]


def _examine(host: Host, switch: Switch, asked: bool, options: Mapping[str, str]) -> SwitchReport:
    failed: Obstacle | None = None
    try:
        active = host.try_switch(switch)
    except Exception as error:  # whatever its modules need
        active = Active(switch, host.patches)
        failed = Obstacle(f"its modules cannot be imported: {type(error).__name__}: {error}")
    given = (question(options[option]) for option, question in switch.options.items() if option in options)
    by_options = next((answer for answer in given if answer is not None), None)
    why_not = host.obstacle(switch) or by_options or active.why_not or failed
    report = SwitchReport(switch.name, asked, why_not)
    report.rewrites = {each.line: ", ".join(map(str, each.evidence)) for each in switch.rewrites}
    report.in_part = active.why_not is not None and by_options is None and active.has_replaced_any()
    report.notice = None if report.why_not or switch.notice is None else switch.notice()
    if host.obstacle_to_host() is None or not switch.needs_host:
        report.targets = [_target(target, active.outcomes.get(id(target))) for target in switch.targets]
    return report


def _target(target: Target | Outside, outcome: Outcome | None) -> Outcome:
    if isinstance(target, Outside):
        name, evidence = f"{describe(target.owner)}.{target.name}", ["the code of torch"]
    else:
        name = f"{target.where[0]}.{target.name}"
        evidence = ["nobody else's code"] * target.own
        evidence += [str(each) for each in (*target.all_evidence, *target.class_evidence)]
    return dataclasses.replace(outcome or Outcome(name, found=False), evidence=evidence)


def facts(host: str, version: str | None) -> dict[str, object]:
    """Return the machine and what is installed on it."""
    info = build_info()
    budgets = {name: os.environ.get(name, "not set") for name in (memory.HOST_BUDGET, memory.GPU_BUDGET)}
    budgets["images on the host"] = memory.words(memory.host_budget())
    if torch.cuda.is_available():
        gpu = torch.device("cuda", torch.cuda.current_device())
        before = "at most, before the training's first steps, " * memory.waits_for_steps()
        budgets["images on the GPU"] = before + memory.words(memory.gpu_budget(gpu))
    return {
        "host": host,
        "host_version": version,
        "torch_fastdet": info["version"],
        "python": platform.python_version(),
        "torch": f"{info['torch_running']} (built with {info['torch_built_with']})",
        "cuda": info["cuda"],
        "architectures": " ".join(info["architectures"]),
        "gpu": info["gpu"],
        "driver": info["driver"],
        "memory": budgets,
    }


def show(facts: Mapping[str, object], reports: Collection[SwitchReport], notes: Collection[str] = ()) -> None:
    for name, value in facts.items():
        text = ", ".join(f"{key}: {each}" for key, each in value.items()) if isinstance(value, Mapping) else value
        print(f"{name:<16}{'none' if text is None else text}")
    print()
    rows = [("switch, and what it replaces", "applies", "evidence")]
    rows += [row for report in reports for row in _rows(report)]
    widths = [max(len(row[0]) for row in rows), max(min(len(row[1]), 40) for row in rows)]
    for name, applies, evidence in rows:
        print(f"{name:<{widths[0]}}  {applies:<{widths[1]}}  {evidence}".rstrip())
    for note in notes:
        print(note)


def _rows(report: SwitchReport) -> list[tuple[str, str, str]]:
    name = f"{report.name} (asked for)" if report.asked else report.name
    verdict = "yes" if report.why_not is None else f"{'in part' if report.in_part else 'no'}: {report.why_not}"
    rows = [(name, f"{verdict}; {report.notice}" if report.notice else verdict, "")]
    for target in report.targets:
        lost = "not looked at" if report.why_not and not report.in_part else "not in this version"
        applies = f"no: {target.obstacle}" if target.obstacle else "yes" if target.found else lost
        rows.append((f"  {target.name}", applies, ", ".join(target.evidence)))
    known = "where the model's parts are known"
    rows += [(f"  in a captured step: {line}", known, evidence) for line, evidence in report.rewrites.items()]
    return rows


def run(
    host: Host,
    name: str,
    version: str | None,
    asked: Collection[str],
    options: Mapping[str, str],
    as_json: bool,
    notes: Collection[str] = (),
) -> int:
    """Print the report, and return the exit status: 2 if a switch that was asked for by name cannot apply, else 0."""
    found = facts(name, version)
    if (missing := host.obstacle_to_host()) is not None:
        print(json.dumps({**found, "switches": [], "notes": [str(missing)]}) if as_json else f"{name}: {missing}")
        return 2 if asked else 0
    reports = examine(host, asked, options)
    if as_json:
        switches = [{**dataclasses.asdict(report), "applies": report.applies} for report in reports]
        print(json.dumps({**found, "switches": switches, "notes": list(notes)}, indent=2))
    else:
        show(found, reports, notes)
    return 2 if any(report.asked and not report.applies for report in reports) else 0
