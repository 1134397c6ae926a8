from __future__ import annotations

from tests.training.conftest import home, no_error_of_our_own

__all__ = ["home", "no_error_of_our_own"]
