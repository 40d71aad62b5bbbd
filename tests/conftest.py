"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# Machines of CI are shared and slow at times; a slow example is no failure. A failing example is
# printed with what reproduces it.
settings.register_profile("headrace", deadline=None, print_blob=True)
settings.load_profile("headrace")
