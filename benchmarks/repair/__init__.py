"""Faulty runs that mend themselves, measured against their healthy twins; and healthy runs that must be spared."""
