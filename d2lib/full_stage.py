"""The coordinator's command under the name that its procedure uses: `python -m d2lib.full_stage`."""

from __future__ import annotations

from d2lib.coordinator.command import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
