"""Measures a world model against the procedural world, whose truth is known, and reports what it found.

results = suite.evaluate(WorldModel.from_pretrained("shapes-tiny"))
report.write_report(results, "outputs/eval-shapes-tiny")
"""
