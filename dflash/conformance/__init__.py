"""One set of tiny checkpoints and golden traces that every backend must reproduce.

``cases`` says what is tested, ``checkpoints`` writes the models, ``reference`` computes them in plain numpy,
``goldens`` keeps what it said, and ``run`` holds a backend against that. Nothing here needs a tensor library.
"""
