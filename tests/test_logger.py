"""Lines go to ``torch_fastdet.logger``. If the user has not configured logging, they are shown on stderr."""

from __future__ import annotations

import logging
import os

import pytest

import torch_fastdet
from tests import starter
from tests.yolov5.real import with_torch_fastdet
from torch_fastdet import _say

SAY = "from torch_fastdet import _say; "
WARN = "_say.say('slow', 30); _say.say('fast')"
ROOT_AT = "import logging; logging.basicConfig(format='mine %(message)s', level=logging.{}); "
CASES = {
    "nobody": (WARN, "slow\n"),
    "shown": ("_say.show('host'); " + WARN, "torch_fastdet: slow\ntorch_fastdet: fast\n"),
    "hidden again": ("_say.show('host'); _say.hide('host'); " + WARN, "slow\n"),
    "configured": (ROOT_AT.format("INFO") + "_say.show('host'); " + WARN, "mine slow\nmine fast\n"),
    "configured later": ("_say.show('host'); " + ROOT_AT.format("WARNING") + WARN, "mine slow\n"),
    "own handler": ("import logging; _say.logger.addHandler(logging.NullHandler()); _say.show('host'); " + WARN, ""),
    "no stderr": ("import sys; sys.stderr = None; _say.show('host'); " + WARN, ""),
    "closed stderr": ("import sys; sys.stderr.close(); _say.show('host'); " + WARN, ""),
    "quieter": (
        "import os; os.environ['TORCH_FASTDET_LOG'] = 'warning'; _say.show('host'); " + WARN,
        "torch_fastdet: slow\n",
    ),
    "disabled": ("import logging; _say.show('host'); logging.disable(logging.INFO); " + WARN, "torch_fastdet: slow\n"),
    "filtered": (
        "_say.show('host'); _say.logger.addFilter(lambda record: record.levelno > 20); " + WARN,
        "torch_fastdet: slow\n",
    ),
    "quiet": ("import os; os.environ['TORCH_FASTDET_LOG'] = 'quiet'; _say.show('host'); " + WARN, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_where_lines_go(case, tmp_path):
    program, wanted = CASES[case]
    environment = with_torch_fastdet(dict(os.environ)) | {"TORCH_FASTDET_LOG": ""}
    done = starter.python(["-c", SAY + program], tmp_path, environment, seconds=100)
    assert (done.returncode, done.stdout) == (0, wanted)


@pytest.mark.parametrize("number, said", [(1, "1 batch"), (0, "0 batches"), (1200, "1,200 batches")])
def test_counts_are_words(number, said):
    assert _say.counted(number, "batches") == said
    assert _say.counted(1, "training passes without graphs") == "1 training pass without graphs"


def test_an_unknown_level_is_an_error(monkeypatch):
    monkeypatch.setenv("TORCH_FASTDET_LOG", "loud")
    with pytest.raises(ValueError, match="TORCH_FASTDET_LOG is 'loud', but one of debug, info, warning, error, quiet"):
        _say.show("tests")


def test_the_logger_is_public():
    assert torch_fastdet.logger is logging.getLogger("torch_fastdet")


def test_unpatch_leaves_logging_as_it_was():
    from torch_fastdet import _say, yolov5

    _say.hide("tests")
    before = torch_fastdet.logger.level, list(torch_fastdet.logger.handlers)
    yolov5.patch(upsample_optim=True)
    assert torch_fastdet.logger.level == logging.DEBUG  # as tests/conftest.py asks
    yolov5.unpatch()
    assert (torch_fastdet.logger.level, torch_fastdet.logger.handlers) == before


def test_names_that_are_not_utf8_can_be_written(caplog):
    """Python decodes such bytes of a file's name to surrogates, which a handler cannot encode."""
    _say.say("caf\udce9.jpg", logging.WARNING)
    assert caplog.messages == ["caf\\udce9.jpg"]
