"""The web demo: a block being drafted, judged and committed, before one's eyes. ``dflash demo`` starts it."""
