"""Where a thread of this process stands."""

from __future__ import annotations

import os
import sys
import traceback

from gradtracer.records import SourceLocation
from gradtracer.records.base import TEXT_LENGTH

_NUM_FRAMES = 40
_OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


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


def calling_line(what: str = "") -> SourceLocation | None:
    """The innermost line of the user's program that the calling thread is in; None where all of it is libraries.

    Args:
        what: What stands there, e.g. `backward`.
    """
    torch = sys.modules.get("torch")
    torch_folder = os.path.dirname(torch.__file__ or "") + os.sep if torch else "<"
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((torch_folder, _OUR_FOLDER, "<")) and "site-packages" not in file:
            return SourceLocation(file=file, line=max(frame.f_lineno, 1), what=what or frame.f_code.co_name)
        frame = frame.f_back
    return None
