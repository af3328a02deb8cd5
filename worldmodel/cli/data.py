"""`worldmodel data`: examine a data source, and divide it into training and held-out episodes."""

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from worldmodel.cli.parser import Parser, seed_number
from worldmodel.errors import InputError


def main(argv: list[str]) -> None:
    """Run one of the two."""
    args = _parser().parse_args(argv)
    from worldmodel.data import check
    from worldmodel.data.facts import write_parts
    from worldmodel.data.tables import open_table
    from worldmodel.io import atomic_file
    from worldmodel.media import write_image

    examined = check.open_examined(args.source)
    if args.what == "check":
        findings = check.check(examined)
        print(json.dumps(asdict(findings), indent=2) if args.json else findings.as_text())
        write_image(check.draw_sheet(examined), args.sheet)
        if not args.json:
            print(f"contact sheet: {args.sheet}")
        return
    path = Path(args.source).expanduser()
    if not path.exists():
        raise InputError(
            f"{args.source!r} is on the Hub, where a split cannot be stored; download it to a folder."
        )
    held, counts = check.split(examined, args.share, args.by, args.seed)
    if path.is_file():
        with closing(open_table(path)) as table:
            train, stored = write_parts(table, held, path, args.force)
        use = f"the rest: {train}"
    else:
        stored, use = path / "meta" / "split.json", "data.sources.NAME.split: held-out"
        with atomic_file(stored) as temporary:
            temporary.write_text(
                json.dumps({"by": args.by, "seed": args.seed, "held-out": held}), encoding="utf-8"
            )
    print(f"{len(held)} of {examined.size} episodes are held out: {stored} ({use})")
    for name in ("exact", "near"):
        share = counts[name] / max(counts["pairs"], 1)
        print(f"(frame, action) pairs of these that are in training, {name}: {counts[name]} ({share:.1%})")


def _parser() -> Parser:
    parser = Parser(
        "worldmodel data",
        "check: read a source whole and say what is in it: lengths, how often each action changed pixels,\n"
        "broken episodes, actions that are repeated or shifted; and draw some of it.\n"
        "split: hold out episodes, and count what they share with training. A LeRobot dataset stores which;\n"
        "a table NAME is divided into NAME-train.jsonl and NAME-held.jsonl beside it.",
        "worldmodel data check doorkey\n  worldmodel data split doorkey --by layout",
    )
    parser.add_argument("what", choices=("check", "split"), help="what to do")
    parser.add_argument(
        "source", metavar="SOURCE", help="LeRobot dataset, or the clips.jsonl of `worldmodel record`"
    )
    parser.add_argument("--json", action="store_true", help="check: print JSON")
    parser.add_argument(
        "--sheet", default="contact_sheet.png", metavar="FILE", help="check: picture (default: %(default)s)"
    )
    parser.add_argument(
        "--share", type=float, default=0.1, help="split: share of episodes (default: %(default)s)"
    )
    parser.add_argument(
        "--by", choices=("episode", "layout"), default="episode", help="split: what is held out"
    )
    parser.add_argument("--force", action="store_true", help="split: replace the parts of a table")
    parser.add_argument("--seed", type=seed_number, default=0, help="split: seed (default: %(default)s)")
    return parser
