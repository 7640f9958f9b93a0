"""docs/failures.md names tests: each `file: Class.test` there has to be one. Prints those that are not."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def exists(file, group, name):
    for source in [*ROOT.glob(f"tests/*/{file}.py"), *ROOT.glob(f"tests/*/{file}.cpp")]:
        text = source.read_text()
        if source.suffix == ".py":
            body = re.search(rf"^class {group}\(.*?(?=^class |\Z)", text, re.M | re.S)
            if body and re.search(rf"^    def {name}\(self", body[0], re.M):
                return True
        elif re.search(rf"^TEST(_F|_P)?\({group},\s*{name}\)", text, re.M):
            return True
    return False


page = (ROOT / "docs/failures.md").read_text()
rows = [row for row in page.splitlines() if row.startswith("|") and not re.match(r"\|(---|\s*what happens)", row)]
missing = [f"a row without a test: {row}" for row in rows if not re.search(r"`\w+: \w+\.\w+`", row)]
names = re.findall(r"`(\w+): (\w+)\.(\w+)`", page)
missing += [f"there is no test {file}: {group}.{name}" for file, group, name in names if not exists(file, group, name)]
print("\n".join(missing) or f"{len(rows)} rows, {len(names)} tests, all there")
sys.exit(1 if missing or not rows else 0)
