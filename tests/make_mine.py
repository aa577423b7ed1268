"""A tiny case for params/mine: python tests/make_mine.py FOLDER writes target, drafter and the four files there."""

from __future__ import annotations

import sys
from pathlib import Path

from traffic_case import conversations, write_drafter, write_jsonl, write_qwen

COUNTS = {"train": 65, "dev": 30, "heldout": 24, "general": 12}


def main(folder: Path) -> None:
    """Write the case into a new folder."""
    folder.mkdir(parents=True)
    write_drafter(folder / "drafter", write_qwen(folder / "target"))
    for number, (name, count) in enumerate(COUNTS.items()):
        lines = conversations(count, seed=number)
        for line in lines:
            line["customer"] = f"{name} {line['customer']}"
        write_jsonl(folder / f"{name}.jsonl", lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
