"""Evaluation of world models.

A world (`worldmodel.worlds`) brings an `EvalSuite`: a judge of frames, cases with known outcomes, and goals.
This package plays the cases, computes rates, PSNR, SSIM, drift and speed, and writes the report and the model
card.

model = WorldModel.from_pretrained("shapes-tiny")
results = suite.evaluate(model)
report.write_report(results, "outputs/eval-shapes-tiny", suite.suite_of(model.config))
"""
