"""Evaluation on recorded episodes of any data source.

The truth is what was recorded: no world, judge or labels are needed. Every table compares the model with
simpler predictions, see `subjects`.
"""
