"""Run work in a forked process that never returns into pytest."""

import os
import traceback
from collections.abc import Callable


def fork(work: Callable[[], int | None]) -> int:
    """Run the work in a child, which exits with its result, or with 1 if it raises. Return the child's process id.

    An exception that left the child's copy of the test would make it run the other tests a second time.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = work() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def exit_status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
