"""The suites of ``dflash bench`` beside acceptance: what a round costs, whole generations beside other programs, and
matrix products against the memory's bandwidth.

Each suite measures into a dataclass whose ``to_dict`` computes every figure of its record, so that the figures can be
tested without a clock. Cells and arms take turns, and turns in going first; a figure is the median over repeats with
its smallest and largest; a ratio is taken within a repeat, between neighbours in time, and spread after that.
"""
