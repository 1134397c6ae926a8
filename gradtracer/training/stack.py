"""Where a thread of this process stands."""

from __future__ import annotations

import sys
import traceback

from gradtracer.records.base import TEXT_LENGTH

_NUM_FRAMES = 40


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
