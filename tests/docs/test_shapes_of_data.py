"""The table of shapes of data in the guide: every row names a test that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_shape_of_data_has_its_tests() -> None:
    text = (ROOT / "docs/how-to/data.md").read_text(encoding="utf-8")
    section = text.split("## Shapes of data")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 18
    assert {row[1] for row in rows} == {"yes", "no"}
    written = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/unit").glob("test_*.py"))
    for row in rows:
        names = re.findall(r"`(test_\w+)`", row[3])
        assert names, row[0]
        for name in names:
            assert f"def {name}(" in written, name
