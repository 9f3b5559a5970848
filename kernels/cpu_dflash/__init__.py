"""Compiled C++ for the passes of few rows that a round on a CPU is made of; ``choose.py`` says where it is used."""

from cpu_dflash.build import Unavailable
from cpu_dflash.choose import MOST_ROWS, description, forced, reason_against, use_compiled
from cpu_dflash.product import compiled as product

__all__ = ["MOST_ROWS", "Unavailable", "description", "forced", "product", "reason_against", "use_compiled"]
