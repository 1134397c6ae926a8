"""Every exception that the package raises on purpose.

::

    GradtracerError
    ├── UsageError (ValueError)         what the caller passed cannot work
    │   ├── UnknownRun
    │   ├── AmbiguousRun
    │   ├── UnknownLayer
    │   ├── UnknownFix
    │   ├── BadParameter
    │   ├── UnknownIntervention
    │   ├── InvalidDocument
    │   └── TrackerInUse
    ├── RunUnavailable                  the run exists, but cannot do this now
    │   ├── RunNotLive
    │   ├── RunDidNotAnswer
    │   └── RunRefused
    └── Untrusted                       what lies on disk cannot be believed
        ├── UntrustedRunDirectory
        └── CorruptJournal

Each message says what was expected, what came, and what to do next; it is shown to people and to agents as it is.
"""

from __future__ import annotations


class GradtracerError(Exception):
    """Base of everything below."""


class UsageError(GradtracerError, ValueError):
    """What the caller passed cannot work."""


class UnknownRun(UsageError):
    """No run has this id."""


class AmbiguousRun(UsageError):
    """No run was named and there is more than one to choose from."""


class UnknownLayer(UsageError):
    """The run has no layer of this name."""


class UnknownFix(UsageError):
    """There is no fix of this code."""


class BadParameter(UsageError):
    """A parameter is unknown, of the wrong type, or outside its bounds."""


class UnknownIntervention(UsageError):
    """The run has no intervention of this id."""


class InvalidDocument(UsageError):
    """A file is no document of ours: malformed, incomplete, or of another schema."""


class TrackerInUse(UsageError):
    """The model already has an open tracker."""


class RunUnavailable(GradtracerError):
    """The run exists, but cannot do what was asked now."""


class RunNotLive(RunUnavailable):
    """The run's process is gone, so nothing can be changed any more."""


class RunDidNotAnswer(RunUnavailable):
    """The run's process did not answer within the time allowed."""


class RunRefused(RunUnavailable):
    """The run's process answered, and said no."""


class Untrusted(GradtracerError):
    """What lies on disk cannot be believed."""


class UntrustedRunDirectory(Untrusted):
    """A run directory belongs to someone else or is open to others."""


class CorruptJournal(Untrusted):
    """A journal cannot be read, or was written by a newer version."""
