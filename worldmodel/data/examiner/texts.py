"""Captions and texts of actions: absent, the same for all, cut, or damaged."""

import re
from collections import Counter
from collections.abc import Sequence

from worldmodel.data.examiner.measures import Measures
from worldmodel.data.examiner.report import Finding

MOJIBAKE = re.compile("Ã[\u0080-\u00bf]|â€[\u0080-\uffff]?|\ufffd|Â[\u00a0-\u00bf]")
"""UTF-8 that was read as Latin-1 or Windows-1252, and bytes that were replaced."""
MARKUP = re.compile(r"</?[a-z][a-z0-9]*( [^>]*)?/?>|&(amp|lt|gt|quot|nbsp|#\d+);", re.IGNORECASE)
PLACEHOLDERS = {
    "nan",
    "none",
    "null",
    "n/a",
    "na",
    "-",
    "?",
    "caption",
    "text",
    "unknown",
    "todo",
    "undefined",
}
MAX_WORDS = 300
"""Words of a text from which it is named: models read 64 tokens of an action, a few sentences."""
MIN_TEXTS = 8


def text_findings(episodes: Sequence[Measures]) -> list[Finding]:
    """Return what is wrong with texts."""
    texts = {each.name: each.said for each in episodes}
    with_text = [name for name, found in texts.items() if found]
    if not with_text:
        return []
    findings = []
    without = [name for name, found in texts.items() if not found]
    if without and len(without) < len(texts):
        text = f"{len(without)} of {len(texts)} episodes have no text"
        findings.append(Finding("no_text", text, True, tuple(without)))
    tests = (
        ("damaged_text", "texts with characters that were decoded wrongly", MOJIBAKE.search),
        ("markup", "texts with markup", MARKUP.search),
        ("placeholder", "a placeholder for a text", lambda text: text.strip().lower() in PLACEHOLDERS),
        ("long_text", f"texts of more than {MAX_WORDS} words", lambda text: len(text.split()) > MAX_WORDS),
    )
    for kind, what, test in tests:
        if names := [name for name, found in texts.items() if any(map(test, found))]:
            text = f"{len(names)} of {len(texts)} episodes have {what}"
            findings.append(Finding(kind, text, True, tuple(names)))
    captions = Counter(found[0] for found in texts.values() if len(found) == 1)
    if captions.total() >= MIN_TEXTS and len(captions) > 1:
        caption, count = captions.most_common(1)[0]
        usual = captions.most_common(2)[1][1]
        if len(captions) > 0.5 * (captions.total() - count) and count > max(3, 4 * usual):
            names = [name for name, found in texts.items() if found == [caption]]
            text = f"{count} of {len(texts)} episodes have one and the same text {caption[:60]!r}"
            findings.append(Finding("same_text", text, True, tuple(names)))
    elif len(captions) == 1 and captions.total() == len(texts) > 1:
        findings.append(
            Finding("same_text", f"all episodes have the text {next(iter(captions))[:60]!r}", False)
        )
    return findings
