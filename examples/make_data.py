"""Writes the small streams that `examples/pipeline.toml` joins, into `examples/data/`.

    python examples/make_data.py
    plait explain examples/pipeline.toml
    plait run examples/pipeline.toml

All three are run from the root of the repository.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

EPOCHS = [
    {
        "orders": [
            {"id": 1, "customer": 10, "ts": "2026-01-01T10:00:00Z"},
            {"id": 2, "customer": 20, "ts": "2026-01-01T10:00:30Z"},
        ],
        "payments": [{"order_id": 1, "amount": 99.5, "ts": "2026-01-01T10:05:00Z"}],
        "customers": [{"id": 10, "name": "Ada"}, {"id": 20, "name": "Ben"}],
    },
    {
        "orders": [{"id": 3, "customer": 10, "ts": "2026-01-01T10:10:00Z"}],
        # The second payment comes more than an hour after its order.
        "payments": [
            {"order_id": 3, "amount": 15.0, "ts": "2026-01-01T10:20:00Z"},
            {"order_id": 2, "amount": 20.0, "ts": "2026-01-01T11:30:00Z"},
        ],
    },
]

EXPECTED = [("Ada", 1, 99.5), ("Ada", 3, 15.0)]
"""What the pipeline's query makes of it."""


def main(folder: Path) -> None:
    """Write one JSON file per stream and epoch; Spark reads them in order of modification time."""
    folder.mkdir(parents=True, exist_ok=True)
    # Data, checkpoint and output of the example stay out of version control.
    (folder / ".gitignore").write_text("*\n")
    for epoch, streams in enumerate(EPOCHS):
        for name, rows in streams.items():
            file = folder / name / f"{epoch}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            os.utime(file, (1_700_000_000 + epoch, 1_700_000_000 + epoch))


if __name__ == "__main__":
    data = Path(__file__).parent / "data"
    main(data)
    print(f"written: {data}; now: plait run {Path(__file__).parent / 'pipeline.toml'}")
