"""Training a drafter in PyTorch: features, forward, loss, loop, evaluation, response regeneration."""
