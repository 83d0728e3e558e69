"""Names the files of ``docs/evidence`` that were taken with other native code than this.

    python benchmarks/evidence_check.py

Exit 1 where one is stale: run its command again on a card.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from evidence import REPOSITORY, csrc_sha256


def stale(folder: Path, current: str) -> list[str]:
    """One line for each file whose hash is not the current one, or that has none."""
    found = []
    for path in sorted(folder.glob("*.json")):
        taken = json.loads(path.read_text())
        if taken.get("csrc_sha256") != current:
            found.append(
                f"{path.name}: taken on {taken.get('date')} with csrc "
                f"{str(taken.get('csrc_sha256'))[:12]}; again by: {taken.get('command')}"
            )
    return found


def main() -> None:
    """Print what is stale."""
    current = csrc_sha256()
    lines = stale(REPOSITORY / "docs/evidence", current)
    print("\n".join(lines) if lines else f"all evidence is of csrc {current[:12]}")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
