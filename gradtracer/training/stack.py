"""Where a thread of this process stands, and which lines of it are the user's."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from typing import NamedTuple

from gradtracer.records import SourceLocation
from gradtracer.records.base import TEXT_LENGTH

_NUM_FRAMES = 40
# Where torch is imported: without it nothing here meets a frame of its.
_TORCH = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or "<torch>/") + os.sep
_NOT_THE_USERS = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    _TORCH,
    sysconfig.get_path("stdlib") + os.sep,
    "<",
)
_PASSES_ON = tuple(
    os.path.join(_TORCH, *parts)
    for parts in (
        ("nn", "modules", "module.py"),
        ("nn", "parallel", ""),
        ("utils", "_contextlib.py"),
        ("amp", "autocast_mode.py"),
    )
)
"""Files of torch through which a call of the user's reaches a function of the user's and nothing else happens."""


class Place(NamedTuple):
    """A line of the user's program that is being run."""

    file: str
    line: int
    function: str


class Call(NamedTuple):
    """A line of the user's that called a function of the user's."""

    file: str
    line: int
    callee_file: str
    callee_line: int
    """First line of the function, its decorators included."""
    callee: str


def training_stack(thread_id: int) -> str:
    """The calls that a thread is in, innermost last, without stopping it.

    Args:
        thread_id: As `threading.get_ident` returns it.

    Returns:
        At most the innermost 40 calls and 4,000 characters, as a traceback prints them; empty where the thread is gone.
    """
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return ""
    calls = traceback.format_list(traceback.extract_stack(frame, limit=_NUM_FRAMES))
    text = ""
    for call in reversed(calls):
        if len(call) + len(text) > TEXT_LENGTH:
            break
        text = call + text
    return text


def is_users(file: str) -> bool:
    """Whether a source file is the user's: not ours, torch's, Python's or another package's."""
    return not file.startswith(_NOT_THE_USERS) and "site-packages" not in file


def calling_line(what: str = "") -> SourceLocation | None:
    """The innermost line of the user's program that the calling thread is in; None where all of it is libraries.

    Args:
        what: What stands there, e.g. `backward`.
    """
    place = next(iter(user_places(1)), None)
    return (
        SourceLocation(file=os.path.abspath(place.file), line=place.line, what=what or place.function)
        if place
        else None
    )


def user_places(limit: int = 6) -> tuple[Place, ...]:
    """Lines of the user's program that the calling thread is in, innermost first."""
    found: list[Place] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < limit:
        code = frame.f_code
        if is_users(code.co_filename):
            found.append(Place(code.co_filename, max(frame.f_lineno, 1), code.co_name))
        frame = frame.f_back
    return tuple(found)


def user_calls() -> set[Call]:
    """Calls from the user's program to itself that the calling thread is in, without those through other packages."""
    found: set[Call] = set()
    frame, callee = sys._getframe(1), None
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            if callee is not None:
                line = max(frame.f_lineno, 1)
                found.add(Call(code.co_filename, line, callee.co_filename, callee.co_firstlineno, callee.co_name))
            callee = code
        elif not code.co_filename.startswith(_PASSES_ON):
            callee = None
        frame = frame.f_back
    return found
