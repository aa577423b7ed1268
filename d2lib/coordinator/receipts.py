"""What the run's own receipts say about its jobs. The ledger decides; a receipt that is not its is refused."""

from __future__ import annotations

from pathlib import Path

from d2lib.errors import Refused
from d2lib.evidence.layout import RECEIPT
from d2lib.evidence.ledger import read_ledger
from d2lib.evidence.receipts import Receipt, read_receipt
from d2lib.files import sha256_file


def done_receipt(root: Path, step: str) -> tuple[Path, Receipt] | None:
    """The newest receipt of a step (PHASE or PHASE-JOB) with status done, and its path.

    Raises:
        Refused: the ledger is broken, or the receipt is not the one in the ledger.
    """
    if not root.is_dir():
        return None
    for line in reversed(read_ledger(root)):
        if line.name == step and line.status == "done":
            path = root / step / f"attempt-{line.attempt}" / RECEIPT
            if str(sha256_file(path)) != line.receipt_json_sha256:
                raise Refused("a receipt is not the one in the ledger", where=path, remedy=f"see d2 verify {root}")
            return path, read_receipt(path)
    return None


def check_output(root: Path, receipt: Receipt, name: str) -> None:
    """A file that a receipt says was made is there with the same bytes; raises Refused."""
    record = next((item for item in receipt.outputs if item.path == name), None)
    if record is None:
        raise Refused(f"the receipt of {receipt.name} does not name {name}", where=root / receipt.name)
    found = str(sha256_file(root / name))
    if found != record.sha256:
        raise Refused(f"{name} is not what {receipt.name} made", expected=record.sha256, found=found, where=root / name)


def product(receipt: Receipt, label: str) -> str:
    """The path from the run root of the output that a receipt names under a label; raises Refused without one."""
    for output in receipt.outputs:
        if output.label == label:
            return output.path
    raise Refused(f"the receipt of {receipt.name} names no {label}", where=f"{receipt.name}/attempt-{receipt.attempt}")
